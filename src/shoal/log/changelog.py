"""The change log of tables: commits of what changed, atomic and in order."""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

from shoal import _native
from shoal.config import parse_size
from shoal.config.checked import choice, integer, number
from shoal.errors import CheckpointError, ConfigError, InputError, StorageError
from shoal.log.append_sink import AppendSink
from shoal.log.commit import ID_DIGITS, Commit
from shoal.log.committed import CommittedChanges
from shoal.log.compact import compact, let_go
from shoal.log.files import Files, is_new, require_folder
from shoal.log.gather import AllRows, ChangedRows, GivenRows
from shoal.log.job import ADVICE, require_own
from shoal.log.label import Label
from shoal.log.opening import require_empty
from shoal.log.reader import LogReader, version_at, whole_commits
from shoal.log.repair import Repair, RepairWarning
from shoal.log.repair import repair as repair_log
from shoal.log.retry import while_it_changes
from shoal.log.rewrite_sink import RewriteSink
from shoal.log.rollback import rolled_back
from shoal.log.sink import commit_to
from shoal.log.states import restored_dense
from shoal.log.tables import LoggedTables
from shoal.log.threads import in_background
from shoal.log.trust import require_own_files
from shoal.log.verify import Report, verify
from shoal.log.version import Version
from shoal.log.writer import LogWriter, Pace
from shoal.records import Layout, Rows
from shoal.records.excerpt import excerpt
from shoal.table import this_rank
from shoal.table.changes import Mark

Fsync = Literal["each", "interval", "never"]
# The most commits whose ids a log remembers, for a `tail` that goes on after one of them.
_MOST_READ = 1024


