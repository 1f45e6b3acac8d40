"""The change log of tables: commits of what changed, atomic and in order."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch

from shoal import _native
from shoal.config import parse_size
from shoal.config.checked import choice, integer, number
from shoal.errors import CheckpointError, ConfigError, ForkError, InputError, ShoalError, StorageError
from shoal.log.commit import ID_DIGITS, Commit, DenseFile, TableCommit, checked_metadata, id_of, random_states
from shoal.log.compact import compact, let_go
from shoal.log.dense import require_states, restored_dense, write_dense
from shoal.log.files import Files, is_new, remove_file, require_folder
from shoal.log.head import Head, HeadWriter
from shoal.log.hold import Hold, LostError
from shoal.log.job import ADVICE, claim, require_own
from shoal.log.manifest import Manifest, changing_manifest, next_epoch, read_manifest, with_layouts
from shoal.log.opening import create, cut_tail, new_segment, remove_strangers, require_empty
from shoal.log.reader import CommittedChanges, LogReader, Version, version_at, whole_commits
from shoal.log.repair import Repair, RepairWarning
from shoal.log.repair import repair as repair_log
from shoal.log.retry import while_it_changes
from shoal.log.rollback import rolled_back
from shoal.log.segment import SegmentWriter, digest_of, header_of
from shoal.log.snapshot import SnapshotWriter, rows_in_block, told_of
from shoal.log.tables import LoggedTable, LoggedTables
from shoal.log.threads import in_background
from shoal.log.trust import require_own_files
from shoal.log.verify import Report, verify
from shoal.records import Layout, Rows
from shoal.records.excerpt import excerpt
from shoal.records.frames import encode_commit, encode_deletes, encode_puts
from shoal.table import JobRank, this_rank
from shoal.table.changes import BEGINNING, Mark

Fsync = Literal["each", "interval", "never"]
_KEYS_EACH = 1 << 20
# Commits whose ids a log remembers, for those who go on after one of them.
_MOST_READ = 1024


class ChangeLog:
    """One ordered log of the rows that tables put and delete, with the dense weights of each version.

    path: a folder, made if it is not there. One process writes to it; any number may read it meanwhile.
    fsync: when a commit returns: "each", once it is on the disk; "interval", that too if `interval` seconds passed
        since the last was; "never", once the operating system has it, which survives a killed process and no power cut.
    segment: bytes after which another file is begun.
    retain: how many snapshots `compact` keeps; versions from the oldest of them on can be had again.
    rng: whether commits have the states of torch's generators, which `recover` sets. They take about 5 KB where they
        changed since the commit before, and nothing where they did not. Without them, `recover` leaves the generators
        as they are.
    mode: "r" reads a log that is there, while another process writes it or none does: `tail`, `at`, `verify`, `version`
        and `newest`, each of which sees what is there when it is called. It takes no lock and changes no file.
    repair: True sets what is damaged aside, to go on from the highest version that is whole; `repairs` says what was
        done. It reads all rows of the log.
    trust: True writes to a log though another user owns its folder, or something in it: that user may decide what is
        written and removed there. Reading needs no trust. Links in a log are refused anyway.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: Fsync = "each",
        interval: float = 1.0,
        segment: int | str = "256MiB",
        retain: int = 2,
        rng: bool = True,
        mode: Literal["w", "r"] = "w",
        repair: bool = False,
        trust: bool = False,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)) or not str(path) or "\0" in str(path):
            raise ConfigError(f"[ChangeLog] path: wanted the path of a folder; got {path!r:.100}.")
        self._where = f"log {path}"
        self._fsync = choice("ChangeLog", "fsync", fsync, ("each", "interval", "never"))
        self._interval = number("ChangeLog", "interval", interval, low=0.0)
        self._segment_bytes = parse_size(segment, "ChangeLog segment")
        self._retain = integer("ChangeLog", "retain", retain, low=1)
        self._rng = _flag("rng", rng)
        self._is_reading = choice("ChangeLog", "mode", mode, ("w", "r")) == "r"
        if not isinstance(repair, bool) or (repair and self._is_reading):
            raise ConfigError(
                f"[ChangeLog] repair: wanted True or False, and False with mode='r', which changes no file; got "
                f"{repair!r:.100}."
            )
        if not isinstance(trust, bool):
            raise ConfigError(f"[ChangeLog] trust: wanted True or False; got {trust!r:.100}.")
        self.repairs: tuple[Repair, ...] = ()
        self._is_closed = False
        self._lock: Any = None
        self._claimed: JobRank | None = None
        self._newest: Commit | None = None
        self._mutex = threading.RLock()
        self._process = os.getpid()
        self._files = Files(path)
        self._failed: BaseException | None = None
        self._head = Head()
        self._kept_now = False
        self._writer: SegmentWriter | None = None
        self._head_file: HeadWriter | None = None
        self._hold: Hold | None = None
        self._is_writer = False  # whether the manifest names this one
        # Commits that were read here last, oldest first: `tail` says so where the log goes on from others.
        self._read: dict[int, str] = {}
        require_folder(self._where, self._files.root)
        if self._is_reading:
            LogReader(self._files)  # raises where there is no log
            return
        require_own_files(self._files, self._where, trust)
        require_empty(self._files, self._where)
        if repair and is_new(self._files):
            raise CheckpointError(f"[{self._where}] repair: wanted a log; there is none. Is the path right?")
        _native.make_directories(self._files.root)
        try:
            self._lock = _native.FileLock.take(self._files.lock, "log")
        except StorageError as error:
            if this_rank() is not None:
                error.add_note(f"Is it another rank of this job? {ADVICE}")
            raise
        try:
            require_own(self._files, self._where)
            if repair:
                self._repair()
            self._open()
        except BaseException:
            self._release()
            raise

    # ---- opening and closing

    def _repair(self) -> None:
        self.repairs = tuple(repair_log(self._files, self._where))
        for one in self.repairs:
            warnings.warn(RepairWarning(f"[{self._where}] was damaged: {one}"), stacklevel=3)

    def _open(self) -> None:
        files = self._files
        if is_new(files):
            create(files)
        self._manifest = read_manifest(files)
        self._own = next_epoch(self._manifest)  # named in the manifest before its first version
        self._hold = Hold(files, self._where, self._lock, self._manifest)
        self._synced_at = time.monotonic()
        end, last = cut_tail(files, self._manifest, self._where)
        self._newest = LogReader(files).newest()
        self._versions: dict[str, Mark] = {}
        self._known_from = self._mark
        self._writer = SegmentWriter(files.segment(self._manifest.segments[-1]), end, self._hold.check)
        self._head_file = HeadWriter(files)
        # What was read is not yet known to be on the disk.
        self._sync_file(self._writer)
        if self.version > last:  # a snapshot has what the segment lost
            self._begin_segment()
        self._keep()
        remove_strangers(files, self._manifest, self.version)

    def close(self) -> None:
        """Write what was committed to the disk, and let the log go: another process may write it."""
        self._is_closed = True
        if os.getpid() != self._process:
            return  # it is the parent's
        with self._mutex:
            if self._lock is None:
                return
            try:
                if self._failed is None:
                    if self._writer is not None and not self._writer.is_clean:
                        with suppress(StorageError):  # else the next writer cuts it off
                            self._writer.abandon()
                    self._sync(last=True)
            finally:
                self._release()

    def _release(self) -> None:
        for file in (self._writer, self._head_file):
            if file is not None:
                file.close()
        self._writer = self._head_file = None
        if self._hold is not None:
            self._hold.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_readable(self) -> None:
        if self._is_reading and self._is_closed:
            raise StorageError(f"[{self._where}] this log was closed. Open it again.")

    def _require_open(self) -> tuple[SegmentWriter, HeadWriter]:
        if self._is_reading:
            raise InputError(
                f"[{self._where}] wanted a log that was opened to write; this one was opened to read. Open it with "
                f"shoal.ChangeLog(path), in one process at a time."
            )
        if os.getpid() != self._process:
            raise ForkError(
                f"[{self._where}] was opened by process {self._process}, of which this one ({os.getpid()}) is a fork; "
                f"one process writes to a log. Open it in the one that does."
            )
        if self._failed is not None:
            raise StorageError(
                f"[{self._where}] an earlier write was interrupted or did not reach the disk ({self._failed!r:.300}). "
                f"Close this log and open it again, which looks at what is there."
            ) from self._failed
        if self._writer is None or self._head_file is None:
            raise StorageError(f"[{self._where}] this log was closed. Open it again.")
        return self._writer, self._head_file

    def _require_own(self) -> None:
        """Raise LostError where the files at the log's path are not those that were opened. Where others are in their
        place, this log takes no commits any more."""
        assert self._hold is not None and self._writer is not None
        try:
            self._hold.check(self._writer)
        except LostError as error:
            if not error.may_come_back:
                self._failed = error
            raise

    def _change_manifest(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Change the manifest, and name this writer in it before its first version; returns the one before. Where that
        fails, it is as before, or it is changed and is written again before the next commit, as it may not be on the
        disk."""
        assert self._hold is not None
        with changing_manifest(self._files) as write:
            self._require_own()
            now = read_manifest(self._files)
            self._hold.require_own(now)
            changed = replace(change(now), epoch=self._own.epoch, writer=self._own.writer)
            try:
                if changed != now or not self._is_writer:
                    write(changed)
                self._hold.follow(changed)
                self._manifest, self._is_writer = changed, True
            except BaseException as error:
                if self._is_in_place(changed):
                    self._hold.follow(changed)
                    self._manifest, self._is_writer = changed, False
                elif not self._is_in_place(now):
                    self._failed = error
                raise
        return now

    def _is_in_place(self, manifest: Manifest) -> bool:
        """Whether the log's manifest is that one."""
        with suppress(ShoalError):
            return read_manifest(self._files) == manifest
        return False

    # ---- committing

    @property
    def version(self) -> int:
        """The newest version; 0 before the first commit."""
        newest = self.newest
        return 0 if newest is None else newest.version

    @property
    def newest(self) -> Commit | None:
        """The newest commit."""
        if self._is_reading:
            self._require_readable()
            return while_it_changes(self._files.root, lambda: LogReader(self._files).newest())
        return self._newest

    def commit(
        self,
        bags: Any,
        *,
        step: int | None = None,
        event_time: float | None = None,
        dense: Any = None,
        optimizer: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Make what changed in tables since their last commit here one version, and return its number.

        bags: a collection, a module that holds some, or a list of them. The first commit of a table holds all of its
            rows.
        dense: a module, whose collections are left out; where it is not given, as in the commit before.
        optimizer: an object with `state_dict` and `load_state_dict`: an optimizer, scheduler or scaler, or a dict of
            such by name; where it is not given, as in the commit before.
        step, event_time, metadata: of the user's own, which `recover` gives back.

        Where a commit fails, nothing of it is in the log, and the next one holds it all.
        """
        with self._mutex:
            self._require_open()
            return self._commit(bags, self._told(step, event_time, metadata), dense, optimizer)

    def _commit(self, bags: Any, told: Commit, dense: Any, optimizer: Any) -> int:
        with self._mutex:
            tables = LoggedTables(self._where, bags)
            require_states(self._where, dense, optimizer)
            self._claim()
            version = told.version
            writer = self._begin_commit([table.layout for table in tables.values()])
            is_written = False
            try:
                # Alone: a seal clears flags that lookups stamp, and other logs may seal the same tables.
                with tables.alone():
                    said = {name: self._append(table, version) for name, table in tables.items()}
                    told = replace(told, rng=random_states() if self._rng else {})
                before = None if self._newest is None else self._newest.dense
                written = write_dense(self._files, version, self._where, dense, optimizer, before)
                commit = self._end_commit(writer, told, said, written)
                is_written = True
                self._is_committed(writer, commit, tables)
                with tables.alone():
                    for table in tables.values():
                        table.table.changes.committed(self._manifest.identity, commit.mark)
            except BaseException as error:
                self._undo(writer, version, error if is_written else None)
                raise
            return version

    def commit_rows(
        self, layout: Layout, pieces: Iterable[Rows], *, step: int = 0, metadata: Mapping[str, Any] | None = None
    ) -> int:
        """Have a table be rows that come from elsewhere, as one version; what the log had of it before is gone. They
        pass by, piece by piece: no table is made. REQUIRES: each key is in them once."""
        with self._mutex:
            self._require_open()
            told = self._told(None, None, metadata)
            self._claim()
            writer = self._begin_commit([layout])
            number = self._manifest.number_of(layout.name)
            assert number is not None
            rows = 0
            is_written = False
            try:
                for piece in pieces:
                    writer.append(encode_puts(piece, layout, table=number, version=told.version))
                    rows += len(piece)
                said = TableCommit(step, rows, puts=rows, replaces=True)
                commit = self._end_commit(writer, told, {layout.name: said}, None)
                is_written = True
                self._is_committed(writer, commit, [layout.name])
            except BaseException as error:
                self._undo(writer, told.version, error if is_written else None)
                raise
            return told.version

    def _end_commit(
        self, writer: SegmentWriter, told: Commit, said: Mapping[str, TableCommit], dense: DenseFile | None
    ) -> Commit:
        """Write the frame that makes a commit of those before it."""
        before = None if self._newest is None else self._newest.dense
        commit = replace(told, tables=self._tables_with(said), dense=dense or before)
        # Who reads from a segment's beginning knows all, and so does a repair after rows that are not needed any more.
        is_base = writer.is_empty or any(one.replaces for one in said.values())
        says_all = is_base or self._newest is None or not self._newest.epoch  # those of format 1 say all, too
        content, binary = commit.to_frame(None if says_all else self._newest)
        frame = encode_commit(
            {"commit": content, "frames": digest_of(writer.headers)}, version=commit.version, binary=binary
        )
        writer.append_commit(frame)
        if self._is_due():
            self._sync_file(writer)
        try:
            self._require_own()
        except LostError as error:  # what was written may be in a file that is gone, or in another's
            self._failed = error
            raise
        return replace(commit, id=id_of(frame[1]))

    def _is_committed(self, writer: SegmentWriter, commit: Commit, tables: Iterable[str]) -> None:
        """All frames of a commit to these tables are written: from here on it is the newest."""
        writer.commit()
        self._newest = commit
        self._versions.update(dict.fromkeys(tables, commit.mark))
        if self._kept_now:
            self._keep()

    def _claim(self) -> None:
        """Say which rank writes, before the first byte of a version is written."""
        self._claimed = claim(self._files, self._where, self._claimed)

    @property
    def _next(self) -> int:
        """The number of the next version."""
        return self._manifest.after(self.version)

    @property
    def _mark(self) -> Mark:
        return BEGINNING if self._newest is None else self._newest.mark

    def _marks_of(self, table: str) -> tuple[Mark, Mark]:
        """The newest version that changed a table, as far as this process knows; and the newest, at which it is the
        same."""
        return self._versions.get(table, self._known_from), self._mark

    def _begin_commit(self, layouts: list[Layout]) -> SegmentWriter:
        """Where the next commit is written, which may have tables that the log has not yet."""
        writer, _ = self._require_open()
        self._require_own()
        if not writer.is_clean:  # a commit failed, and what it wrote could not be cut off
            writer.abandon()
        if writer.end >= self._segment_bytes and self.version >= self._manifest.segments[-1]:  # it is not empty
            writer = self._rotate()
        self._add_tables(layouts)
        return writer

    def rewrite(
        self,
        bags: Any,
        *,
        step: int | None = None,
        event_time: float | None = None,
        dense: Any = None,
        optimizer: Any = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Callable[[int], None] = lambda _rows: None,
        version: int | None = None,
        save_id: str | None = None,
    ) -> int:
        """Have the log hold all rows of these tables as they are now, as one version more and a snapshot, and nothing
        before it: what `shoal.save` does. `progress` hears of rows. `version`: its number, larger than that of the
        newest; None is the next one. `save_id`: what it is a part of. Until it is complete the log is as it was."""
        with self._mutex:
            self._require_open()
            tables = LoggedTables(self._where, bags)
            version = integer(self._where, "version", self._next if version is None else version, low=self._next)
            told = replace(self._told(step, event_time, metadata), version=version, save=save_id)
            layouts = with_layouts(replace(self._manifest, layouts=()), [table.layout for table in tables.values()], ())
            require_states(self._where, dense, optimizer)
            self._claim()
            self._require_own()
            writer = SnapshotWriter(self._files, version)
            try:
                with tables.still():
                    said = {}
                    for number, (name, table) in enumerate(tables.items()):
                        pieces = table.table.by_bucket(rows_in_block(table.layout))
                        writer.table(number, table.layout, told_of(pieces, progress))
                        said[name] = table.memory()
                    told = replace(told, rng=random_states() if self._rng else {})
                written = write_dense(self._files, version, self._where, dense, optimizer)
                commit = replace(told, tables=said, dense=written)
                commit = replace(commit, id=writer.id_of(commit))
                self._require_own()
                entry = writer.finish(commit)
                named = layouts.layouts
                with self._new_segment(version + 1) as segment:
                    before = self._change_manifest(
                        lambda now: replace(
                            now, layouts=named, snapshots=(entry,), segments=(version + 1,), kept_from=0, skipped=()
                        )
                    )
                self._newest = commit
                self._versions, self._known_from = {}, commit.mark
                self._write_to(segment)
            except BaseException as error:
                if self._names(version + 1):  # what is on the disk decides
                    self._failed = error
                # Else the manifest may name it, or nothing of the log is this writer's to remove.
                if self._failed is None and not isinstance(error, LostError):
                    with suppress(StorageError):  # the next one removes it
                        writer.abandon()
                    self._undo_dense(version)
                raise
            let_go(self._files, before, self._manifest)
            return version

    def _told(self, step: Any, event_time: Any, metadata: Any) -> Commit:
        """What the user says of the next version, checked."""
        step = None if step is None else integer(self._where, "step", step, low=-(2**63), high=2**63 - 1)
        if event_time is not None and (not isinstance(event_time, (int, float)) or isinstance(event_time, bool)):
            raise InputError(f"[{self._where}] event_time: wanted a number; got {event_time!r:.100}.")
        if event_time is not None and not abs(event_time) <= 2**63:
            raise InputError(f"[{self._where}] event_time: wanted seconds; got {excerpt(event_time)}.")
        return Commit(
            self._next,
            time.time(),
            step,
            None if event_time is None else float(event_time),
            metadata=checked_metadata(self._where, metadata),
            kept=self._head.version,
            epoch=self._own.epoch,
            writer=self._own.writer,
            before=None if self._newest is None else self._newest.id or None,
        )

    def _append(self, table: LoggedTable, version: int) -> TableCommit:
        """Write what changed in a table."""
        writer, _ = self._require_open()
        held, layout = table.table, table.layout
        number = self._manifest.number_of(table.name)
        assert number is not None
        held.changes.follow(self._manifest.identity, *self._marks_of(table.name))
        held.seal()
        keys = held.changes.look(self._manifest.identity)
        rows_each = rows_in_block(layout)
        puts = 0
        if keys is None:
            for rows in held.by_bucket(rows_each):
                writer.append(encode_puts(rows, layout, table=number, version=version))
                puts += len(rows)
            return table.memory(puts, replaces=True)
        gone = []
        for some in keys.split(rows_each):
            rows, found = held.rows(some)
            if len(rows):
                writer.append(encode_puts(rows, layout, table=number, version=version))
            puts += len(rows)
            if not bool(found.all()):
                gone.append(some[~found])
        deleted = torch.cat(gone) if gone else keys[:0]
        for some in deleted.split(_KEYS_EACH) if len(deleted) else ():
            writer.append(encode_deletes(some, layout, table=number, version=version))
        return table.memory(puts, len(deleted))

    def _tables_with(self, said: Mapping[str, TableCommit]) -> dict[str, TableCommit]:
        """What a commit says of all tables: of those that are not in it, as before."""
        before = {} if self._newest is None else self._newest.tables
        kept = {name: replace(one, puts=0, deletes=0, replaces=False) for name, one in before.items()}
        return kept | dict(said)

    def _add_tables(self, layouts: list[Layout]) -> None:
        committed = () if self._newest is None else self._newest.tables
        if not self._is_writer or with_layouts(self._manifest, layouts, committed) is not self._manifest:
            self._change_manifest(lambda now: with_layouts(now, layouts, committed))

    def _undo(self, writer: SegmentWriter, version: int, written: BaseException | None = None) -> None:
        """A commit failed. `written`: with what, if that was behind its last frame: what is on the disk decides."""
        if written is not None:
            self._failed = written
            return
        try:
            writer.abandon()
        except BaseException as error:
            # What no reader believes may stay until the next commit cuts it off; a whole commit may not.
            if writer.holds_commit or isinstance(error, LostError) or not isinstance(error, StorageError):
                self._failed = error
            if isinstance(error, LostError):  # nothing of the log is this writer's to remove
                return
        self._undo_dense(version)

    def _undo_dense(self, version: int) -> None:
        with suppress(StorageError):  # the next one of that version is written over it
            remove_file(self._files.dense_of(version))

    # ---- the disk

    def _is_due(self) -> bool:
        """Whether a commit waits for the disk."""
        late = time.monotonic() - self._synced_at >= self._interval
        self._kept_now = self._fsync == "each" or (self._fsync == "interval" and late)
        return self._kept_now

    def _sync_file(self, writer: SegmentWriter) -> None:
        try:
            writer.sync()
        except BaseException as error:
            # What the system could not write it may have dropped: nobody knows what is on the disk.
            self._failed = error
            raise
        self._synced_at = time.monotonic()

    def _keep(self, last: bool = False) -> None:
        """Say that all that was committed is on the disk."""
        writer, head = self._require_open()
        self._head = Head(self.version, self._manifest.segments[-1], writer.end)
        with nullcontext() if last else suppress(StorageError):  # the commit is kept even if that is not said
            head.write(self._head, sync=last)

    def _sync(self, last: bool = False) -> None:
        writer, _ = self._require_open()
        self._require_own()
        self._sync_file(writer)
        self._require_own()
        self._keep(last)

    def sync(self) -> None:
        """Wait until all that was committed is on the disk."""
        with self._mutex:
            self._sync()

    def _rotate(self) -> SegmentWriter:
        """Go on in another segment."""
        self._sync()
        self._begin_segment()
        return self._require_open()[0]

    def _begin_segment(self) -> None:
        first = self._next
        try:
            with self._new_segment(first) as segment:
                self._change_manifest(lambda now: replace(now, segments=(*now.segments, first)))
        finally:
            if self._names(first):
                try:
                    self._write_to(segment)
                except BaseException as error:
                    self._failed = error
                    raise

    def _names(self, first: int) -> bool:
        """Whether the manifest names a segment as that which is written to."""
        return self._manifest.segments[-1] == first

    @contextmanager
    def _new_segment(self, first: int) -> Iterator[SegmentWriter]:
        """A segment that holds nothing yet, for the body to name in the manifest. Where it is not named, it is removed
        again."""
        assert self._hold is not None
        path, end = self._files.segment(first), len(header_of(self._manifest.identity, first))
        segment = None
        try:
            new_segment(self._files, self._manifest, first)
            segment = SegmentWriter(path, end, self._hold.check)
            yield segment
        except BaseException as error:
            if self._names(first):
                raise
            if segment is not None:
                segment.close()
            if self._failed is None and not isinstance(error, LostError):
                with suppress(StorageError):  # the next one of that version is written over it
                    remove_file(path)
            raise

    def _write_to(self, segment: SegmentWriter) -> None:
        """Go on in a segment that holds nothing yet, which the manifest names."""
        before, _ = self._require_open()
        self._writer = segment
        with suppress(StorageError):  # it was synced
            before.close()
        self._keep()

    # ---- reading, and what is done with versions

    def tail(self, since: int | Mark = 0) -> Iterator[CommittedChanges]:
        """Whole commits after a version, in order, up to the newest. Where one is damaged, those before it come, and
        then an error that says where. Rows are read by `changes()`: where it finds them damaged, `tail` ends with the
        same error. A version that a repair took out of the log is refused: begin again with `at`.

        since: a version, or the `mark` of a commit that was read, which is its version and its id. Where the log does
        not go on from that one, because a power cut took it or this is another copy, it raises DivergedError: begin
        again with `at`. Of a version alone it knows that only if this object read it, with `tail` or `at`."""
        self._require_readable()
        return self._remembered(whole_commits(self._files, self._mark_of(since)))

    def _mark_of(self, since: int | Mark) -> Mark:
        if not isinstance(since, tuple):
            version = integer(self._where, "since", since, low=0)
            return version, self._read.get(version, "")
        if len(since) != 2 or not isinstance(since[1], str):
            raise InputError(f"[{self._where}] since: wanted a version, or a version and an id; got {excerpt(since)}.")
        version = integer(self._where, "since", since[0], low=0)
        return version, since[1] if len(since[1]) == ID_DIGITS else ""  # a snapshot of format 1 has none

    def _remembered(self, commits: Iterator[CommittedChanges]) -> Iterator[CommittedChanges]:
        for one in commits:
            self._read.pop(one.version, None)
            self._read[one.version] = one.commit.id
            if len(self._read) > _MOST_READ:
                del self._read[next(iter(self._read))]
            yield one

    def at(self, version: int) -> Version:
        """All that the log held at a version, also where the log was compacted meanwhile, or is damaged behind it."""
        self._require_readable()
        found = version_at(self._files, integer(self._where, "version", version, low=1))
        self._read = {version: found.commit.id}  # from here on it is followed anew
        return found

    def compact(self) -> int | None:
        """Make a snapshot of the newest version from the one before and the commits since; the tables take no part in
        it, and may go on. Returns its version, or None where there is nothing to do. Call it from a thread to go on
        meanwhile: its work has a lower priority than the caller's. Other processes may, too (`shoal compact PATH`)."""
        if self._is_reading:
            self._require_open()
        if os.getpid() == self._process:
            with self._mutex:  # not while a commit begins another segment
                if self._writer is not None and self._failed is None:
                    self._require_own()
        if self.version == 0:
            return None
        return in_background(lambda go_on: compact(self._files, retain=self._retain, progress=go_on))

    def verify(self) -> Report:
        """Read every byte and compare it with its checksum."""
        self._require_readable()
        return verify(self._files)

    def rollback(self, version: int, bags: Any, *, dense: Any = None, optimizer: Any = None) -> int:
        """Have the tables' rows be as they were at an older version, and commit that as a new one, with its step and
        event time. Dense weights and optimizers go back where they are given; torch's generators do not. Where it
        fails, all is as it was."""
        with self._mutex:
            self._require_open()
            self._require_own()
            tables = LoggedTables(self._where, bags)
            root, is_dense = self._files.root, dense is not None or optimizer is not None

            def states() -> tuple[Commit, dict[str, Any]]:
                then = self.at(version)
                return then.commit, then.dense() if is_dense else {}

            def rows() -> tuple[Version, list[CommittedChanges]]:
                return self.at(version), list(self.tail(version))

            then, found = while_it_changes(root, states)
            with (
                restored_dense(self._where, found, dense, optimizer),
                rolled_back(self._where, tables, root, rows, self._manifest.identity, self._marks_of),
            ):
                told = self._told(then.step, then.event_time, {"rollback": version})
                return self._commit(bags, replace(told, fields=then.fields), dense, optimizer)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"[ChangeLog] {name}: wanted True or False; got {value!r:.100}.")
    return value


def open_log(path: str | os.PathLike[str]) -> ChangeLog:
    """A log to read, while another process writes it or none does: `ChangeLog(path, mode="r")`."""
    return ChangeLog(path, mode="r")
