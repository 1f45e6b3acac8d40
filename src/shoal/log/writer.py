"""A log, open for writing: the files that one process holds, and what they say. Commits are written by sinks."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import ForkError, StorageError
from shoal.log.commit import Commit
from shoal.log.files import Files, is_new, remove_file
from shoal.log.head import Head, HeadWriter
from shoal.log.hold import Hold, LostError
from shoal.log.job import claim
from shoal.log.manifest import Manifest, read_manifest
from shoal.log.manifest_writer import ManifestWriter
from shoal.log.opening import create, cut_tail, new_segment, remove_strangers
from shoal.log.reader import LogReader
from shoal.log.segment import header_of
from shoal.log.segment_writer import SegmentWriter
from shoal.log.sink import Base
from shoal.records import Layout
from shoal.table import JobRank
from shoal.table.changes import BEGINNING, Mark


@dataclass(frozen=True)
class Pace:
    """When a commit waits for the disk (`fsync`, and the seconds of "interval"), and the bytes after which another
    segment is begun."""

    fsync: str
    interval: float
    segment_bytes: int


class LogWriter:
    """The end of a log, and what is known of it.

    failed: an error after which it is not known what is on the disk; None while all is known.
    newest: the newest commit; None before the first.
    head: what was last known to be on the disk.

    Thread safety: one thread at a time, which the log's mutex sees to. REQUIRES: `lock` is the log's write lock.
    """

    def __init__(self, files: Files, where: str, lock: Any, pace: Pace) -> None:
        self.files = files
        self.where = where
        self.failed: BaseException | None = None
        self.newest: Commit | None = None
        self.head = Head()
        self._pace = pace
        self._process = os.getpid()
        self._claimed: JobRank | None = None
        self._segment: SegmentWriter | None = None
        self._head_file: HeadWriter | None = None
        self._is_kept = False  # whether the commit that is being written is on the disk
        # The newest commit that changed each table, where this writer knows it; the others are as at `_known_from`.
        self._changed: dict[str, Mark] = {}
        if is_new(files):
            create(files)
        self._hold = Hold(files, where, lock, read_manifest(files))
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    # ---- opening and closing

    def _open(self) -> None:
        files = self.files
        self.manifest_writer = ManifestWriter(files, self._hold)
        self._synced_at = time.monotonic()
        end, last = cut_tail(files, self.manifest, self.where)
        self.newest = LogReader(files).newest()
        self._known_from = self.mark
        self._segment = SegmentWriter(files.segment(self.manifest.segments[-1]), end, self._hold.check)
        self._head_file = HeadWriter(files)
        # What was read is not yet known to be on the disk.
        self._sync_file()
        if self.version > last:  # a snapshot has what the segment lost
            self._begin_segment()
        self._keep()
        remove_strangers(files, self.manifest, self.version)

    def close(self) -> None:
        """Writes what was committed to the disk, and lets the files go."""
        if self._segment is None:
            return
        try:
            if self.failed is None:
                if not self._segment.is_clean:
                    with suppress(StorageError):  # else the next writer cuts it off
                        self._segment.abandon()
                self.sync(last=True)
        finally:
            self._release()

    def _release(self) -> None:
        for file in (self._segment, self._head_file):
            if file is not None:
                file.close()
        self._segment = self._head_file = None
        self._hold.close()

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process opened it, and not one that this process is a fork of."""
        return os.getpid() == self._process

    @property
    def is_open(self) -> bool:
        """Whether it was not closed, and takes commits."""
        return self._segment is not None and self.failed is None

    def require_open(self) -> None:
        """Raises where it takes no commits: in a fork, after a failure, or once it is closed."""
        if not self.is_of_this_process:
            raise ForkError(
                f"[{self.where}] was opened by process {self._process}, of which this one ({os.getpid()}) is a fork; "
                f"one process writes to a log. Commit in the process that opened it."
            )
        if self.failed is not None:
            raise StorageError(
                f"[{self.where}] an earlier write was interrupted or did not reach the disk ({self.failed!r:.300}). "
                f"Close this log and open it again, which looks at what is there."
            ) from self.failed
        if self._segment is None:
            raise StorageError(f"[{self.where}] this log was closed. Open it again.")

    def require_own(self) -> None:
        """Raises LostError where the files at the log's path are not those that were opened. Where other files are in
        their place, the log takes no more commits."""
        assert self._segment is not None
        try:
            self._hold.check(self._segment)
        except LostError as error:
            if not error.may_come_back:
                self.failed = error
            raise

    def fail(self, error: BaseException) -> None:
        """Refuses all that comes after an error, as it is not known what is on the disk."""
        self.failed = error

    def claim(self) -> None:
        """Says which rank writes, before the first byte of a version is written."""
        self._claimed = claim(self.files, self.where, self._claimed)

    # ---- what it holds

    @property
    def manifest(self) -> Manifest:
        """The manifest as this writer knows it."""
        return self.manifest_writer.now

    def change_manifest(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Changes the manifest as `ManifestWriter.change` does, and returns the one before."""
        try:
            return self.manifest_writer.change(change, self.require_own)
        except BaseException as error:
            if self.manifest_writer.is_unknown:
                self.failed = error
            raise

    @property
    def segment(self) -> SegmentWriter:
        """The segment that is written to. REQUIRES: it is open."""
        assert self._segment is not None
        return self._segment

    @property
    def version(self) -> int:
        """The newest version; 0 before the first commit."""
        return 0 if self.newest is None else self.newest.version

    @property
    def next(self) -> int:
        """The number of the next version."""
        return self.manifest.after(self.version)

    @property
    def mark(self) -> Mark:
        """The mark of the newest commit."""
        return BEGINNING if self.newest is None else self.newest.mark

    def marks_of(self, table: str) -> tuple[Mark, Mark]:
        """Returns the newest commit that changed a table, as far as this writer knows, and the newest of all, at which
        the table is the same."""
        return self._changed.get(table, self._known_from), self.mark

    def base(self, layouts: Sequence[Layout], version: int) -> Base:
        """Returns what a commit to these tables begins with."""
        marks = {layout.name: self.marks_of(layout.name) for layout in layouts}
        return Base(self.manifest.identity, version, marks)

    def chained(self, commit: Commit, kept: int) -> Commit:
        """Returns a commit as this writer's, after the newest one. kept: the version that was on the disk when the
        commit began."""
        before = None if self.newest is None else self.newest.id or None
        epoch, writer = self.manifest_writer.epoch, self.manifest_writer.writer
        return replace(commit, kept=kept, epoch=epoch, writer=writer, before=before)

    def has_committed(self, commit: Commit, tables: Iterable[str]) -> None:
        """All frames of a commit to these tables are in the segment: from here on it is the newest one."""
        self.segment.commit()
        self.newest = commit
        self._changed.update(dict.fromkeys(tables, commit.mark))
        if self._is_kept:
            self._keep()

    def was_replaced(self, commit: Commit, segment: SegmentWriter) -> None:
        """The manifest names a snapshot of a commit and an empty segment, and nothing else."""
        self.newest = commit
        self._changed, self._known_from = {}, commit.mark
        self._write_to(segment)

    # ---- segments

    def clear(self) -> None:
        """Removes what a commit left that failed and could not be cut off. Begins another segment where this one is
        full."""
        self.require_own()
        if not self.segment.is_clean:
            self.segment.abandon()
        is_empty = self.version < self.manifest.segments[-1]
        if self.segment.end >= self._pace.segment_bytes and not is_empty:
            self.sync()
            self._begin_segment()

    def _begin_segment(self) -> None:
        first = self.next
        try:
            with self.new_segment(first) as segment:
                self.change_manifest(lambda now: replace(now, segments=(*now.segments, first)))
        finally:
            if self.manifest_writer.writes_to(first):
                try:
                    self._write_to(segment)
                except BaseException as error:
                    self.failed = error
                    raise

    @contextmanager
    def new_segment(self, first: int) -> Iterator[SegmentWriter]:
        """Gives a segment that holds nothing yet, for the body to name in the manifest. Where the body does not, the
        segment is removed again."""
        path, end = self.files.segment(first), len(header_of(self.manifest.identity, first))
        segment = None
        try:
            new_segment(self.files, self.manifest, first)
            segment = SegmentWriter(path, end, self._hold.check)
            yield segment
        except BaseException as error:
            if self.manifest_writer.writes_to(first):
                raise
            if segment is not None:
                segment.close()
            if self.failed is None and not isinstance(error, LostError):
                with suppress(StorageError):  # the next one of that version is written over it
                    remove_file(path)
            raise

    def _write_to(self, segment: SegmentWriter) -> None:
        """Goes on in a segment that holds nothing yet, which the manifest names."""
        self.require_open()
        before, self._segment = self.segment, segment
        with suppress(StorageError):  # it was synced
            before.close()
        self._keep()

    # ---- the disk

    def sync_if_due(self) -> None:
        """Waits for the disk, where a commit that was written has to."""
        late = time.monotonic() - self._synced_at >= self._pace.interval
        self._is_kept = self._pace.fsync == "each" or (self._pace.fsync == "interval" and late)
        if self._is_kept:
            self._sync_file()

    def sync(self, last: bool = False) -> None:
        """Waits until all that was committed is on the disk. last: whether the head is synced, too."""
        self.require_open()
        self.require_own()
        self._sync_file()
        self.require_own()
        self._keep(last)

    def _sync_file(self) -> None:
        try:
            self.segment.sync()
        except BaseException as error:
            # What the system could not write it may have dropped: it is not known what is on the disk.
            self.failed = error
            raise
        self._synced_at = time.monotonic()

    def _keep(self, last: bool = False) -> None:
        """Says that all that was committed is on the disk."""
        self.require_open()
        assert self._head_file is not None
        self.head = Head(self.version, self.manifest.segments[-1], self.segment.end)
        with nullcontext() if last else suppress(StorageError):  # the commit is kept even if that is not said
            self._head_file.write(self.head, sync=last)

    def remove_dense(self, version: int) -> None:
        """Removes dense weights of a commit that failed. Where they cannot be removed, the next commit of that version
        is written over them."""
        with suppress(StorageError):
            remove_file(self.files.dense_of(version))
