"""The manifest: which tables, snapshots and segments a log is made of. A file that it does not name is no part of
it."""

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shoal import _native
from shoal.errors import CheckpointError, StorageError
from shoal.log.commit import WRITER_DIGITS
from shoal.log.fields import Fields, whole
from shoal.log.files import MOST_MANIFEST_BYTES, Files, read_sealed_json, sealed_json, write_file
from shoal.records import Layout

FORMAT = "shoal log"
FORMAT_VERSION = 2
_FIELDS = ("format", "version", "id", "tables", "snapshots", "segments", "kept_from", "skipped", "epoch", "writer")


@dataclass(frozen=True)
class SnapshotEntry:
    """A complete snapshot, and the checksum of its list of blocks."""

    version: int
    crc32c: int
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)  # that this Shoal does not know


@dataclass(frozen=True)
class Manifest:
    """What a log is made of. A table's number is its place among the layouts."""

    identity: str  # 32 hexadecimal digits, drawn when the log is made
    layouts: tuple[Layout, ...] = ()
    snapshots: tuple[SnapshotEntry, ...] = ()  # ascending
    segments: tuple[int, ...] = ()  # first versions, ascending; the last one is written to
    kept_from: int = 0  # versions before it were given up, though some of their rows may still be there
    # Versions that repairs took out, first and last of each range, ascending: their numbers are not used again.
    skipped: tuple[tuple[int, int], ...] = ()
    # Of the last writer: each process that opens the log and writes has a higher number, and draws a name.
    epoch: int = 0
    writer: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # that this Shoal does not know, as they came from the file

    def number_of(self, table: str) -> int | None:
        """Returns the number of a table; None where the log does not have it."""
        return next((n for n, layout in enumerate(self.layouts) if layout.name == table), None)

    @property
    def oldest(self) -> int:
        """The oldest version that can be read."""
        first = self.segments[0]
        return max(first if self.begins_with_nothing else self.snapshots[0].version, self.kept_from)

    @property
    def begins_with_nothing(self) -> bool:
        """Whether the segments begin with the very first version, before which there is no snapshot."""
        return self.segments[0] == self.after(0)

    def after(self, version: int) -> int:
        """Returns the number of the version after one."""
        skipped = self._range_of(version + 1)
        return version + 1 if skipped is None else skipped[1] + 1

    def before(self, version: int) -> int:
        """Returns the number of the version before one."""
        skipped = self._range_of(version - 1)
        return version - 1 if skipped is None else skipped[0] - 1

    def is_skipped(self, version: int) -> bool:
        """Returns whether a repair took a version out."""
        return self._range_of(version) is not None

    def _range_of(self, version: int) -> tuple[int, int] | None:
        """Returns the range of skipped versions that this one is in."""
        at = bisect_right(self.skipped, version, key=lambda one: one[0]) - 1
        return self.skipped[at] if at >= 0 and version <= self.skipped[at][1] else None


