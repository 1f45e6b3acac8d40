"""Having the rows of an older version again."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.log.commit import TableCommit
from shoal.log.reader import CommittedChanges, Version, Winners
from shoal.log.tables import LoggedTable, LoggedTables
from shoal.records import Rows, join
from shoal.table.changes import Mark


def roll_back(
    where: str,
    tables: LoggedTables,
    version: Version,
    since: list[CommittedChanges],
    log: str,
    marks_of: Callable[[str], tuple[Mark, ...]],
) -> None:
    """Have the rows of tables be as they were at a version. `since`: the commits behind it; what changed in the tables
    behind the last of these goes, too. `marks_of`: the newest commit of the log that changed a
    table, and others at which it is the same."""
    for name in tables:
        if name not in version.layouts and not any(name in one.commit.tables for one in since):
            raise CheckpointError(f"[{where}] the log has no table {name!r}: there is nothing to roll it back to.")
    for name, table in tables.items():
        if name in version.layouts and (difference := version.layouts[name].difference(table.layout)):
            raise CheckpointError(f"[{where}] table {name!r} has another layout than at that version: {difference}.")
    with tables.alone():
        # All is read before anything changes.
        before = {
            name: _before(table, version, _touched(table, since, log, marks_of(name))) for name, table in tables.items()
        }
        for group in tables.groups:
            group.forget_forwards()
        for name, table in tables.items():
            _restore(table, *before[name])
            table.remember(version.commit.tables.get(name, TableCommit(0, 0)))


def _touched(table: LoggedTable, since: list[CommittedChanges], log: str, marks: tuple[Mark, ...]) -> Tensor | None:
    """The keys whose rows may not be as they were; None if all may."""
    table.table.changes.follow(log, *marks)
    table.table.seal()
    live = table.table.changes.look(log)
    replaced = any(one.commit.tables[table.name].replaces for one in since if table.name in one.commit.tables)
    if live is None or replaced:
        return None
    touched: Tensor = torch.unique(torch.cat([live, Winners(table.name, since).keys]))
    return touched


def _before(table: LoggedTable, version: Version, touched: Tensor | None) -> tuple[Rows | None, Tensor]:
    """The rows that keys had, and the keys that had none."""
    found = []
    if table.name in version.commit.tables:
        for rows in version.rows(table.name):
            wanted = rows if touched is None else rows.some(torch.isin(rows.keys, touched))
            if len(wanted):
                found.append(wanted)
    old = join(found) if found else None
    there = table.table.keys().cpu() if touched is None else touched
    return old, there if old is None else there[~torch.isin(there, old.keys)]


def _restore(table: LoggedTable, old: Rows | None, gone: Tensor) -> None:
    if len(gone):
        table.group.erase(table.number, gone.to(table.group.device))
    if old is not None and len(old):
        table.table.put(old)
