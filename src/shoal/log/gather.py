"""Where the changes of a commit come from: what changed in tables, all of their rows, or rows from elsewhere."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shoal.log.change import KEYS_EACH, TableChange, rows_in_block
from shoal.log.commit import TableCommit
from shoal.log.generators import random_states
from shoal.log.sink import Base, Gathered
from shoal.log.states import require_states, states_of
from shoal.log.tables import LoggedTable, LoggedTables
from shoal.records import Layout, Rows
from shoal.table.changes import Mark

Append = Callable[[TableChange], None]


class _Training:
    """Tables, and what else of a training run belongs to a commit of them."""

    def __init__(self, where: str, tables: LoggedTables, dense: Any, optimizer: Any, rng: bool) -> None:
        require_states(where, dense, optimizer)
        self._where = where
        self._tables = tables
        self._dense = dense
        self._optimizer = optimizer
        self._rng = rng

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the tables."""
        return [table.layout for table in self._tables.values()]

    def _random_states(self) -> dict[str, bytes]:
        return random_states() if self._rng else {}

    def _states(self) -> dict[str, Any]:
        return states_of(self._where, self._dense, self._optimizer)


class ChangedRows(_Training):
    """What changed in tables since what a sink has of them: puts and deletes, or all rows where that is not known."""

    def gather(self, base: Base, append: Append) -> Gathered:
        """As `Source` says."""
        # The exclusive lock: a seal clears flags that lookups stamp, and other logs may seal the same tables.
        with self._tables.exclusive():
            said = {name: _changes_of(table, base, append) for name, table in self._tables.items()}
            rng = self._random_states()
        return Gathered(said, rng, self._states())

    def committed(self, sink: str, commit: Mark) -> None:
        """As `Source` says."""
        with self._tables.exclusive():
            for table in self._tables.values():
                table.table.changes.committed(sink, commit)


class AllRows(_Training):
    """All rows of tables, for a sink that keeps nothing of what it had. `progress` is called with the number of rows of
    each change."""

    def __init__(
        self,
        where: str,
        tables: LoggedTables,
        dense: Any,
        optimizer: Any,
        rng: bool,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> None:
        super().__init__(where, tables, dense, optimizer, rng)
        self._progress = progress

    def gather(self, _base: Base, append: Append) -> Gathered:
        """As `Source` says."""
        with self._tables.shared():
            said = {}
            for name, table in self._tables.items():
                for rows in table.table.by_bucket(rows_in_block(table.layout)):
                    append(TableChange(name, puts=rows))
                    self._progress(len(rows))
                said[name] = table.memory()
            rng = self._random_states()
        return Gathered(said, rng, self._states())

    def committed(self, _sink: str, _commit: Mark) -> None:
        """As `Source` says. The tables kept nothing for the sink."""


class GivenRows:
    """Rows that come from elsewhere, piece by piece, and replace all of a table. REQUIRES: each key comes once."""

    def __init__(self, layout: Layout, pieces: Iterable[Rows], step: int) -> None:
        self.layouts = [layout]
        self._pieces = pieces
        self._step = step

    def gather(self, _base: Base, append: Append) -> Gathered:
        """As `Source` says."""
        name, rows = self.layouts[0].name, 0
        for piece in self._pieces:
            append(TableChange(name, puts=piece))
            rows += len(piece)
        return Gathered({name: TableCommit(self._step, rows, puts=rows, replaces=True)})

    def committed(self, _sink: str, _commit: Mark) -> None:
        """As `Source` says. No table kept anything."""


def _changes_of(table: LoggedTable, base: Base, append: Append) -> TableCommit:
    """Appends what changed in a table since a sink's newest commit, and returns what the commit says of it."""
    held, name = table.table, table.name
    held.changes.follow(base.sink, *base.marks[name])
    held.seal()
    keys = held.changes.look(base.sink)
    rows_each = rows_in_block(table.layout)
    puts = 0
    if keys is None:
        for rows in held.by_bucket(rows_each):
            append(TableChange(name, puts=rows))
            puts += len(rows)
        return table.memory(puts, replaces=True)
    gone = []
    for some in keys.split(rows_each):
        rows, found = held.rows(some)
        if len(rows):
            append(TableChange(name, puts=rows))
        puts += len(rows)
        if not bool(found.all()):
            gone.append(some[~found])
    deleted = torch.cat(gone) if gone else keys[:0]
    for some in deleted.split(KEYS_EACH) if len(deleted) else ():
        append(TableChange(name, deletes=some))
    return table.memory(puts, len(deleted))
