"""A sink takes commits, and a source gives the changes of one. `commit_to` is the way from a source to a sink.

A source (gather.py) knows tables and no files. A sink knows changes and no tables: the segments of a log
(append_sink.py), a snapshot that replaces a log (rewrite_sink.py), memory (`MemorySink`).

    begin(layouts)  →  append(change) …  →  commit(commit, states)
                                         →  abandon(error), where anything failed
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shoal.log.change import TableChange
from shoal.log.commit import Commit, TableCommit, id_of
from shoal.log.label import Label
from shoal.records import Layout
from shoal.table.changes import BEGINNING, Mark


@dataclass(frozen=True)
class Base:
    """What a sink had when a commit began.

    sink: its identity, by which tables remember what it has. version: the number of the commit that begins.
    marks: for each table of the commit, the newest commit that changed it, as far as the sink knows, and others at
        which its rows are the same.
    """

    sink: str
    version: int
    marks: Mapping[str, tuple[Mark, ...]]


class Sink(Protocol):
    """Takes commits, one at a time, and shows each one whole or not at all."""

    def begin(self, layouts: Sequence[Layout]) -> Base:
        """Begins a commit to tables with these layouts, which may be new. What an earlier commit left that did not
        succeed is removed first. Where this raises, no commit began."""

    def append(self, change: TableChange) -> None:
        """Takes one change. Its memory is the caller's again when this returns."""

    def commit(self, commit: Commit, states: Mapping[str, Any]) -> Commit:
        """Makes what was appended visible, all at once, and returns the commit as the sink has it: with an id, and with
        what it says of tables that the commit does not name. states: state dicts that belong to it; none where they are
        as before. Once this returns, the tables forget what they kept for it."""

    def abandon(self, error: BaseException) -> None:
        """The commit that began failed with `error`: what was appended goes. If `commit` had begun to make it visible,
        the sink may refuse further commits until what it holds is known."""


@dataclass(frozen=True)
class Gathered:
    """What a source says of the changes that it gave: of each table, of torch's generators, and state dicts."""

    tables: Mapping[str, TableCommit]
    rng: Mapping[str, bytes] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Gives the changes of one commit."""

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of its tables."""

    def gather(self, base: Base, append: Callable[[TableChange], None]) -> Gathered:
        """Calls `append` with every change since what the sink has, and returns what belongs to them."""

    def committed(self, sink: str, commit: Mark) -> None:
        """The changes are in that commit of the sink, and need not be given to it again."""


def commit_to(sink: Sink, source: Source, label: Label) -> Commit:
    """Makes the changes of a source one commit of a sink; returns it. Where this fails, the next commit holds these
    changes, too; or all rows, where the sink had taken the commit before the failure."""
    base = sink.begin(source.layouts)
    try:
        found = source.gather(base, sink.append)
        made = sink.commit(label.commit(base.version, found.tables, found.rng), found.states)
        source.committed(base.sink, made.mark)
    except BaseException as error:
        sink.abandon(error)
        raise
    return made


@dataclass(frozen=True)
class MemoryCommit:
    """A commit in memory: what it says, its changes as frames, and its state dicts."""

    commit: Commit
    frames: tuple[bytes, ...]
    states: Mapping[str, Any]


class MemorySink:
    """Keeps commits in memory, for tests and as an example. Its frames are those that a log's segment has.

    Thread safety: one thread at a time.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.commits: list[MemoryCommit] = []
        self._layouts: dict[str, Layout] = {}  # a table's number is its place
        self._changed: dict[str, Mark] = {}
        self._frames: list[bytes] = []

    @property
    def newest(self) -> Commit | None:
        """The newest commit; None before the first."""
        return self.commits[-1].commit if self.commits else None

    def begin(self, layouts: Sequence[Layout]) -> Base:
        """As `Sink` says."""
        self._frames = []
        for layout in layouts:
            self._layouts.setdefault(layout.name, layout)
        mark = BEGINNING if self.newest is None else self.newest.mark
        marks = {layout.name: (self._changed.get(layout.name, BEGINNING), mark) for layout in layouts}
        return Base(self.identity, len(self.commits) + 1, marks)

    def append(self, change: TableChange) -> None:
        """As `Sink` says."""
        number = list(self._layouts).index(change.table)
        version = len(self.commits) + 1
        frame = change.frame(self._layouts[change.table], table=number, version=version)
        self._frames.append(b"".join(frame))

    def commit(self, commit: Commit, states: Mapping[str, Any]) -> Commit:
        """As `Sink` says."""
        before = self.newest
        made = replace(
            commit.after(before),
            id=id_of(b"".join([repr(before and before.id).encode(), *self._frames])),
            before=None if before is None else before.id,
        )
        self.commits.append(MemoryCommit(made, tuple(self._frames), dict(states)))
        self._changed.update(dict.fromkeys(commit.tables, made.mark))
        return made

    def abandon(self, error: BaseException) -> None:
        """As `Sink` says."""
        self._frames = []
