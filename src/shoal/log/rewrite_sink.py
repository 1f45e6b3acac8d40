"""The sink of a save: a commit of all rows, as a snapshot that replaces all that a log had."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shoal.errors import StorageError
from shoal.log.change import TableChange
from shoal.log.commit import Commit
from shoal.log.dense import write_dense
from shoal.log.hold import LostError
from shoal.log.manifest import Manifest, with_layouts
from shoal.log.sink import Base
from shoal.log.snapshot_writer import SnapshotWriter
from shoal.log.writer import LogWriter
from shoal.records import Layout


class RewriteSink:
    """Replaces a log by one commit, of which it writes a snapshot. Until that is complete, the log is as it was.

    before: once the commit succeeded, the manifest that it replaced, whose files are not needed any more.
    REQUIRES: tables come whole, one after the other, in the order of `begin`, with rows in the order of their buckets.
    """

    def __init__(self, log: LogWriter, version: int) -> None:
        self._log = log
        self._version = version
        self._kept = 0  # the version that was on the disk when the commit began
        self._layouts: tuple[Layout, ...] = ()
        self._tables = 0  # of which all or some rows came
        self._writer: SnapshotWriter
        self.before: Manifest | None = None

    def begin(self, layouts: Sequence[Layout]) -> Base:
        """As `Sink` says."""
        log = self._log
        self._kept = log.head.version
        self._layouts = with_layouts(replace(log.manifest, layouts=()), layouts, ()).layouts
        log.claim()
        log.require_own()
        self._writer = SnapshotWriter(log.files, self._version)
        return log.base(layouts, self._version)

    def append(self, change: TableChange) -> None:
        """As `Sink` says."""
        assert change.puts is not None
        while self._tables == 0 or self._layouts[self._tables - 1].name != change.table:
            self._next_table()
        self._writer.put(change.puts)

    def _next_table(self) -> None:
        self._writer.begin_table(self._tables, self._layouts[self._tables])
        self._tables += 1

    def commit(self, commit: Commit, states: Mapping[str, Any]) -> Commit:
        """As `Sink` says."""
        log = self._log
        while self._tables < len(self._layouts):  # tables without rows
            self._next_table()
        self._writer.end_table()
        written = write_dense(log.files, self._version, log.where, states)
        made = replace(log.chained(commit, self._kept), dense=written)
        made = replace(made, id=self._writer.id_of(made))
        log.require_own()
        entry = self._writer.finish(made)
        first = self._version + 1
        with log.new_segment(first) as segment:
            self.before = log.change_manifest(
                lambda now: replace(
                    now, layouts=self._layouts, snapshots=(entry,), segments=(first,), kept_from=0, skipped=()
                )
            )
        log.was_replaced(made, segment)
        return made

    def abandon(self, error: BaseException) -> None:
        """As `Sink` says."""
        log = self._log
        if log.manifest_writer.writes_to(self._version + 1):  # what is on the disk decides
            log.fail(error)
        # Else the manifest may name it, or nothing of the log is this writer's to remove.
        if log.failed is None and not isinstance(error, LostError):
            with suppress(StorageError):  # the next one removes it
                self._writer.abandon()
            log.remove_dense(self._version)
