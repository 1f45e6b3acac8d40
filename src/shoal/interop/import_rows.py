"""Rows from files of other formats, on their way into a table or a log. All of a file is checked before anything of it
is used."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.progress import progress_bar
from shoal.config import Optimizer, optimizers
from shoal.errors import InputError, ShoalError, StorageError
from shoal.interop.export_rows import LAYOUT, STEP, rows_each
from shoal.log import ChangeLog
from shoal.records import Layout, Rows, StateColumn, layout_of, strict_json
from shoal.table import Group, TableHandle

# More than anybody counts to, and training on from it stays within the 2^63 - 1 that a commit has room for.
_MOST_STEP = 2**62
_KEYS_EACH = 1 << 20


@dataclass(frozen=True)
class Shape:
    """What the rows of a file are. dim: None where it has no rows that would tell."""

    rows: int
    dim: int | None
    state: Mapping[str, int] = field(default_factory=dict)  # widths, by column; 0 where no row tells
    has_scores: bool = False
    told: Mapping[str, str] = field(default_factory=dict)  # what our exports say in addition to the rows


class RowFile(Protocol):
    """A file with rows of a table, open for reading."""

    where: str
    shape: Shape

    def pieces(self, each: int) -> Iterator[Rows]:
        """The rows in pieces of at most that many, in the file's order and types: keys int64, the rest any floats. They
        have the shape, and are not checked otherwise."""


def put_rows(file: RowFile, into: TableHandle, state: bool, progress: bool | None) -> int:
    """Put a file's rows in a live table; returns how many."""
    if not isinstance(into, TableHandle):
        raise InputError(f"[import] into: wanted a table, as bags.table('item') is; got {type(into).__name__}.")
    group, number = into.place
    layout = layout_of(group.tables[number].config, group.seed)
    columns = group.tables[number].config.columns
    widths = {column.name: column.width for column in columns}
    unsigned = {column.name for column in columns if not column.signed}
    kept = _columns(file, widths, state)
    _require_dim(file, layout.dim)
    checked = _Checked(file, layout, kept, unsigned)
    with progress_bar("checking", file.shape.rows, progress) as bar:
        keys = checked.require_all_right(bar)
    done: int | None = None
    try:
        with progress_bar("importing", file.shape.rows, progress) as bar, group.writing():
            _make_room(group, number, keys)
            done = 0
            for rows in checked.rows():
                group.tables[number].put(rows)
                done += len(rows)
                bar(len(rows))
    except BaseException as error:
        if done is not None:
            error.add_note(
                f"[table {into.name!r}] {done} of the {file.shape.rows} rows of {file.where} are in it, and some of "
                f"the rows after these may be. Import it again."
            )
        raise
    return file.shape.rows


def _make_room(group: Group, number: int, keys: Tensor) -> None:
    """Raise CapacityError where a table cannot hold the rows of these keys and its own. Call while writing."""
    table = group.tables[number]
    new = sum(int((~table.contains(some.to(group.device))).sum()) for some in keys.split(_KEYS_EACH))
    try:
        table.require_more(new)
    except ShoalError as error:
        error.add_note("Nothing was imported.")
        raise


def log_rows(
    file: RowFile,
    to: str | Path,
    table: str,
    *,
    dim: int | None,
    dtype: str | None,
    buckets: int | None,
    seed: int | None,
    progress: bool | None,
    trust: bool,
) -> int:
    """Commit a file's rows to a log as a table; returns the version."""
    told, step = _told(file)
    given = {"dim": dim, "dtype": dtype, "buckets": buckets, "seed": None if seed is None else seed % 2**64}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    found = dim if dim is not None else file.shape.dim
    if found is None:
        found = told.dim if told is not None else None
    if found is None:
        raise InputError(f"[{file.where}] it has no row that tells of the dim. Say which: dim=, or --dim.")
    base = told if told is not None else Layout(table, found)
    born = {column.name: column.initial for column in base.columns}
    # In the order that the table had: it is that of the bytes in a row.
    names = sorted(file.shape.state, key=lambda name: list(born).index(name) if name in born else len(born))
    widths = {column.name: column.width for column in base.columns} | {n: w for n, w in file.shape.state.items() if w}
    if unknown := [name for name in names if name not in widths]:
        raise InputError(f"[{file.where}] it has no row that tells of the width of state.{unknown[0]}. Leave it out.")
    columns = tuple(StateColumn(name, widths[name], born.get(name, 0.0)) for name in names)
    layout = replace(base, **(chosen | {"name": table, "dim": found, "columns": columns}))
    _require_dim(file, layout.dim)
    checked = _Checked(file, layout, dict(file.shape.state), _unsigned())
    with progress_bar("checking", file.shape.rows, progress) as bar:
        checked.require_all_right(bar)
    with ChangeLog(to, trust=trust) as log, progress_bar("importing", file.shape.rows, progress) as bar:
        return log.commit_rows(layout, _heard(checked.rows(scores=float(step)), bar), step=step)


