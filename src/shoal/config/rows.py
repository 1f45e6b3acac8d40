"""What a row is made of: the type of its weights, the columns after them, the bytes of each and where it lies.

A row lies in one of three ways. All of them have the same parts:

    packed        weights | scale, bias | state | score | other facts       below memory, without gaps
    host memory   weights apart from the rest, which is the row's tail:
                  state | score | flags (uint32) | other facts              each at a multiple of 4 bytes
    device memory in units of 16 bytes, see storage/hbm.py

*State* is what the optimizer keeps of a row, always float32. *Facts* are what policies keep of it, of any type; the
first of them is the score. `scale` and `bias` are float32, and stand only in rows of int8 and int4 weights.
"""

from dataclasses import replace
from functools import cached_property
from typing import Literal

from shoal.config.checked import choice, flag, integer, label, number, settle, value
from shoal.config.dtypes import WEIGHTS, torch_dtype
from shoal.errors import ConfigError

KEY_BYTES = 8
FLAG_BYTES = 4
_SCALE_AND_BIAS_BYTES = 8
_QUANTISED_BITS = {"int8": 8, "int4": 4}
_COLUMN_TYPES = ("float32", "float64", "int64")


@value
class Column:
    """A named run of values in every row, after its weights, and what they are born with.

    signed: whether values below zero make sense; a sum of squares has none.
    counts: whether the values are numbers of updates, which are stored as docs/formats.md says.
    dtype: the type of the values. An optimizer's are float32.
    """

    name: str
    width: int
    initial: float = 0.0
    signed: bool = True
    counts: bool = False
    dtype: Literal["float32", "float64", "int64"] = "float32"

    def __post_init__(self) -> None:
        label("Column", "name", self.name)
        choice("Column", "dtype", self.dtype, _COLUMN_TYPES)
        whole = self.dtype == "int64"
        settle(
            self,
            width=integer("Column", "width", self.width, low=1),
            initial=integer("Column", "initial", self.initial, low=-(2**63), high=2**63 - 1)
            if whole
            else number("Column", "initial", self.initial),
            signed=flag("Column", "signed", self.signed),
            counts=flag("Column", "counts", self.counts),
        )

    @property
    def bytes(self) -> int:
        """Bytes of a row's values."""
        return self.width * torch_dtype(self.dtype).itemsize


# The table's step at the key's last use in training. It is born as the step of the table then, not as `initial`.
SCORE = Column("score", 1, dtype="float64")


@value
class RowFormat:
    """What a row is made of, and where its parts lie.

    dim, dtype: its weights. int8 and int4 weights have a scale and a bias for each row.
    state: the columns of the optimizer.
    facts: the columns of the policies; the first is the score. A row that is only served has none.
    """

    dim: int
    dtype: str = "float32"
    state: tuple[Column, ...] = ()
    facts: tuple[Column, ...] = (SCORE,)

    def __post_init__(self) -> None:
        settle(
            self,
            dim=integer("RowFormat", "dim", self.dim, low=1),
            dtype=choice("RowFormat", "dtype", self.dtype, (*WEIGHTS, *_QUANTISED_BITS)),
            state=tuple(self.state),
            facts=tuple(self.facts),
        )
        state, facts = ([column.name for column in columns] for columns in (self.state, self.facts))
        others = state + [column.name for column in self.other_facts]
        if len(set(others)) < len(others) or len(set(facts)) < len(facts):
            raise ConfigError(f"[RowFormat] columns: wanted each name once; got {state} and {facts}.")
        if wrong := [column.name for column in self.state if column.dtype != "float32"]:
            raise ConfigError(f"[RowFormat] state: wanted columns of float32; got others: {wrong}.")
        if self.facts and self.facts[0] != SCORE:
            raise ConfigError(f"[RowFormat] facts: wanted the score first; got {self.facts[0].name!r}.")

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, in the order in which they lie in a row."""
        return (*self.state, *self.facts)

    @property
    def other_facts(self) -> tuple[Column, ...]:
        """All facts but the score."""
        return self.facts[1:]

    def column(self, name: str) -> Column:
        """The column with that name."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    # ---- bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without scale and bias. Two int4 weights share a byte."""
        bits = _QUANTISED_BITS.get(self.dtype)
        return self.dim * torch_dtype(self.dtype).itemsize if bits is None else (self.dim * bits + 7) // 8

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of scale and bias."""
        return _SCALE_AND_BIAS_BYTES if self.dtype in _QUANTISED_BITS else 0

    @cached_property
    def state_floats(self) -> int:
        """Floats of state."""
        return sum(column.width for column in self.state)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of state."""
        return sum(column.bytes for column in self.state)

    @cached_property
    def fact_bytes(self) -> int:
        """Bytes of the facts, with the score."""
        return sum(column.bytes for column in self.facts)

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of weights and state: what users know as a row."""
        return self.weight_bytes + self.scale_bytes + self.state_bytes

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a packed row and its key: what a row takes in a file, about."""
        return KEY_BYTES + self.packed_bytes

    # ---- packed rows

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of a packed row."""
        return self.trained_bytes + self.fact_bytes

    @cached_property
    def packed_at(self) -> dict[Column, int]:
        """The byte of a packed row at which each column begins."""
        return _begins(self.columns, self.weight_bytes + self.scale_bytes)

    # ---- host memory

    @cached_property
    def tail_bytes(self) -> int:
        """Bytes of a row's tail in host memory."""
        return self.state_bytes + self.fact_bytes + FLAG_BYTES

    @cached_property
    def tail_at(self) -> dict[Column, int]:
        """The byte of a tail in host memory at which each column begins. The flags come right after the score."""
        begins = _begins((*self.state, *self.facts[:1]), 0)
        return begins | _begins(self.other_facts, self.state_bytes + SCORE.bytes + FLAG_BYTES)

    def served(self, dtype: str) -> "RowFormat":
        """The same rows as they are served: weights of `dtype` alone."""
        return replace(self, dtype=dtype, state=(), facts=())


def _begins(columns: tuple[Column, ...], at: int) -> dict[Column, int]:
    begins = {}
    for column in columns:
        begins[column] = at
        at += column.bytes
    return begins