def next_epoch(manifest: Manifest) -> Manifest:
    """Returns the manifest as that of another writer."""
    return replace(manifest, epoch=manifest.epoch + 1, writer=os.urandom(WRITER_DIGITS // 2).hex())


def new_manifest(first_version: int = 1) -> Manifest:
    """Returns the manifest of a log without tables."""
    return Manifest(os.urandom(16).hex(), segments=(first_version,))


def write_manifest(files: Files, manifest: Manifest) -> None:
    """Puts a manifest in the place of the one before, at once. Raises StorageError, and writes nothing, where the
    manifest contradicts itself."""
    _check(files, manifest)
    value = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "id": manifest.identity,
        "tables": [layout.to_json() for layout in manifest.layouts],
        "snapshots": [{"version": one.version, "crc32c": one.crc32c, **one.fields} for one in manifest.snapshots],
        "segments": list(manifest.segments),
        "kept_from": manifest.kept_from,
        **({"skipped": [list(one) for one in manifest.skipped]} if manifest.skipped else {}),
        **({"epoch": manifest.epoch, "writer": manifest.writer} if manifest.epoch else {}),
        **manifest.fields,
    }
    data = sealed_json(value)
    if len(data) > MOST_MANIFEST_BYTES:
        raise StorageError(
            f"[file {files.manifest}] wanted at most {MOST_MANIFEST_BYTES} bytes; got {len(data)}, of "
            f"{len(manifest.layouts)} tables and {len(manifest.segments)} segments. Nothing was written. Compact the "
            f"log, open it with a larger segment=, or commit some tables to another one."
        )
    write_file(files.manifest, data)


def read_manifest(files: Files) -> Manifest:
    """Returns the manifest as it is now. Raises StorageError where it is damaged, and CheckpointError where it is of a
    newer format."""
    value = Fields(f"file {files.manifest}", read_sealed_json(files.manifest, limit=MOST_MANIFEST_BYTES))
    if value.text("format") != FORMAT:
        raise StorageError(f"[file {files.manifest}] wanted a {FORMAT}; got {value.text('format')!r:.100}.")
    if (version := value.integer("version", 1)) > FORMAT_VERSION:
        raise CheckpointError(
            f"[file {files.manifest}] this Shoal reads formats up to {FORMAT_VERSION}; the log is of {version}. "
            f"Install a newer Shoal."
        )
    others = value.others(_FIELDS)
    identity = value.text("id")
    if not re.fullmatch("[0-9a-f]{32}", identity):
        raise StorageError(f"[file {files.manifest}] id: wanted 32 hexadecimal digits; got {identity!r:.100}.")
    manifest = Manifest(
        identity,
        tuple(value.items("tables", lambda where, item: Layout.from_json(item, where))),
        tuple(value.items("snapshots", _snapshot)),
        tuple(value.items("segments", whole)),
        value.integer("kept_from") if "kept_from" in value.value else 0,
        tuple(value.items("skipped", _range)) if "skipped" in value.value else (),
        value.integer("epoch", 1) if "epoch" in value.value else 0,
        value.digits("writer", WRITER_DIGITS) if "epoch" in value.value else "",
        others,
    )
    _check(files, manifest)
    return manifest


def _snapshot(where: str, item: Any) -> SnapshotEntry:
    fields = Fields(where, item)
    others = fields.others(("version", "crc32c"))
    return SnapshotEntry(fields.integer("version"), fields.integer("crc32c", high=2**32 - 1), others)


def _range(where: str, item: Any) -> tuple[int, int]:
    if not isinstance(item, list) or len(item) != 2:
        raise StorageError(f"[{where}] wanted two versions; got {item!r:.100}. The file is damaged.")
    return whole(where, item[0]), whole(where, item[1])


def _check(files: Files, manifest: Manifest) -> None:
    where = f"[file {files.manifest}]"
    names = [layout.name for layout in manifest.layouts]
    if len(set(names)) < len(names):
        raise StorageError(f"{where} wanted each table once; got {names!r:.200}. The file is damaged.")
    versions = [one.version for one in manifest.snapshots]
    for what, numbers in (("snapshots", versions), ("segments", list(manifest.segments))):
        if numbers != sorted(set(numbers)):
            raise StorageError(f"{where} {what}: wanted ascending versions; got {numbers!r:.200}.")
    if not manifest.segments or manifest.segments[0] < 1:
        raise StorageError(f"{where} segments: wanted one at least, from version 1 on; got {manifest.segments}.")
    ends = [end for one in manifest.skipped for end in one]
    if ends != sorted(ends) or (ends and ends[0] < 1):
        raise StorageError(f"{where} skipped: wanted ascending ranges of versions; got {manifest.skipped!r:.200}.")
    first = manifest.segments[0]
    if manifest.after(versions[0] if versions else 0) < first:
        raise StorageError(f"{where} wanted segments from the oldest snapshot on; they begin at {first}.")


@contextmanager
def changing_manifest(files: Files) -> Iterator[Callable[[Manifest], None]]:
    """Holds the lock under which a manifest is changed, and gives a function that writes the changed one. Used as

    with changing_manifest(files) as write:
        write(replace(read_manifest(files), ...))
    """
    lock = _native.FileLock.take(files.manifest_lock, "manifest", wait=True)  # other processes hold it for a moment

    def write(manifest: Manifest) -> None:
        if not lock.is_in_place:
            raise StorageError(
                f"[file {files.manifest_lock}] was removed or replaced while this process changed the manifest, so "
                f"that another one may change it, too. Nothing was written. Leave the files of a log alone, and try "
                f"again."
            )
        write_manifest(files, manifest)

    try:
        yield write
    finally:
        lock.release()


def with_layouts(manifest: Manifest, layouts: Sequence[Layout], committed: Container[str]) -> Manifest:
    """Returns the manifest with these tables among its own, or itself where it has them. Raises CheckpointError where
    one of them was `committed` with another layout."""
    named = list(manifest.layouts)
    for layout in layouts:
        number = manifest.number_of(layout.name)
        if number is None:
            named.append(layout)
        elif difference := manifest.layouts[number].difference(layout):
            if layout.name in committed:
                raise CheckpointError(
                    f"[table {layout.name!r}] the log has it with another layout: {difference}. Commit to another log, "
                    f"or save and load to convert it."
                )
            named[number] = layout  # its first commit failed
    return manifest if named == list(manifest.layouts) else replace(manifest, layouts=tuple(named))