def _unsigned() -> set[str]:
    """Names of state columns, such as sums of squares, that have no negative values in any optimizer with such a
    column: a log does not know which one its rows are of, and a load does not look."""
    kinds = [kind for kind in vars(optimizers).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    columns = [column for kind in kinds if not inspect.isabstract(kind) for column in kind().columns(1)]
    return {column.name for column in columns if not column.signed} - {one.name for one in columns if one.signed}


def _heard(pieces: Iterator[Rows], progress: Callable[[int], None]) -> Iterator[Rows]:
    for rows in pieces:
        yield rows
        progress(len(rows))


def _told(file: RowFile) -> tuple[Layout | None, int]:
    """The layout and the step that our exports say, if the file is one."""
    told = file.shape.told
    layout = None
    if LAYOUT in told:
        where = f"{file.where}, {LAYOUT}"
        layout = Layout.from_json(strict_json.parse(told[LAYOUT].encode(errors="replace"), where), where)
    step = told.get(STEP, "0")
    if not (step.isascii() and step.isdecimal() and len(step) < 20 and int(step) <= _MOST_STEP):
        raise StorageError(
            f"[{file.where}, {STEP}] wanted a number of steps, 2^62 at most; got {step!r:.100}. Is it damaged?"
        )
    return layout, int(step)


def _columns(file: RowFile, wanted: Mapping[str, int], state: bool) -> dict[str, int]:
    """The state columns that are used."""
    if not state:
        return {}
    for name, width in file.shape.state.items():
        if name not in wanted:
            has = ", ".join(map(repr, wanted)) or "none"
            raise InputError(
                f"[{file.where}] state.{name}: the table's optimizer has {has}. Give state=False to leave state out."
            )
        if file.shape.rows and width != wanted[name]:
            raise InputError(f"[{file.where}] state.{name}: wanted {wanted[name]} values a row; got {width}.")
    return {name: wanted[name] for name in file.shape.state}


def _require_dim(file: RowFile, dim: int) -> None:
    if file.shape.dim not in (None, dim):
        raise InputError(f"[{file.where}] wanted rows of {dim} weights; got {file.shape.dim}.")


class _Checked:
    """A file's rows as those of a layout, each piece checked when it is read."""

    def __init__(self, file: RowFile, layout: Layout, state: Mapping[str, int], unsigned: set[str]) -> None:
        self._file = file
        self._layout = layout
        self._state = state
        self._unsigned = unsigned

    def require_all_right(self, progress: Callable[[int], None]) -> Tensor:
        """Raise for the first thing that is wrong; returns the keys. They are held in memory, rows are not."""
        keys = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for rows in self.rows():
            keys.append(rows.keys.clone())
            progress(len(rows))
        order = torch.sort(torch.cat(keys), stable=True)
        if len(order.values) != self._file.shape.rows:
            raise StorageError(
                f"[{self._file.where}] wanted {self._file.shape.rows} rows; got {len(order.values)}. Is it damaged?"
            )
        twice = (order.values[1:] == order.values[:-1]).nonzero()
        if len(twice):
            at = int(twice[0])
            raise InputError(
                f"[{self._file.where}] wanted each key once; got {int(order.values[at])} in rows "
                f"{int(order.indices[at])} and {int(order.indices[at + 1])}. Nothing was imported."
            )
        return order.values

    def rows(self, scores: float | None = None) -> Iterator[Rows]:
        """The rows. scores: what rows have if the file does not say, and with it state as at birth."""
        begin = 0
        for piece in self._file.pieces(rows_each(self._layout)):
            yield self._row_piece(piece, begin, scores)
            begin += len(piece)

    def _row_piece(self, piece: Rows, begin: int, scores: float | None) -> Rows:
        weights = self._finite(piece.weights, self._layout.torch_dtype, "row", begin)
        state = {name: self._finite(piece.state[name], torch.float32, f"state.{name}", begin) for name in self._state}
        for name in self._unsigned & set(state):
            if len(piece) and float(state[name].min()) < 0:
                bad = begin + int((state[name] < 0).any(1).nonzero()[0])
                raise InputError(f"[{self._file.where}] state.{name}: wanted no negative values; got one in row {bad}.")
        found = None if piece.scores is None else self._finite(piece.scores, torch.float64, "score", begin)
        if found is None and scores is not None:
            found = torch.full((len(piece),), scores, dtype=torch.float64, device="cpu")
        return Rows(piece.keys, weights, state, found)

    def _finite(self, values: Tensor, dtype: torch.dtype, name: str, begin: int) -> Tensor:
        values = values.to(dtype)
        if values.numel():
            low, high = torch.aminmax(values)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                bad = begin + int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])
                raise InputError(
                    f"[{self._file.where}] {name}: wanted values that are finite in {_name(dtype)}; got NaN or "
                    f"infinity in row {bad}. Nothing was imported."
                )
        return values


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