class ChangeLog:
    """One ordered log of the rows that tables put and delete, with the dense weights of each version.

    path: a folder, which is made if it is not there. One process writes to it; any number of processes may read it at
        the same time.
    fsync: when a commit returns. "each": once it is on the disk. "interval": as "each" if `interval` seconds have
        passed since the last commit that was, else as "never". "never": once the operating system has it, which
        survives a killed process, but no power cut.
    segment: bytes after which another file is begun.
    retain: how many snapshots `compact` keeps. Versions from the oldest of them on can be read again.
    rng: whether commits hold the states of torch's generators, which `recover` sets. They take about 5 KB where they
        changed since the commit before, and nothing where they did not. Without them, `recover` leaves the generators
        as they are.
    mode: "r" opens an existing log to read it, while another process may write it: `tail`, `at`, `verify`, `version`
        and `newest`, each of which sees what the log holds when it is called. It takes no lock and changes no file.
    repair: True sets what is damaged aside, and goes on from the highest version that is whole; `repairs` says what was
        done. It reads all rows of the log.
    trust: True writes to a log though another user owns its folder, or something in it: that user may decide what is
        written and removed there. Reading needs no trust. Links in a log are always refused.
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
        pace = Pace(
            choice("ChangeLog", "fsync", fsync, ("each", "interval", "never")),
            number("ChangeLog", "interval", interval, low=0.0),
            parse_size(segment, "ChangeLog segment"),
        )
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
        self._mutex = threading.RLock()
        self._files = Files(path)
        self._lock: Any = None
        self._writer: LogWriter | None = None  # None where it is read only
        # Ids of the commits that this object read last, by version, oldest first: `tail` raises DivergedError where the
        # log does not go on from them.
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
            self._writer = LogWriter(self._files, self._where, self._lock, pace)
        except BaseException:
            self._lock.release()
            raise

    # ---- opening and closing

    def _repair(self) -> None:
        self.repairs = tuple(repair_log(self._files, self._where))
        for one in self.repairs:
            warnings.warn(RepairWarning(f"[{self._where}] was damaged: {one}"), stacklevel=3)

    def close(self) -> None:
        """Writes what was committed to the disk, and closes the log: another process may write it now."""
        self._is_closed = True
        if self._writer is None or not self._writer.is_of_this_process:
            return  # in a fork, the files are the parent's
        with self._mutex:
            if self._lock is None:
                return
            try:
                self._writer.close()
            finally:
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

    def _open_writer(self) -> LogWriter:
        """Returns the writer. Raises where the log takes no commits."""
        if self._writer is None:
            raise InputError(
                f"[{self._where}] wanted a log that was opened to write; this one was opened to read. Open it with "
                f"shoal.ChangeLog(path), in one process at a time."
            )
        self._writer.require_open()
        return self._writer

    # ---- committing

    @property
    def version(self) -> int:
        """The number of the newest version; 0 before the first commit."""
        newest = self.newest
        return 0 if newest is None else newest.version

    @property
    def newest(self) -> Commit | None:
        """The newest commit; None before the first."""
        if self._writer is None:
            self._require_readable()
            return while_it_changes(self._files.root, lambda: LogReader(self._files).newest())
        return self._writer.newest

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
        """Commits what changed in tables since their last commit to this log, as one version; returns its number.

        bags: a collection, a module that holds some, or a list of them. The first commit of a table holds all of its
            rows.
        dense: a module, whose collections are left out. Where it is not given, the version has the dense weights of the
            version before.
        optimizer: an object with `state_dict` and `load_state_dict` (an optimizer, scheduler or scaler), or a dict of
            such objects by name. Where it is not given, the version has the states of the version before.
        step, event_time, metadata: the user's own, which `recover` returns.

        Where a commit fails, nothing of it is in the log, and the next commit holds all of it.
        """
        with self._mutex:
            log = self._open_writer()
            label = Label.checked(self._where, step, event_time, metadata)
            return self._commit(log, LoggedTables(self._where, bags), label, dense, optimizer)

    def _commit(self, log: LogWriter, tables: LoggedTables, label: Label, dense: Any, optimizer: Any) -> int:
        changed = ChangedRows(self._where, tables, dense, optimizer, self._rng)
        return commit_to(AppendSink(log), changed, label).version

    def commit_rows(
        self, layout: Layout, pieces: Iterable[Rows], *, step: int = 0, metadata: Mapping[str, Any] | None = None
    ) -> int:
        """Commits rows that come from elsewhere as all rows of a table; returns the version. The rows that the log had
        of the table are gone. Rows are written piece by piece: no table is made. REQUIRES: each key comes once."""
        with self._mutex:
            log = self._open_writer()
            label = Label.checked(self._where, None, None, metadata)
            return commit_to(AppendSink(log), GivenRows(layout, pieces, step), label).version

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
        """Replaces all that the log holds by all rows of these tables, as one more version, which is a snapshot:
        `shoal.save` does that. Returns the version. Until the snapshot is complete the log is as it was.

        progress: called with numbers of rows that were written.
        version: its number, larger than that of the newest; None is the next one.
        save_id: the id of the save that it is a part of.
        """
        with self._mutex:
            log = self._open_writer()
            tables = LoggedTables(self._where, bags)
            version = integer(self._where, "version", log.next if version is None else version, low=log.next)
            label = replace(Label.checked(self._where, step, event_time, metadata), save=save_id)
            rows = AllRows(self._where, tables, dense, optimizer, self._rng, progress)
            sink = RewriteSink(log, version)
            commit_to(sink, rows, label)
            assert sink.before is not None
            let_go(self._files, sink.before, log.manifest)
            return version

    def sync(self) -> None:
        """Waits until all that was committed is on the disk."""
        with self._mutex:
            self._open_writer().sync()

    # ---- reading, and what is done with versions

    def tail(self, since: int | Mark = 0) -> Iterator[CommittedChanges]:
        """Yields the whole commits after a version, in order, up to the newest. Where one is damaged, those before it
        come first, and then an error that says where. `changes()` reads the rows; where it finds them damaged, `tail`
        ends with the same error. A version that a repair took out of the log is refused: begin again with `at`.

        since: a version, or the `mark` of a commit that was read, which is its version and its id. Where the log does
            not go on from that commit, because a power cut took it or this is another copy, DivergedError is raised:
            begin again with `at`. For a version without an id this is only known if this object has read it, with
            `tail` or `at`.
        """
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
        """Returns all that the log held at a version. Others may compact the log, and later versions may be damaged."""
        self._require_readable()
        found = version_at(self._files, integer(self._where, "version", version, low=1))
        self._read = {version: found.commit.id}  # `tail` goes on from here
        return found

    def compact(self) -> int | None:
        """Makes a snapshot of the newest version, from the snapshot before and the commits since. Returns its version,
        or None where there is nothing to do. The tables take no part in it: call it in a thread of your own to go on
        training. It works at a lower priority than the caller. Another process can do the same (`shoal compact
        PATH`)."""
        log = self._open_writer() if self._writer is None else self._writer
        if log.is_of_this_process:
            with self._mutex:  # not while a commit begins another segment
                if log.is_open:
                    log.require_own()
        if self.version == 0:
            return None
        return in_background(lambda go_on: compact(self._files, retain=self._retain, progress=go_on))

    def verify(self) -> Report:
        """Reads every byte and compares it with its checksum."""
        self._require_readable()
        return verify(self._files)

    def rollback(self, version: int, bags: Any, *, dense: Any = None, optimizer: Any = None) -> int:
        """Makes the tables' rows what they were at an older version, and commits that as a new version, with the step
        and event time of the old one; returns its number. Dense weights and optimizers go back where they are given;
        torch's generators do not. Where it fails, all is as it was before the call."""
        with self._mutex:
            log = self._open_writer()
            log.require_own()
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
                rolled_back(self._where, tables, root, rows, log.manifest.identity, log.marks_of),
            ):
                label = Label.checked(self._where, then.step, then.event_time, {"rollback": version})
                return self._commit(log, tables, replace(label, fields=then.fields), dense, optimizer)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"[ChangeLog] {name}: wanted True or False; got {value!r:.100}.")
    return value


def open_log(path: str | os.PathLike[str]) -> ChangeLog:
    """Opens a log to read it, while another process may write it: the same as `ChangeLog(path, mode="r")`."""
    return ChangeLog(path, mode="r")
