"""What a commit says besides its rows.

Its frame says what changed since the commit before it. The first commit of a segment, and one that replaces a table's
rows, say all. A SegmentFile completes each of the others from the commit before it.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from shoal.errors import StorageError
from shoal.log.fields import Fields, is_number
from shoal.log.inherited import Inherited
from shoal.records.excerpt import excerpt
from shoal.table.changes import Mark

ID_DIGITS = 32
WRITER_DIGITS = 16
MOST_STEPS = 2**63 - 1
MOST_SAVE_ID = 128  # characters
# Tables that the repr of a commit names.
_MOST_SHOWN = 8
# The fields of a commit, in the order in which they are written. Any other is kept as it is.
_FIELDS = ("version", "time", "step", "event_time", "tables", "dense", "rng", "metadata", "kept", "whole", "save")
_CHAIN_FIELDS = ("epoch", "writer", "before")


def id_of(payload: bytes | bytearray | memoryview) -> str:
    """Returns the id of a commit, a hash of its frame's payload. It covers the rows through their checksums, and
    earlier commits through the id of the one before."""
    return hashlib.blake2b(payload, digest_size=ID_DIGITS // 2).hexdigest()


def shown_time(seconds: float) -> str:
    """Returns a time as text for people, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


@dataclass(frozen=True)
class TableCommit:
    """What a commit says of one table.

    step: updates of the table so far. rows: how many rows the table had. puts, deletes: how many this commit has.
    replaces: whether the rows that are not among the puts are gone.
    hyper: the optimizer's settings. optimizer: its name; "" for none, None where the commit does not say.
    policies: what the table's policies remember, as JSON has it.
    """

    step: int
    rows: int
    puts: int = 0
    deletes: int = 0
    replaces: bool = False
    hyper: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    policies: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {
            "step": self.step,
            "rows": self.rows,
            "puts": self.puts,
            "deletes": self.deletes,
            "replaces": self.replaces,
            "hyper": {name: list(one) if isinstance(one, tuple) else one for name, one in self.hyper.items()},
            **({} if self.optimizer is None else {"optimizer": self.optimizer}),
            **({"policies": dict(self.policies)} if self.policies else {}),
        }

    def to_frame(self, before: "TableCommit | None") -> dict[str, Any]:
        """Returns the same without zeros, and without what `before` says as well."""
        is_same = before is not None and (self.hyper, self.optimizer) == (before.hyper, before.optimizer)
        left_out = {"hyper", "optimizer"} if is_same else set()
        said = self.to_json()
        if before is not None and self.policies == before.policies:
            left_out.add("policies")
        elif before is not None:
            said["policies"] = dict(self.policies)
        counts = ("puts", "deletes", "replaces")
        return {name: value for name, value in said.items() if name not in left_out and (value or name not in counts)}

    @staticmethod
    def from_json(where: str, value: Any, before: "TableCommit | None" = None) -> "TableCommit":
        """Reads what came from a file. before: what the commit before says, which may be left out here."""
        fields = Fields(where, value)
        has = fields.value
        if before is not None and not {"hyper", "optimizer"} & has.keys():
            hyper, optimizer = before.hyper, before.optimizer
        else:
            hyper = _hyper(fields.object("hyper")) if "hyper" in has else {}
            optimizer = fields.text("optimizer") if "optimizer" in has else None
        return TableCommit(
            fields.integer("step"),
            fields.integer("rows"),
            fields.integer("puts") if "puts" in has else 0,
            fields.integer("deletes") if "deletes" in has else 0,
            fields.flag("replaces") if "replaces" in has else False,
            hyper,
            optimizer,
            _policies(fields, before),
        )

    def unchanged(self) -> "TableCommit":
        """Returns what the next commit says of the table if it does not change it."""
        return replace(self, puts=0, deletes=0, replaces=False) if self.puts or self.deletes or self.replaces else self


def _policies(fields: Fields, before: TableCommit | None) -> Mapping[str, Any]:
    """Returns what a table's policies remember: as in the commit before, where this one does not say."""
    if "policies" in fields.value:
        return fields.object("policies").value
    return {} if before is None else before.policies


