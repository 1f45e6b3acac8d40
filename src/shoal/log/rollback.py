"""Rolling tables back to an older version of a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.log.commit import TableCommit
from shoal.log.committed import CommittedChanges
from shoal.log.files import FilePath
from shoal.log.retry import while_it_changes
from shoal.log.tables import LoggedTable, LoggedTables
from shoal.log.version import Version, Winners
from shoal.records import Rows, join
from shoal.table.changes import Mark


@contextmanager
def rolled_back(
    where: str,
    tables: LoggedTables,
    path: FilePath,
    read: Callable[[], tuple[Version, list[CommittedChanges]]],
    log: str,
    marks_of: Callable[[str], tuple[Mark, ...]],
) -> Iterator[None]:
    """Sets the rows of tables to those of a version; where the body fails, to those that they had before.

    path: the log's folder. log: its identity.
    read: returns the version and the commits after it. Changes of the tables after the last of these commits are
        undone, too. It is called again where another process removed files of the log in the meantime.
    marks_of: returns the newest commit of the log that changed a table, and others at which the table is the same.
    """
    now: list[_State] = []
    try:
        with tables.exclusive():
            # All is read before anything changes.
            then = while_it_changes(path, lambda: _all_then(where, tables, *read(), log, marks_of))
            now = [_now(state) for state in then]
            tables.forget_forwards()
            for state in then:
                state.restore()
        yield
    except BaseException as error:
        try:
            with tables.exclusive():
                for state in now:
                    state.restore()
        except Exception as again:
            names = ", ".join(map(repr, tables))
            error.add_note(
                f"Tables {names} are rolled back in part ({again!r:.200}). Roll them back again, or recover them."
            )
        raise


def _all_then(
    where: str,
    tables: LoggedTables,
    version: Version,
    since: list[CommittedChanges],
    log: str,
    marks_of: Callable[[str], tuple[Mark, ...]],
) -> "list[_State]":
    """Returns what tables had at a version, for the keys that may have changed since."""
    for name in tables:
        if name not in version.layouts and not any(name in one.commit.tables for one in since):
            raise CheckpointError(f"[{where}] the log has no table {name!r}: there is nothing to roll it back to.")
    for name, table in tables.items():
        if name not in version.layouts:
            continue
        layout = version.layouts[name]
        if layout.dim == table.layout.dim:
            kind = version.commit.tables[name].optimizer
            table.require_trained_alike(where, kind, layout, "Make the table's optimizer as it was at that version.")
        if difference := layout.difference(table.layout):
            raise CheckpointError(f"[{where}] table {name!r} has another layout than at that version: {difference}.")
    return [_then(table, version, _touched(table, since, log, marks_of(name))) for name, table in tables.items()]


@dataclass(frozen=True)
class _State:
    """What a table had for some keys: rows, or none (`gone`); and what it remembered besides."""

    table: LoggedTable
    rows: Rows | None
    gone: Tensor
    memory: TableCommit

    @property
    def keys(self) -> Tensor:
        return self.gone if self.rows is None else torch.cat([self.rows.keys, self.gone])

    def restore(self) -> None:
        """Sets the table to this state."""
        table = self.table
        if len(self.gone):
            table.group.erase(table.number, self.gone.to(table.group.device))
        if self.rows is not None and len(self.rows):
            table.table.put(self.rows)
        table.remember(self.memory)


def _touched(table: LoggedTable, since: list[CommittedChanges], log: str, marks: tuple[Mark, ...]) -> Tensor | None:
    """Returns the keys that may have changed since a version; None if all may have."""
    table.table.changes.follow(log, *marks)
    table.table.seal()
    live = table.table.changes.look(log)
    replaced = any(one.commit.tables[table.name].replaces for one in since if table.name in one.commit.tables)
    if live is None or replaced:
        return None
    touched: Tensor = torch.unique(torch.cat([live, Winners(table.name, since).keys]))
    return touched


def _then(table: LoggedTable, version: Version, touched: Tensor | None) -> _State:
    """Returns what keys had at a version."""
    found = []
    if table.name in version.commit.tables:
        for rows in version.rows(table.name):
            wanted = rows if touched is None else rows.some(torch.isin(rows.keys, touched))
            if len(wanted):
                found.append(wanted)
    old = join(found) if found else None
    there = table.table.keys().cpu() if touched is None else touched
    gone = there if old is None else there[~torch.isin(there, old.keys)]
    return _State(table, old, gone, version.commit.tables.get(table.name, TableCommit(0, 0)))


def _now(then: _State) -> _State:
    """Returns what the same keys have now."""
    rows, found = then.table.table.rows(then.keys)
    return _State(then.table, rows, then.keys[~found], then.table.memory())
