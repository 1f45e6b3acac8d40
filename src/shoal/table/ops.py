"""The operators that autograd, torch.compile and torch.export see.

An operator names its group by a string and says that it changes `token`, a one-element tensor of the collection:
without a changed argument the compiler would merge two equal lookups, drop the update and change the order. Lookups and
updates have a token each, since what waits for a backward must not be changed by other forwards. Such an operator can
return tensors, but no list of them.

A schema takes tensors and numbers, no values of ours. So each operator has a form: it takes a request apart into the
schema's arguments, after group and token, and puts it together again. Where nothing looks at operators, `lookup` and
`update` call the group at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from shoal import torch_private
from shoal.errors import BackwardError, NotFoundError
from shoal.table.protocols import Target
from shoal.table.registry import group_named, keep_waiting, let_go
from shoal.table.request import Batch, Each, Pooled, Request, Update

_library = Library("shoal", "DEF")

# ---- the schemas: programs that were exported name them, so they stay as they are

_library.define(
    "lookup(str group, Tensor(a!) token, str[] names, Tensor values, Tensor offsets, Tensor? weights, int columns, "
    "bool training, bool keep, ScalarType dtype, int[]? counts=None) -> (Tensor, Tensor)"
)


def _pooled(
    names: Sequence[str],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    columns: int,
    training: bool,
    keep: bool,
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
) -> Request:
    return Request(Batch(names, values, offsets, weights, counts), Pooled(columns), dtype, training, keep)


def _of_pooled(request: Request, output: Pooled) -> tuple[Any, ...]:
    (names, values, offsets, weights, counts), _, dtype, training, keep = request
    return names, values, offsets, weights, output.columns, training, keep, dtype, counts


_library.define(
    "lookup_each(str group, Tensor(a!) token, str[] names, Tensor values, Tensor offsets, SymInt[] counts, "
    "SymInt size, bool training, bool keep, ScalarType dtype) -> (Tensor, Tensor)"
)


def _each(
    names: Sequence[str],
    values: Tensor,
    offsets: Tensor,
    counts: Sequence[int],
    size: int,
    training: bool,
    keep: bool,
    dtype: torch.dtype,
) -> Request:
    return Request(Batch(names, values, offsets, None, counts), Each(size), dtype, training, keep)


def _of_each(request: Request, output: Each) -> tuple[Any, ...]:
    (names, values, offsets, _, counts), _, dtype, training, keep = request
    return names, values, offsets, counts, output.size, training, keep, dtype


_library.define(
    "update(str group, Tensor(a!) token, Tensor lease, Tensor values, Tensor offsets, Tensor? weights, Tensor[] grads, "
    "bool weight_gradient) -> Tensor"
)  # the fields of Update, in their order


# ---- what they do


def _looking_up(request_of: Callable[..., Request]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the operator of lookups that `request_of` puts together."""

    def run(group: str, token: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        found, request = group_named(group), request_of(*arguments)
        before = None
        if found.habits is not None and request.training:
            found.habits.before_lookup(request.training, request.keep)
            before = found.habits.births_before(request.training, request.keep)
        result = found.lookup(request)
        if before is not None and found.habits is not None:
            found.habits.after_lookup(before)
        if request.keep:
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
    result = found.update(Update(*arguments))
    let_go()
    return result


def _lookup_shapes(request_of: Callable[..., Request]) -> Callable[..., tuple[Tensor, Tensor]]:
    def shapes(group: str, token: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        batch, output, dtype, _training, _keep = request_of(*arguments)
        shape = (batch.size, output.columns) if isinstance(output, Pooled) else (output.size,)
        return batch.values.new_empty(shape, dtype=dtype), token.new_empty((1,), dtype=torch.int64)

    return shapes


def _update_shapes(group: str, token: Tensor, *arguments: Any) -> Tensor:
    change = Update(*arguments)
    return change.values.new_empty((change.values.shape[0] if change.weight_gradient else 0,), dtype=torch.float32)


for _name, _run, _shapes in (
    ("lookup", _looking_up(_pooled), _lookup_shapes(_pooled)),
    ("lookup_each", _looking_up(_each), _lookup_shapes(_each)),
    ("update", _updating, _update_shapes),
):
    # For tensors of every device: the group knows what to say about those that are not where its rows are.
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shoal::{_name}", _shapes, lib=_library)


# ---- the calls


def _is_seen() -> bool:
    """Whether something looks at operators: a compiler, a mode, a transform, a profiler."""
    return torch.compiler.is_compiling() or torch_private.is_being_observed()


_lookup_pooled = torch.ops.shoal.lookup.default
_lookup_each = torch.ops.shoal.lookup_each.default
_update = torch.ops.shoal.update.default


def lookup(group: Target | str, token: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Returns a group's answer to a request: the output, and the lease for its update."""
    if not _is_seen():
        # The dispatcher would go through every argument twice: 50 microseconds for nothing.
        return (group_named(group) if isinstance(group, str) else group).lookup(request)
    name, output = group if isinstance(group, str) else group.name, request.output
    result: tuple[Tensor, Tensor]
    if isinstance(output, Pooled):
        result = _lookup_pooled(name, token, *_of_pooled(request, output))
    else:
        result = _lookup_each(name, token, *_of_each(request, output))
    return result


def update(group: Target | str, token: Tensor, change: Update) -> Tensor:
    """Apply a forward's output gradients; returns the gradient of the per-sample weights, or nothing."""
    if not _is_seen():
        return (group_named(group) if isinstance(group, str) else group).update(change)
    result: Tensor = _update(group if isinstance(group, str) else group.name, token, *change)
    return result
