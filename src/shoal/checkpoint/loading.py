"""Loading tables from a checkpoint or a log, whatever tiers, devices and ranks it was saved with."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.progress import progress_bar
from shoal.checkpoint.ranks import Rank, parts_of
from shoal.config.checked import integer
from shoal.errors import CheckpointError, InputError, NonFiniteWarning, NotFoundError
from shoal.log.change import TableChange
from shoal.log.commit import Commit
from shoal.log.files import FilePath, Files, require_folder
from shoal.log.generators import set_random_states
from shoal.log.reader import LogReader
from shoal.log.retry import while_it_changes
from shoal.log.snapshot import buckets_of
from shoal.log.states import Done, restored_dense
from shoal.log.tables import LoggedTable, LoggedTables
from shoal.log.threads import made_ahead
from shoal.log.version import Version
from shoal.records import Layout, Rows
from shoal.records.finite import count_not_finite

# Frames from the warning of `fill` to the caller of `load` or `recover`.
_TO_CALLER = 6


def load(
    path: str | Path,
    bags: Any,
    *,
    dense: Any = None,
    optimizer: Any = None,
    version: int | None = None,
    tables: Sequence[str] | None = None,
    state: bool = True,
    cast: bool = False,
    rng: bool = False,
    rank: int = 0,
    ranks: int = 1,
    progress: bool | None = None,
) -> Commit:
    """Replaces the rows of tables by those of a checkpoint or a log; returns the commit that they are from.

    bags: a collection, or a list of them.
    dense, optimizer: a module, and an object with a state dict, which are loaded, too.
    version: a version of a log; None is the newest.
    tables: the names of the tables to load; None is all of the collection.
    state: False loads only weights; rows get the state of new rows. Otherwise rows that another optimizer trained, or
        the same one with settings that give rows other state, are refused. A table without an optimizer takes only
        weights anyway.
    cast: whether weights may be of another type; they are rounded to the table's.
    rng: True sets torch's generators to the states that were saved, to go on training; those of the first of several
        ranks. A checkpoint without these states is refused.
    rank, ranks: only rows of that rank's buckets are loaded.
    progress: whether to show a bar; None means if standard error is a terminal.

    Scores and the table's step come with the rows. With the state come the settings of the optimizer, learning rate
    included. Sizes of tiers, devices and the ranks that saved do not matter.

    Wrong settings, and tables without room, raise before anything changes. Where a file is damaged in the middle, or a
    weight is too large for the table's type, tables are left empty, and the error says so.
    """
    where = f"load {path}"
    require_path("load", path)
    held = LoggedTables(where, bags)
    wanted = {name: held[name] for name in _names(where, held, tables)}
    if version is not None:
        integer(where, "version", version, low=1)
    here = Rank(rank, ranks)

    def attempt() -> Commit:
        versions = [_version(part, version) for part in parts_of(path)]
        require_one_save(where, versions)
        plans = [_Plan(where, one, wanted, state, cast, here) for one in versions]
        commit = versions[0].commit
        if rng and not commit.rng:
            raise CheckpointError(
                f"[{where}] rng: version {commit.version} has no states of torch's generators, as it was saved or "
                f"committed with rng=False or imported. Leave rng= out."
            )
        states = versions[0].dense() if dense is not None or optimizer is not None else {}
        rows = {name: sum(plan.commits[name].rows for plan in plans) for name in wanted}
        done = Done()
        if ranks == 1:
            for name, table in wanted.items():
                table.table.require_room(rows[name])
        with (
            restored_dense(where, states, dense, optimizer, done),
            progress_bar("loading", sum(plan.changes for plan in plans), progress) as bar,
            emptied(held, wanted, done),
        ):
            for plan in plans:
                plan.fill(bar)
            for name, table in wanted.items():
                if ranks == 1 and len(table.table) != rows[name]:
                    raise CheckpointError(
                        f"[{where}] table {name!r}: its parts have {rows[name]} rows, of {len(table.table)} keys. Were "
                        f"keys saved by several ranks?"
                    )
                memory = commit.tables[name]
                step = max(plan.commits[name].step for plan in plans)
                is_trained_so = state and memory.optimizer in (None, table.optimizer)
                table.remember(replace(memory, step=step, hyper=memory.hyper if is_trained_so else {}))
            if rng:
                set_random_states(where, commit.rng)
            done.is_done = True
        return commit

    return while_it_changes(path, attempt)


def require_one_save(where: str, versions: Sequence[Version]) -> None:
    """Raises CheckpointError where the parts of ranks were not saved together: one rank saved again and another did
    not, or they are of two runs. Parts of older Shoals, which have no id, are compared by their steps and versions."""
    first = versions[0].commit
    for number, one in enumerate(versions):
        commit = one.commit
        is_same_step = commit.step == first.step
        if not is_same_step or (commit.save == first.save and commit.version != first.version):
            raise CheckpointError(
                f"[{where}] wanted all ranks at one step; rank 0 saved step {first.step} (version {first.version}) and "
                f"rank {number} step {commit.step} (version {commit.version}). A save was interrupted: load another "
                f"checkpoint, or save again on all ranks."
            )
        if commit.save != first.save:
            raise CheckpointError(
                f"[{where}] wanted parts of one save; rank 0 saved step {first.step} with the id {first.save} and rank "
                f"{number} with {commit.save}: they are of two runs, or one rank saved that step again. Load another "
                f"checkpoint, or save again on all ranks."
            )


def _names(where: str, held: LoggedTables, tables: Sequence[str] | None) -> list[str]:
    if isinstance(tables, str):
        raise InputError(f"[{where}] tables: wanted a list of names; got {tables!r}.")
    names = list(held) if tables is None else list(tables)
    for name in names:
        if name not in held:
            raise NotFoundError(f"[{where}] tables: the collection has {', '.join(map(repr, held))}; got {name!r}.")
    return names


def _version(part: FilePath, version: int | None) -> Version:
    found = LogReader(Files(part)).at(version)
    if found is None:
        raise CheckpointError(f"[log {part}] nothing was committed to it yet. Was a save interrupted?")
    return found


def require_path(call: str, path: Any) -> None:
    """Raises InputError where `path` is no path, CheckpointError where a file is in its place, and StorageError where
    the system does not take it."""
    if not isinstance(path, (str, Path)) or not str(path) or "\0" in str(path):
        raise InputError(f"[{call}] path: wanted the path of a folder; got {path!r:.100}.")
    require_folder(f"{call} {path}", Path(path))


@contextmanager
def emptied(held: LoggedTables, wanted: dict[str, LoggedTable], done: Done) -> Iterator[None]:
    """Removes all rows of tables, and holds the exclusive lock while the body fills them. Where the body fails before
    it is done, they are empty."""
    with held.exclusive():
        is_empty = False
        try:
            held.clear(wanted)
            is_empty = True
            yield
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception) or held.is_interrupted
            if done.is_done or not (is_empty or is_interrupted):
                raise
            names = ", ".join(map(repr, wanted))
            error.add_note(f"Tables {names} were being loaded, and are empty now. Load them again.")
            held.clear(wanted)
            raise


class _Plan:
    """Loads one part of a checkpoint into tables. Raises where it does not fit them, before anything changes."""

    def __init__(
        self, where: str, version: Version, wanted: dict[str, LoggedTable], state: bool, cast: bool, rank: Rank
    ) -> None:
        self._where = where
        self._version = version
        self._wanted = wanted
        self._rank = rank
        self._state = state
        for name, table in wanted.items():
            if name not in version.layouts:
                has = ", ".join(map(repr, version.layouts)) or "none"
                raise CheckpointError(
                    f"[{where}] wanted a table {name!r}; the checkpoint has {has}. Name those to load in tables=."
                )
            _check(where, version.layouts[name], table.layout, cast)
            kind = version.commit.tables[name].optimizer
            nothing_is_lost = not table.optimizer or (kind == "" and not table.layout.columns)
            if state and not nothing_is_lost:
                table.require_trained_alike(
                    where,
                    kind,
                    version.layouts[name],
                    "Make the table's optimizer as it was, or give state=False to load weights alone.",
                )
        self.commits = {name: version.commit.tables[name] for name in wanted}
        self.changes = sum(version.changes(name) for name in wanted)

    def fill(self, progress: Callable[[int], None]) -> None:
        """Puts the part's rows in its tables."""
        for table in self._wanted.values():
            fill(self._where, self._version, table, self._state, self._rank, progress)


