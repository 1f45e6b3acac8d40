"""Compaction: a snapshot of the newest version, made from the snapshot before and the commits since. Tables take no
part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from shoal import _native
from shoal.errors import CheckpointError, StorageError
from shoal.log.change import rows_in_block
from shoal.log.files import Files, names_in, remove_file, remove_folder
from shoal.log.manifest import Manifest, SnapshotEntry, changing_manifest, read_manifest
from shoal.log.reader import LogReader
from shoal.log.snapshot import SnapshotError, buckets_of
from shoal.log.snapshot_writer import SnapshotWriter
from shoal.log.version import Version, Winners
from shoal.records import Layout, Rows, join

# Bytes of changed rows that are held in memory at a time; where there are more, buckets are taken in turns.
_HELD_BYTES = 256 << 20
# The suffix of folders that compactions write. The next one may remove them; the log's writer uses another suffix.
_SUFFIX = ".compact.tmp"


@contextmanager
def compacting(files: Files) -> Iterator[Any]:
    """Gives the lock under which a log is compacted; None where another process or thread holds it."""
    try:
        lock = _native.FileLock.take(files.compact_lock, "compaction")
    except StorageError:
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()


def compact(files: Files, retain: int = 2, progress: Callable[[int], None] = lambda _rows: None) -> int | None:
    """Makes a snapshot of the newest version, unless there is one, and removes what the newest `retain` snapshots do
    not need. Returns its version; None where there is nothing to do, another process compacts the log, or the log was
    rewritten in the meantime. progress: called with numbers of rows."""
    with compacting(files) as lock:
        if lock is None:
            return None
        reader = LogReader(files)
        version = reader.at()
        if version is None:
            return None
        if version.manifest.snapshots and not version.is_after_snapshot:
            return _retain_only(files, retain)
        if version.manifest.snapshots and version.manifest.snapshots[-1].version == version.commit.version:
            return None  # that snapshot is damaged, which a repair mends
        # The segment has to be on the disk before the snapshot is: else a power cut might leave a log whose segment
        # ends before its snapshot.
        with _native.File.open_to_write(files.segment(version.manifest.segments[-1])) as segment:
            segment.sync()
        _remove_remains(files, version)
        entry, is_damaged = _newest_snapshot(files, version, progress)
        with changing_manifest(files) as write:
            now = read_manifest(files)
            if not lock.is_in_place or now.identity != version.manifest.identity:
                path = files.manifest if lock.is_in_place else files.compact_lock
                raise StorageError(
                    f"[file {path}] was removed or replaced while this process compacted the log: another one may "
                    f"compact or write it. No file was removed. Compact it again."
                )
            if now.snapshots and now.snapshots[-1].version >= entry.version:  # the log was rewritten in the meantime
                remove_folder(files.snapshot(entry.version))
                return None
            changed = replace(now, snapshots=(*now.snapshots, entry))
            # The files that a damaged snapshot would make unnecessary are those that stand in for it.
            changed = changed if is_damaged else _retained(changed, retain)
            write(changed)
        let_go(files, now, changed)
        return entry.version


def _newest_snapshot(files: Files, version: Version, progress: Callable[[int], None]) -> tuple[SnapshotEntry, bool]:
    """Writes a snapshot of a version. Returns it, and whether an older one was found damaged and not used."""
    newest = version.manifest.snapshots[-1].version if version.manifest.snapshots else 0
    is_damaged = newest > version.begins_at
    while True:
        try:
            return write_snapshot(files, version, progress), is_damaged
        except SnapshotError as error:
            version, is_damaged = version.without_snapshot(error), True


def write_snapshot(files: Files, version: Version, progress: Callable[[int], None]) -> SnapshotEntry:
    """Writes a snapshot of a version. It is complete; the manifest does not name it yet."""
    writer = SnapshotWriter(files, version.commit.version, _SUFFIX)
    try:
        for name, layout in version.layouts.items():
            number = version.manifest.number_of(name)
            assert number is not None
            writer.begin_table(number, layout)
            for rows in by_bucket(version, layout):
                writer.put(rows)
                progress(len(rows))
            writer.end_table()
        tables = {name: replace(one, puts=0, deletes=0, replaces=False) for name, one in version.commit.tables.items()}
        return writer.finish(replace(version.commit, tables=tables))
    except BaseException:
        writer.abandon()
        raise


def _retain_only(files: Files, retain: int) -> int | None:
    """Removes what the newest `retain` snapshots do not need, where the newest version has a snapshot. Returns that
    version, or None where there is nothing to remove."""
    with changing_manifest(files) as write:
        now = read_manifest(files)
        changed = _retained(now, retain)
        if (changed.snapshots, changed.segments, changed.oldest) == (now.snapshots, now.segments, now.oldest):
            return None
        write(changed)
    let_go(files, now, changed)
    return changed.snapshots[-1].version


def _retained(manifest: Manifest, retain: int) -> Manifest:
    """Returns the manifest of the newest `retain` snapshots and of what came since. REQUIRES: there is a snapshot."""
    # What versions are made from: the log's beginning, while it is kept, and the snapshots.
    is_whole = manifest.begins_with_nothing and not manifest.kept_from
    bases = [0] * is_whole + [one.version for one in manifest.snapshots]
    after = bases[-retain:][0]
    snapshots = tuple(one for one in manifest.snapshots if one.version >= after)
    segments = tuple(
        first
        for number, first in enumerate(manifest.segments)
        if number + 1 == len(manifest.segments) or manifest.segments[number + 1] > manifest.after(after)
    )
    skipped = tuple(one for one in manifest.skipped if one[1] >= segments[0] or one[1] > after)
    return replace(manifest, snapshots=snapshots, segments=segments, kept_from=after, skipped=skipped)


def _remove_remains(files: Files, version: Version) -> None:
    """Removes what compactions left that died. There may be many of them while one writer lives."""
    named = {files.snapshot(one.version).name for one in version.manifest.snapshots}
    for name in names_in(files.snapshots):
        is_done = name.isdecimal() and int(name) <= version.commit.version and name not in named
        if is_done or name.endswith(_SUFFIX):
            remove_folder(files.snapshots / name)


def let_go(files: Files, before: Manifest, after: Manifest) -> None:
    """Removes what the manifest named before and does not name any more. A file that cannot be removed stays until the
    log is compacted or opened again: the log is complete without that."""
    with suppress(StorageError, CheckpointError):
        _let_go(files, before, after)


def _let_go(files: Files, before: Manifest, after: Manifest) -> None:
    for first in set(before.segments) - set(after.segments):
        remove_file(files.segment(first))
    for entry in set(before.snapshots) - set(after.snapshots):
        remove_folder(files.snapshot(entry.version))
    oldest = LogReader(files).at(after.oldest)
    assert oldest is not None
    needed = oldest.commit.dense.version if oldest.commit.dense is not None else oldest.commit.version
    for name in names_in(files.dense):
        stem = name.partition(".")[0]
        if stem.isdecimal() and int(stem) < needed:
            remove_file(files.dense / name)


def by_bucket(version: Version, layout: Layout, held_bytes: int = _HELD_BYTES) -> Iterator[Rows]:
    """Yields the rows of a table in pieces, in the order of their buckets."""
    base, commits = version.base_of(layout.name)
    winners = Winners(layout.name, commits)
    turns = min(max(-(-len(winners) * layout.format.record_bytes // held_bytes), 1), layout.buckets)
    for turn in range(turns):
        first, end = (layout.buckets * at // turns for at in (turn, turn + 1))
        merged = _Changed(layout, winners, first, end)
        if base is not None:
            for rows in base.rows(layout.name, first, end):
                buckets = buckets_of(rows.keys, layout.buckets)
                stays = (buckets >= first) & (buckets < end) & ~winners.has(rows.keys)
                last = min(int(buckets[-1]), end - 1)
                kept = rows if bool(stays.all()) else rows.some(stays)
                yield from merged.up_to(last, kept)
        yield from merged.up_to(end - 1, None)


class _Changed:
    """The changed rows of some buckets, in the order of the buckets."""

    def __init__(self, layout: Layout, winners: Winners, first: int, end: int) -> None:
        self._layout = layout
        found = []
        for rows in winners.rows():
            buckets = buckets_of(rows.keys, layout.buckets)
            here = (buckets >= first) & (buckets < end)
            if bool(here.any()):
                found.append(rows.some(here))
        self._rows = self._in_order(join(found)) if found else None
        self._buckets = None if self._rows is None else buckets_of(self._rows.keys, layout.buckets)
        self._at = 0

    def _in_order(self, rows: Rows) -> Rows:
        order = torch.empty_like(rows.keys)
        _native.order_by_bucket(rows.keys.contiguous(), self._layout.buckets, order)
        return rows.some(order)

    def up_to(self, bucket: int, others: Rows | None) -> Iterator[Rows]:
        """Yields the changed rows up to a bucket that were not yielded yet, merged with others of the same buckets."""
        pieces = [] if others is None or not len(others) else [others]
        if self._rows is not None and self._buckets is not None:
            end = int(torch.searchsorted(self._buckets, bucket, right=True))
            if end > self._at:
                pieces.append(self._rows.some(slice(self._at, end)))
                self._at = end
        if not pieces:
            return
        rows = pieces[0] if len(pieces) == 1 else self._in_order(join(pieces))
        most = rows_in_block(self._layout)
        for begin in range(0, len(rows), most):
            yield rows.some(slice(begin, begin + most))
