"""Rows of a table in a checkpoint or a log, on their way out: piece by piece, never all of them in memory."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.checkpoint.loading import require_one_save
from shoal.checkpoint.ranks import Rank, parts_of
from shoal.config.checked import integer
from shoal.errors import CheckpointError, InputError, NotFoundError, StorageError
from shoal.log.change import TableChange
from shoal.log.files import Files, require_folder
from shoal.log.reader import LogReader
from shoal.log.snapshot import buckets_of
from shoal.log.version import Version, Winners
from shoal.records import Layout, Rows, join

# What tells the importer of a table, in addition to its rows.
LAYOUT, VERSION, STEP, SINCE = "shoal.layout", "shoal.version", "shoal.step", "shoal.since"
_PIECE_BYTES = 32 << 20

SomeT = TypeVar("SomeT", Rows, TableChange)


class Outgoing:
    """A table at a version, of all ranks that saved it."""

    def __init__(self, path: str | Path, table: str, version: int | None) -> None:
        self.where = f"export {path}"
        self._table = table
        require_folder(f"checkpoint {path}", path)
        self._readers = [LogReader(Files(part)) for part in parts_of(path)]
        self._versions = [self._version(reader, version) for reader in self._readers]
        require_one_save(self.where, self._versions)
        layouts = [one.layouts[table] for one in self._versions]
        for layout in layouts[1:]:
            if difference := layouts[0].difference(layout):
                raise CheckpointError(
                    f"[{self.where}] ranks saved table {table!r} with different layouts: {difference}."
                )
        self.layout: Layout = layouts[0]
        self.version = self._versions[0].commit.version
        said = [one.commit.tables[table] for one in self._versions]
        self.rows = sum(one.rows for one in said)
        if self.rows > (most := sum(one.most_rows(table) for one in self._versions)):
            raise StorageError(
                f"[{self.where}] table {table!r}: its commit says {self.rows} rows; its files have {most} at most. "
                f"`shoal verify` says whether it is damaged."
            )
        self.step = max(one.step for one in said)

    def _version(self, reader: LogReader, wanted: int | None) -> Version:
        found = reader.at(wanted)
        if found is None:
            raise CheckpointError(f"[log {reader.files.root}] nothing was committed to it yet.")
        if self._table not in found.layouts:
            has = ", ".join(map(repr, found.layouts)) or "none"
            raise NotFoundError(f"[{self.where}] table: wanted one that is there: {has}; got {self._table!r}.")
        return found

    def told(self) -> dict[str, str]:
        """What the file says in addition to the rows."""
        layout = json.dumps(self.layout.to_json(), ensure_ascii=False)
        return {LAYOUT: layout, VERSION: str(self.version), STEP: str(self.step)}

    def pieces(self, min_score: float | None) -> Iterator[Rows]:
        """Yields all rows, each once; if a score is given, those whose score is at least that."""
        for rows in self._of_ranks(lambda rank: self._versions[rank].rows(self._table)):
            yield rows if min_score is None else _with_score(rows, min_score)

    def changes(self, since: int) -> Iterator[TableChange]:
        """The last change of each key after a version."""
        integer(self.where, "since", since, low=0, high=2**63 - 1)
        for reader, version in zip(self._readers, self._versions, strict=True):
            oldest, newest = reader.manifest.segments[0] - 1, version.commit.version
            if since < oldest:
                raise CheckpointError(
                    f"[{self.where}] since: wanted a version from {oldest} to {newest}, as versions up to {oldest} are "
                    f"in a snapshot alone; got {since}. Leave it out to export all rows."
                )
            if since > newest:
                raise InputError(f"[{self.where}] since: wanted a version up to {newest}; got {since}.")
        yield from self._of_ranks(lambda rank: self._changes_of(self._readers[rank], self._versions[rank], since))

    def _of_ranks(self, part: Callable[[int], Iterator[SomeT]]) -> Iterator[SomeT]:
        """What each rank has, one rank after another. Raises CheckpointError at the end where two have the same key.

        Of two ranks that have a key, at least one has it outside of its buckets. Only such keys are held in memory.
        """
        ranks = len(self._versions)
        astray = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for rank in range(ranks):
            for some in part(rank):
                if ranks > 1 and bool((strays := ~self._is_own(some.keys, rank)).any()):
                    astray.append(some.keys[strays])
                yield some
        held = torch.cat(astray).sort().values
        if not len(held):
            return
        self._require_none(held[1:][held[1:] == held[:-1]])
        for rank in range(ranks):
            for some in part(rank):
                own = some.keys[self._is_own(some.keys, rank)]
                self._require_none(own[held[torch.searchsorted(held, own).clamp_(max=len(held) - 1)] == own])

    def _is_own(self, keys: Tensor, rank: int) -> Tensor:
        """Whether each key is of the rank's buckets."""
        first, end = Rank(rank, len(self._versions)).buckets(self.layout.buckets)
        buckets = buckets_of(keys.contiguous(), self.layout.buckets)
        return (buckets >= first) & (buckets < end)

    def _require_none(self, twice: Tensor) -> None:
        if len(twice):
            raise CheckpointError(
                f"[{self.where}] wanted each key of table {self._table!r} in the part of one rank; got {int(twice[0])} "
                f"in those of two. Save it by ranks that share its keys."
            )

    def _changes_of(self, reader: LogReader, version: Version, since: int) -> Iterator[TableChange]:
        commits = list(reader.commits(since, version.commit.version))
        table = self._table
        replacing = [n for n, one in enumerate(commits) if table in one.commit.tables and _replaces(one.commit, table)]
        last = replacing[-1] if replacing else 0
        winners = Winners(table, commits[last:])
        put = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for rows in winners.rows():
            put.append(rows.keys.clone())
            yield TableChange(table, puts=rows)
        # What was there or came, and was not put since: deleted by key, or gone when all rows were replaced.
        gone = [winners.keys]
        if replacing:
            gone.append(Winners(table, commits[:last]).keys)
            before = reader.at(since) if since else None
            if before is not None and table in before.layouts:
                gone.extend(rows.keys.clone() for rows in before.rows(table))
        deleted = torch.unique(torch.cat(gone))
        deleted = deleted[~torch.isin(deleted, torch.cat(put))]
        if len(deleted):
            yield TableChange(table, deletes=deleted)


