"""Records of what kernels and programs take.

A record is a NamedTuple that declares names, types and order once. There are three kinds:
- the arguments of a kernel, in the order of its parameters; `Launch` compares the two,
- the call of a program: the values that each call brings. `variables` makes the same record of their places,
- the pieces of a workspace. With lengths in place of tensors it says how much memory they take (`Pieces`).

A field is a tensor or a number, another record, whose fields then stand in its place, or `tuple[..., ...]` of one value
for each family of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

Record = TypeVar("Record", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Variable:
    """What every call of a program gives anew: a tensor, from the element `first` on, or a number."""

    place: int
    first: int = 0

    def __getitem__(self, elements: slice) -> "Variable":
        """The tensor from an element on, as torch writes it."""
        assert elements.stop is None and elements.step is None
        return Variable(self.place, self.first + int(elements.start or 0))


@dataclass(frozen=True)
class Kind:
    """The type of a field as Triton spells it: the usual one first, then others that a call may bring."""

    usual: str
    others: tuple[str, ...] = ()
    is_always_read: bool = True  # a tensor that no kernel reads may have any type

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of that type may be given."""
        return not self.is_always_read or _SPELLED.get(dtype) in (self.usual, *self.others)

    @property
    def dtype(self) -> torch.dtype:
        """The usual type of its elements."""
        return next(dtype for dtype, spelled in _SPELLED.items() if spelled == self.usual)


_SPELLED = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
Pointer: TypeAlias = Tensor | Variable
Int = Annotated[int | Variable, Kind("i32")]
I32 = Annotated[Pointer, Kind("*i32")]
I64 = Annotated[Pointer, Kind("*i64")]
F32 = Annotated[Pointer, Kind("*fp32")]
F64 = Annotated[Pointer, Kind("*fp64")]
# What a batch or a gradient brings.
Ints = Annotated[Pointer, Kind("*i64", ("*i32",))]
Floats = Annotated[Pointer, Kind("*fp32", ("*fp16", "*bf16"))]
# Read by some variants of a kernel; the others take any tensor.
SomeI32 = Annotated[Pointer, Kind("*i32", is_always_read=False)]
SomeI64 = Annotated[Pointer, Kind("*i64", is_always_read=False)]
SomeF32 = Annotated[Pointer, Kind("*fp32", is_always_read=False)]
# Memory of the host, and an event: for what is sent there, not for kernels.
Host = Annotated[Any, Kind("*i32")]
Event = Annotated[Any, Kind("event")]


@cache
def _fields(record: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple((name, hints[name]) for name in record._fields)  # type: ignore[attr-defined]


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


@cache
def leaves(record: type) -> tuple[tuple[str, Kind], ...]:
    """The names and kinds of a record's fields, in order; those of records in it stand in their place."""
    found: list[tuple[str, Kind]] = []
    for name, hint in _fields(record):
        if _is_record(hint):
            found += leaves(hint)
        else:
            found.append((name, get_args(hint)[1]))
    return tuple(found)


def flat(record: tuple[Any, ...]) -> Iterator[Any]:
    """The values of a record, in order; those of records and tuples in it stand in their place."""
    for value in record:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


def variables(record: type[Record], families: int = 0) -> Record:
    """The record with a variable in place of each value, numbered in order."""
    places = count()

    def made(hint: Any) -> Any:
        if _is_record(hint):
            return hint(*(made(inner) for _, inner in _fields(hint)))
        if get_origin(hint) is tuple:
            return tuple(Variable(next(places)) for _ in range(families))
        return Variable(next(places))

    return made(record)  # type: ignore[no-any-return]


def lengths(record: type[Record], **given: Any) -> Record:
    """The record of a workspace with the length of each piece in its place, for `Pieces`."""
    return record(**given)
