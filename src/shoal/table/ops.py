"""The operators that autograd, torch.compile and torch.export see.

An op names its group by a string and says that it changes `token`, a one-element tensor of the collection: without a
changed argument the compiler would merge two equal lookups, drop the update and change the order. Lookups and updates
have a token each, since what waits for a backward must not be changed by other forwards. Such an op can return tensors,
but no list of them. Behind its group and token an op has the arguments of the group's method. Where nobody looks at
operators, `lookup`, `lookup_each` and `update` call the group at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from shoal.errors import BackwardError, NotFoundError
from shoal.table.group import Group
from shoal.table.registry import group_named, keep_waiting, let_go

_library = Library("shoal", "DEF")
_library.define(
    "lookup(str group, Tensor(a!) token, str[] names, Tensor values, Tensor offsets, Tensor? weights, int columns, "
    "bool training, bool keep, ScalarType dtype, int[]? counts=None) -> (Tensor, Tensor)"
)
_library.define(
    "lookup_each(str group, Tensor(a!) token, str[] names, Tensor values, Tensor offsets, SymInt[] counts, "
    "SymInt size, bool training, bool keep, ScalarType dtype) -> (Tensor, Tensor)"
)
_library.define(
    "update(str group, Tensor(a!) token, Tensor lease, Tensor values, Tensor offsets, Tensor? weights, Tensor[] grads, "
    "bool weight_gradient) -> Tensor"
)


def _looking_up(method: str, training_at: int) -> Callable[..., Any]:
    """The operator of a group's lookup of the same arguments; `training` and `keep` are at these places of them."""

    def run(group: str, token: Tensor, *arguments: Any) -> Any:
        found = group_named(group)
        training, keep = arguments[training_at : training_at + 2]
        before = None
        if found.habits is not None and training:
            found.habits.before_lookup(training, keep)
            before = found.habits.births_before(training, keep)
        result = getattr(found, method)(*arguments)
        if before is not None and found.habits is not None:
            found.habits.after_lookup(before)
        if keep:
            keep_waiting(found)
        return result

    return run


def _updating(group: str, token: Tensor, *arguments: Any) -> Tensor:
    try:
        found = group_named(group)
    except NotFoundError:
        raise BackwardError(
            f"[backward] wanted the tables of {group!r}; the collection is gone, and this graph had its backward. Run "
            f"the forward again, or add the losses up before the backward."
        ) from None
    if found.habits is not None:
        found.habits.before_backward()
    result = found.update(*arguments)
    let_go()
    return result


def _lookup_shapes(
    group: str,
    token: Tensor,
    names: Sequence[str],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    columns: int,
    training: bool,
    keep: bool,
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    bags = (offsets.numel() - 1) // max(len(names), 1)
    return values.new_empty((bags, columns), dtype=dtype), token.new_empty((1,), dtype=torch.int64)


def _lookup_each_shapes(
    group: str,
    token: Tensor,
    names: Sequence[str],
    values: Tensor,
    offsets: Tensor,
    counts: Sequence[int],
    size: int,
    training: bool,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`size`: elements of the output, which the compiler cannot count: keys * dim of all features."""
    return values.new_empty((size,), dtype=dtype), token.new_empty((1,), dtype=torch.int64)


def _update_shapes(
    group: str,
    token: Tensor,
    lease: Tensor,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grads: Sequence[Tensor],
    weight_gradient: bool,
) -> Tensor:
    return values.new_empty((values.shape[0] if weight_gradient else 0,), dtype=torch.float32)


for _name, _run, _shapes in (
    ("lookup", _looking_up("lookup", 5), _lookup_shapes),
    ("lookup_each", _looking_up("lookup_each", 5), _lookup_each_shapes),
    ("update", _updating, _update_shapes),
):
    # For tensors of every device: the group knows what to say about those that are not where its rows are.
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shoal::{_name}", _shapes, lib=_library)


def _is_seen() -> bool:
    """Whether someone looks at operators: a compiler, a mode, a transform, a profiler."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _operator(method: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.shoal, method).default

    def call(group: str | Group, token: Tensor, *arguments: Any, **named: Any) -> Any:
        if _is_seen():
            return operator(group if isinstance(group, str) else group.name, token, *arguments, **named)
        # The dispatcher would turn every argument over twice: 50 microseconds that nobody looks at.
        return getattr(group_named(group) if isinstance(group, str) else group, method)(*arguments, **named)

    return call


lookup = _operator("lookup")
lookup_each = _operator("lookup_each")
update = _operator("update")