def fill(
    where: str, version: Version, table: LoggedTable, state: bool, rank: Rank, progress: Callable[[int], None]
) -> None:
    """Puts a version's rows of a rank's buckets in an empty table, whose layout may be another one than the version's.
    Gives a NonFiniteWarning where some have NaN or infinity. REQUIRES: the exclusive lock is held."""
    layout = version.layouts[table.name]
    first, end = rank.buckets(layout.buckets)
    buckets = None if rank.ranks == 1 else (first, end)
    table.table.expect(min(version.commit.tables[table.name].rows, version.most_rows(table.name)) // rank.ranks)
    odd = 0
    with table.table.filling():
        for change in made_ahead(version.steps(table.name, first, end)):
            odd += _apply(table, change, layout, state, buckets)
            progress(len(change.keys))
    if odd:
        warnings.warn(
            NonFiniteWarning(
                f"[{where}] table {table.name!r}: {odd} of the rows that were read have NaN or infinity. Lookups of "
                f"such keys give them too. Find them by table.lookup(table.keys()), and erase them."
            ),
            stacklevel=_TO_CALLER,
        )


def _apply(
    table: LoggedTable, change: TableChange, layout: Layout, state: bool, buckets: tuple[int, int] | None
) -> int:
    """Applies a change of a layout to a table; returns how many of its rows have NaN or infinity. buckets: those of
    which rows are put; None is all."""
    target = table.layout
    if change.puts is None:
        assert change.deletes is not None
        table.group.erase(table.number, change.deletes.to(table.group.device))
        return 0
    rows = change.puts
    if buckets is not None:
        of = buckets_of(rows.keys.contiguous(), layout.buckets)
        rows = rows.some((of >= buckets[0]) & (of < buckets[1]))
    kept = {column.name for column in target.columns} if state else set()
    columns = {name: column for name, column in rows.state.items() if name in kept}
    weights = rows.weights
    if layout.dtype != target.dtype:
        weights = _rounded(weights, target, rows.keys)
    put = Rows(rows.keys, weights, columns, rows.scores)
    table.table.put(put)
    return count_not_finite(put)


def _rounded(weights: Tensor, target: Layout, keys: Tensor) -> Tensor:
    """Returns weights in another type. Raises CheckpointError where one is too large for it: infinity would be trained
    on."""
    rounded = weights.to(getattr(torch, target.dtype))
    lost = (rounded.isinf() & weights.isfinite()).any(dim=1)
    if bool(lost.any()):
        at = int(lost.nonzero()[0])
        most = float(weights[at].abs().max())
        raise CheckpointError(
            f"[table {target.name!r}] key {int(keys[at])}: its weight {most:g} is more than {target.dtype} has. "
            f"Load into a table of another type."
        )
    return rounded


def _check(where: str, has: Layout, wants: Layout, cast: bool) -> None:
    of = f"[{where}] table {wants.name!r}"
    if has.dim != wants.dim:
        raise CheckpointError(f"{of}: the checkpoint's rows have {has.dim} weights; the table's have {wants.dim}.")
    if has.dtype != wants.dtype and not cast:
        raise CheckpointError(
            f"{of}: the checkpoint's weights are {has.dtype}; the table's are {wants.dtype}. Give cast=True to convert."
        )
    if has.buckets != wants.buckets:
        raise CheckpointError(
            f"{of}: the checkpoint has {has.buckets} buckets; the table has {wants.buckets}. Make it with "
            f"buckets={has.buckets}."
        )