def _hyper(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.value.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(map(is_number, numbers)):
            raise StorageError(f"[{fields.where}] {name}: wanted numbers; got {value!r:.100}. The file is damaged.")
        found[name] = tuple(map(float, numbers)) if isinstance(value, list) else float(value)
    return found


@dataclass(frozen=True)
class DenseFile:
    """A file of dense weights: the version that they were committed with, its size and its checksum."""

    version: int
    bytes: int
    crc32c: int
    # The entries that the file has, where this process wrote it and need not read it.
    holds: frozenset[str] | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {"version": self.version, "bytes": self.bytes, "crc32c": self.crc32c}

    @staticmethod
    def from_json(fields: Fields) -> "DenseFile":
        """Reads what came from a file."""
        return DenseFile(fields.integer("version", 1), fields.integer("bytes"), fields.integer("crc32c", 0, 2**32 - 1))


@dataclass(frozen=True, repr=False)
class Commit:
    """Changes of some tables that are visible together.

    time: when it was made, in seconds since 1970.
    event_time: the time of the newest event that was trained on, as the user counts.
    tables: all tables that the log has at this version.
    kept: the newest version that was on the disk when this commit began.
    epoch, writer: the writer's number and name. Each writer that opens the log and commits has a higher number, and
        draws a name. 0 and "" in format 1, which had neither.
    before: the id of the commit before it; None for the first one, and where it is not known.
    save: the id of the save that it is a part of, where several ranks saved.
    is_partial: whether it says only what it changed of tables, dense weights and generators, because the commit before
        it, which says the rest, cannot be read.
    fields: fields that this Shoal does not know, as they came from the file.
    id: tells commits apart, also those of one version in copies of a log that were both written to. "" where it is not
        known, in snapshots of format 1.
    """

    version: int
    time: float
    step: int | None = None
    event_time: float | None = None
    tables: Mapping[str, TableCommit] = field(default_factory=dict)
    dense: DenseFile | None = None
    rng: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    kept: int = 0
    epoch: int = 0
    writer: str = ""
    before: str | None = None
    save: str | None = None
    is_partial: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __repr__(self) -> str:
        """One line, without generators and settings."""
        tables = ", ".join(f"{name}: {one.rows} rows" for name, one in list(self.tables.items())[:_MOST_SHOWN])
        more = f", {len(self.tables) - _MOST_SHOWN} more" if len(self.tables) > _MOST_SHOWN else ""
        said = [f"version={self.version}", f"step={self.step}", f"time={shown_time(self.time)}"]
        said += [] if self.event_time is None else [f"event_time={self.event_time:g}"]
        said.append(f"tables={{{tables}{more}}}")
        said += [] if self.dense is None else [f"dense=version {self.dense.version}"]
        said += [f"metadata={excerpt(dict(self.metadata))}"] if self.metadata else []
        return f"Commit({', '.join(said)})"

    @property
    def mark(self) -> Mark:
        """Its version and its id, which name it."""
        return self.version, self.id or f"time {self.time!r}"

    def after(self, before: "Commit | None") -> "Commit":
        """Returns the commit with what the one before it says of dense weights, where this one has none, and of tables
        that this one does not name."""
        if before is None:
            return self
        kept = {name: one.unchanged() for name, one in before.tables.items()}
        return replace(self, tables=kept | dict(self.tables), dense=self.dense or before.dense)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: all but the id."""
        return {
            "version": self.version,
            "time": self.time,
            "step": self.step,
            "event_time": self.event_time,
            "tables": {name: table.to_json() for name, table in self.tables.items()},
            "dense": None if self.dense is None else self.dense.to_json(),
            "rng": {name: base64.b64encode(state).decode() for name, state in self.rng.items()},
            "metadata": dict(self.metadata),
            "kept": self.kept,
            **self._chain(),
            **({} if self.save is None else {"save": self.save}),
            **self.fields,
        }

    def _chain(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "writer": self.writer, "before": self.before} if self.epoch else {}

    def to_frame(self, before: "Commit | None") -> tuple[dict[str, Any], bytes]:
        """Returns what the commit's frame holds: JSON, and the states of generators. before: the commit before it, of
        which it does not repeat what is unchanged; None for a commit that says all."""
        tables, dense, rng = (before.tables, before.dense, before.rng) if before is not None else ({}, None, {})
        said: dict[str, Any] = {"version": self.version, "time": self.time}
        said |= {"step": self.step} if self.step is not None else {}
        said |= {"event_time": self.event_time} if self.event_time is not None else {}
        said["tables"] = {
            name: table.to_frame(tables.get(name))
            for name, table in self.tables.items()
            if name not in tables or table != tables[name].unchanged()
        }
        said |= {"dense": self.dense.to_json()} if self.dense is not None and self.dense != dense else {}
        is_drawn = self.rng != rng
        said |= {"rng": {name: len(state) for name, state in self.rng.items()}} if is_drawn else {}
        said |= {"metadata": dict(self.metadata)} if self.metadata else {}
        said |= {"kept": self.kept, **self._chain()}
        said |= {"whole": False} if before is not None else {}
        said |= {"save": self.save} if self.save is not None else {}
        return said | dict(self.fields), b"".join(self.rng.values()) if is_drawn else b""

    @staticmethod
    def from_json(
        where: str, value: Any, known_as: str = "", binary: bytes = b"", before: "Commit | None" = None
    ) -> "Commit":
        """Reads what came from a file. known_as: its id. binary: the states of generators, where they are not in the
        JSON. before: the commit before it, where that is known. Raises CheckpointError where the commit needs a field
        that this Shoal does not know."""
        fields = Fields(where, value)
        others = fields.others((*_FIELDS, *_CHAIN_FIELDS))
        is_whole = fields.flag("whole") if "whole" in fields.value else True
        base = None if is_whole or before is None or before.is_partial else before
        step = fields.value.get("step")
        made_at = fields.number("time")
        if made_at is None:
            raise StorageError(f"[{where}] time: wanted a number; got nothing. The file is damaged.")
        return Commit(
            fields.integer("version", 1),
            made_at,
            None if step is None else fields.integer("step", -(2**63)),
            fields.number("event_time"),
            _tables(fields, {} if base is None else base.tables),
            _dense(fields, None if base is None else base.dense),
            _rng(fields, binary, {} if base is None else base.rng),
            fields.object("metadata").value if "metadata" in fields.value else {},
            fields.integer("kept"),
            fields.integer("epoch", 1) if "epoch" in fields.value else 0,
            fields.digits("writer", WRITER_DIGITS) if "epoch" in fields.value else "",
            None if fields.value.get("before") is None else fields.digits("before", ID_DIGITS),
            fields.text("save") if "save" in fields.value else None,
            not is_whole and base is None,
            others,
            known_as,
        )


def _tables(fields: Fields, before: Mapping[str, TableCommit]) -> Mapping[str, TableCommit]:
    """Returns the tables that a commit names, and those of the commit before that it does not name."""
    said = {
        name: TableCommit.from_json(f"{fields.where}, table {name!r:.100}", one, before.get(name))
        for name, one in fields.object("tables").value.items()
    }
    return Inherited(said, before) if before else said


def _dense(fields: Fields, before: DenseFile | None) -> DenseFile | None:
    return before if fields.value.get("dense") is None else DenseFile.from_json(fields.object("dense"))


def _rng(fields: Fields, binary: bytes, before: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Returns the states of generators, which are one after the other in `binary`, or in base64."""
    found, at = {}, 0
    said = fields.object("rng") if "rng" in fields.value else None
    for name, value in said.value.items() if said is not None else ():
        assert said is not None
        if isinstance(value, str):
            found[name] = _unbase64(said, name)
        else:
            found[name] = binary[at : at + said.integer(name)]
            at += said.integer(name)
    if at != len(binary):
        raise StorageError(f"[{fields.where}] rng: wanted {at} bytes; got {len(binary)}. The file is damaged.")
    return before if said is None else found


def _unbase64(fields: Fields, name: str) -> bytes:
    try:
        return base64.b64decode(fields.text(name), validate=True)
    except (binascii.Error, ValueError):
        raise StorageError(f"[{fields.where}] {name!r:.100}: wanted base64. The file is damaged.") from None