def _replaces(commit: Any, table: str) -> bool:
    return bool(commit.tables[table].replaces)


def _with_score(rows: Rows, least: float) -> Rows:
    assert rows.scores is not None
    kept: Tensor = rows.scores >= least
    return rows if bool(kept.all()) else rows.some(kept)


def checked_score(where: str, given: Any) -> float | None:
    """What `min_score` may be."""
    if given is None:
        return None
    if not isinstance(given, (int, float)) or isinstance(given, bool) or math.isnan(given):
        raise InputError(f"[{where}] min_score: wanted a number; got {given!r}.")
    return float(given)


def rows_each(layout: Layout) -> int:
    """Rows of a piece that is written or read at once: weights as float32, state, key and score."""
    return max(_PIECE_BYTES // replace(layout.format, dtype="float32").record_bytes, 1)


def regrouped(pieces: Iterable[Rows], each: int) -> Iterator[Rows]:
    """The same rows in pieces of that size, the last one smaller: commits of a log may be of a few rows each."""
    waiting: list[Rows] = []
    count = 0
    for piece in pieces:
        rows = piece
        while count + len(rows) >= each:
            yield join([*waiting, rows.some(slice(0, each - count))])
            rows = rows.some(slice(each - count, len(rows)))
            waiting, count = [], 0
        if len(rows):
            waiting.append(rows)
            count += len(rows)
    if waiting:
        yield join(waiting)
