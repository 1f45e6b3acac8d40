"""Going on after a crash, with tables, dense weights, optimizers and generators as at the last commit."""

from pathlib import Path
from typing import Any

from shoal.checkpoint.loading import emptied, fill, require_path
from shoal.checkpoint.progress import progress_bar
from shoal.checkpoint.ranks import Rank, require_no_ranks
from shoal.config.checked import integer
from shoal.errors import CheckpointError, StorageError
from shoal.log.commit import Commit
from shoal.log.files import Files, is_new
from shoal.log.generators import set_random_states
from shoal.log.reader import LogReader
from shoal.log.retry import while_it_changes
from shoal.log.states import Done, restored_dense
from shoal.log.tables import LoggedTables


def recover(
    path: str | Path,
    bags: Any,
    *,
    dense: Any = None,
    optimizer: Any = None,
    version: int | None = None,
    progress: bool | None = None,
) -> Commit | None:
    """Sets everything to what it was at the last commit of a log, or at an older version, and returns that commit.
    Where nothing was committed yet, returns None and changes nothing.

    version: None is the newest. After an older one, the log may be damaged. The next commit to the log then holds all
        rows, as the version after the newest; nothing is taken out of the log. Give that commit dense= and optimizer=,
        too: without them it has those of the newest version.

    Torch's generators stay as they are where the version has no states of them, because it was committed with rng=False
    or imported.

    The tables must be made as they were: layout, optimizer and seed. On CPU and with the same batches, training that
    goes on from here gives the same bits as training that never stopped. The next commit to this log holds what changed
    since, whether a ChangeLog is open already or not.
    """
    require_path("recover", path)
    if version is not None:
        integer("recover", "version", version, low=1)
    where = f"recover {path}"
    return while_it_changes(path, lambda: _recover(where, path, bags, dense, optimizer, version, progress))


def _recover(
    where: str, path: str | Path, bags: Any, dense: Any, optimizer: Any, wanted: int | None, progress: bool | None
) -> Commit | None:
    files = Files(path)
    if is_new(files):
        require_no_ranks(where, path)
        if wanted is not None:
            raise CheckpointError(f"[{where}] version {wanted} was asked for; there is no log. Is the path right?")
        return None
    version = LogReader(files).at(wanted)
    if version is None:
        return None
    tables = LoggedTables(where, bags)
    for name, table in tables.items():
        if name not in version.layouts:
            continue
        layout = version.layouts[name]
        if layout.dim == table.layout.dim:
            table.require_trained_alike(
                where,
                version.commit.tables[name].optimizer,
                layout,
                "Make the table's optimizer as it was; shoal.load(state=False) loads weights alone.",
            )
        if difference := layout.difference(table.layout):
            raise CheckpointError(
                f"[{where}] table {name!r} is not as it was committed: {difference}. Make it as it was; "
                f"shoal.load converts some."
            )
    strange, missed = set(tables) - set(version.layouts), set(version.layouts) - set(tables)
    if strange and (missed or len(strange) == len(tables)):
        has = ", ".join(map(repr, version.layouts)) or "none"
        raise CheckpointError(
            f"[{where}] wanted tables of the log, which has {has}; got {', '.join(map(repr, tables))}. Were they "
            f"renamed? shoal.load(tables=) takes those that it has."
        )
    states = version.dense() if dense is not None or optimizer is not None else {}
    known = {name: table for name, table in tables.items() if name in version.layouts}
    rows = sum(version.changes(name) for name in known)
    for name, table in known.items():
        table.table.require_room(version.commit.tables[name].rows)
    done = Done()
    with (
        restored_dense(where, states, dense, optimizer, done),
        progress_bar("recovering", rows, progress) as bar,
        emptied(tables, dict(tables), done),
    ):
        for name, table in known.items():
            table.follow(version.manifest.identity, version.commit.mark)
            fill(where, version, table, True, Rank(), bar)
            memory = version.commit.tables[name]
            if len(table.table) != memory.rows:
                raise StorageError(
                    f"[{where}] table {name!r}: wanted the {memory.rows} rows of version {version.commit.version}; its "
                    f"changes make {len(table.table)}. Restore the log from another copy."
                )
            table.remember(memory)
            table.equals(version.manifest.identity, version.commit.mark)
        for name in set(tables) - set(known):
            tables[name].table.step = 0  # as it was before it was committed for the first time
        set_random_states(where, version.commit.rng)
        done.is_done = True
    return version.commit
