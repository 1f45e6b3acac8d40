"""The sink of a log: each commit is appended to the log's last segment, as frames."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.errors import StorageError
from shoal.log.change import TableChange
from shoal.log.commit import Commit, id_of
from shoal.log.dense import write_dense
from shoal.log.hold import LostError
from shoal.log.manifest import with_layouts
from shoal.log.segment import digest_of
from shoal.log.sink import Base
from shoal.log.writer import LogWriter
from shoal.records import Layout
from shoal.records.frames import encode_commit


class AppendSink:
    """Appends commits to a log. REQUIRES: the writer is open when a commit begins."""

    def __init__(self, log: LogWriter) -> None:
        self._log = log
        self._version = 0  # of the commit that began last
        self._kept = 0  # the version that was on the disk when it began
        self._numbers: dict[str, int] = {}
        self._layouts: dict[str, Layout] = {}
        self._is_written = False  # whether all of its frames are

    def begin(self, layouts: Sequence[Layout]) -> Base:
        """As `Sink` says."""
        log = self._log
        self._version, self._kept, self._is_written = log.next, log.head.version, False
        log.claim()
        log.require_open()
        log.clear()
        self._add_tables(layouts)
        self._layouts = {layout.name: layout for layout in layouts}
        self._numbers = {layout.name: number for number, layout in enumerate(log.manifest.layouts)}
        return log.base(layouts, self._version)

    def append(self, change: TableChange) -> None:
        """As `Sink` says."""
        layout, number = self._layouts[change.table], self._numbers[change.table]
        self._log.segment.append(change.frame(layout, table=number, version=self._version))

    def commit(self, commit: Commit, states: Mapping[str, Any]) -> Commit:
        """As `Sink` says."""
        log, before = self._log, self._log.newest
        dense = None if before is None else before.dense
        written = write_dense(log.files, self._version, log.where, states, dense)
        made = self._write(replace(log.chained(commit, self._kept).after(before), dense=written or dense))
        self._is_written = True
        log.has_committed(made, commit.tables)
        return made

    def _write(self, commit: Commit) -> Commit:
        """Writes the frame that makes a commit of the frames before it, and returns the commit with its id."""
        log, segment, before = self._log, self._log.segment, self._log.newest
        # A LogReader that begins with the segment then knows all, and so does a repair of which the rows before this
        # commit are not needed any more.
        is_base = segment.is_empty or any(one.replaces for one in commit.tables.values())
        says_all = is_base or before is None or not before.epoch  # commits of format 1 say all, too
        content, binary = commit.to_frame(None if says_all else before)
        frame = encode_commit(
            {"commit": content, "frames": digest_of(segment.headers)}, version=commit.version, binary=binary
        )
        segment.append_commit(frame)
        log.sync_if_due()
        try:
            log.require_own()
        except LostError as error:  # what was written may be in a file that is gone, or in another's
            log.fail(error)
            raise
        return replace(commit, id=id_of(frame[1]))

    def abandon(self, error: BaseException) -> None:
        """As `Sink` says."""
        log = self._log
        if self._is_written:  # what is on the disk decides
            log.fail(error)
            return
        try:
            log.segment.abandon()
        except BaseException as again:
            # What is left of a commit without its last frame may stay until the next commit cuts it off: no LogReader
            # believes it. A whole commit may not stay.
            if log.segment.holds_commit or isinstance(again, LostError) or not isinstance(again, StorageError):
                log.fail(again)
            if isinstance(again, LostError):  # nothing of the log is this writer's to remove
                return
        log.remove_dense(self._version)

    def _add_tables(self, layouts: Sequence[Layout]) -> None:
        """Has the manifest name these tables, and this writer."""
        manifest, committed = self._log.manifest, () if self._log.newest is None else self._log.newest.tables
        added = with_layouts(manifest, layouts, committed)
        if added is not manifest or not self._log.manifest_writer.names_writer:
            self._log.change_manifest(lambda now: with_layouts(now, layouts, committed))
