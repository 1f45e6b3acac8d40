"""The layout of a table's rows, without where they are kept and how they are trained: what a log must know of it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shoal.config import Column, RowFormat, Table
from shoal.config.checked import choice, integer, label, number, settle, value
from shoal.config.dtypes import WEIGHTS, torch_dtype
from shoal.errors import ConfigError, StorageError
from shoal.records.excerpt import excerpt

_SEED_MAX = 2**64 - 1


class StateColumn(NamedTuple):
    """A state column of the optimizer: `width` float32 values in every row, and what they are born with."""

    name: str
    width: int
    initial: float


@value
class Layout:
    """A table's rows: weights of `dtype` and the state columns in the order in which they lie in a row.

    buckets: parts the table is cut into to be placed on ranks.
    seed: with the name and a key, decides a key's first row; 64 bits, unsigned.
    """

    name: str
    dim: int
    dtype: str = "float32"
    columns: tuple[StateColumn, ...] = ()
    buckets: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        # Table's rule: a '.' separates the parts of a state dict's keys.
        if "." in label("Layout", "name", self.name):
            raise ConfigError(f"[Layout] name: wanted no '.'; got {self.name!r}.")
        where = f"Layout {self.name!r}"
        settle(
            self,
            dim=integer(where, "dim", self.dim, low=1),
            dtype=choice(where, "dtype", self.dtype, WEIGHTS),
            columns=_columns(where, self.columns),
            buckets=integer(where, "buckets", self.buckets, low=1),
            seed=integer(where, "seed", self.seed, low=0, high=_SEED_MAX),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the weights."""
        return torch_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and state."""
        return self.format.trained_bytes

    @property
    def format(self) -> RowFormat:
        """What a row is made of."""
        return RowFormat(self.dim, self.dtype, tuple(Column(*column) for column in self.columns))

    def weights_only(self) -> "Layout":
        """Returns the same without state, as serving has it."""
        return replace(self, columns=())

    def difference(self, other: "Layout") -> str | None:
        """Returns what differs, as part of a sentence: "dim 64 and 32"; None where nothing does."""
        found = [
            f"{field} {mine!r} and {theirs!r}"
            for field in ("name", "dim", "dtype", "buckets", "seed")
            if (mine := getattr(self, field)) != (theirs := getattr(other, field))
        ]
        if self.columns != other.columns:
            found.append(f"columns {_shown(self.columns)} and {_shown(other.columns)}")
        return ", ".join(found) or None

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes, made of dict, list, str, int and float."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype,
            "columns": [column._asdict() for column in self.columns],
            "buckets": self.buckets,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, given: object, where: str) -> "Layout":
        """Returns the layout that `to_json` described. Raises StorageError where `given` is no layout."""
        fields = _fields(given, ("name", "dim", "dtype", "columns", "buckets", "seed"), where, "a layout")
        if not isinstance(fields["columns"], list):
            raise StorageError(f"[{where}] columns: wanted a list; got {excerpt(fields['columns'])}. Is it damaged?")
        columns = [_fields(item, StateColumn._fields, where, "a column") for item in fields["columns"]]
        try:
            return cls(**{**fields, "columns": tuple(StateColumn(**column) for column in columns)})
        except ConfigError as error:
            raise StorageError(f"[{where}] wanted the layout of a table; got one that is none: {error}") from None


def layout_of(config: Table, seed: int) -> Layout:
    """Returns the layout of a table in a collection with that seed. Raises ConfigError where its rows have columns for
    which files have no place."""
    if others := config.format.other_facts:
        raise ConfigError(
            f"[table {config.name!r}] files hold a row's weights, optimizer state and score; the table's policies "
            f"keep the columns {[column.name for column in others]} too. Such a table cannot be saved, committed or "
            f"exported yet."
        )
    columns = tuple(StateColumn(column.name, column.width, column.initial) for column in config.columns)
    return Layout(config.name, config.dim, config.dtype, columns, config.buckets, seed % 2**64)


def _columns(where: str, given: Iterable[Any]) -> tuple[StateColumn, ...]:
    columns = []
    for item in given:
        name, width, initial = item
        label(where, "column name", name)
        of = f"{where}, column {name!r}"
        columns.append(StateColumn(name, integer(of, "width", width, low=1), number(of, "initial", initial)))
    names = {column.name for column in columns}
    if len(names) < len(columns):
        shown = [column.name for column in columns]
        raise ConfigError(f"[{where}] columns: wanted each name once; got {excerpt(shown)}.")
    return tuple(columns)


def _fields(given: object, wanted: tuple[str, ...], where: str, what: str) -> dict[str, Any]:
    if not isinstance(given, dict) or set(given) != set(wanted):
        came = sorted(map(str, given)) if isinstance(given, dict) else given
        raise StorageError(
            f"[{where}] wanted {what} as an object with {', '.join(wanted)}; got {excerpt(came)}. Is it damaged, or "
            "written by a newer version?"
        )
    return given


def _shown(columns: tuple[StateColumn, ...]) -> str:
    return "(" + ", ".join(f"{name}[{width}] born as {initial:g}" for name, width, initial in columns) + ")"
