"""Lookups as autograd sees them: outputs on the way down, and on the way back the update of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.errors import BackwardError
from shoal.modules.habits import Habits
from shoal.table import ops
from shoal.table.protocols import Target
from shoal.table.request import Batch, Each, Pooled, Request, Update


@dataclass(frozen=True)
class Lookup:
    """What a forward asks of a group, but for its tensors: autograd and compilers take those as arguments."""

    group: str
    names: list[str]
    training: bool
    dtype: torch.dtype
    counts: list[int] | None = None  # keys of each feature, where that is known without asking a device
    # The group itself, where no compiler looks: a graph keeps its tables alive when their collection is gone.
    held: Target | None = None
    habits: Habits | None = None  # where no compiler looks

    def pooled(self, values: Tensor, offsets: Tensor, weights: Tensor | None, columns: int, keep: bool) -> Request:
        """The request of bags that are pooled."""
        batch = Batch(self.names, values, offsets, weights, self.counts)
        return Request(batch, Pooled(columns), self.dtype, self.training, keep)


def _saved(ctx: Any) -> Any:
    """What the forward kept for the backward."""
    if torch.compiler.is_compiling():
        return ctx.saved_tensors
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        # Activation checkpointing runs the model again in here, and what it raises is the model's.
        if "second time" not in str(error):
            raise
        raise _applied_already() from error


def _hold(ctx: Any, lease: Tensor) -> None:
    """Keep a lease until its backward, also where a saved-tensor hook puts a copy in its place."""
    if not torch.compiler.is_compiling():
        ctx.lease = lease


def _drop_other(ctx: Any, lease: Tensor) -> None:
    """Let a forward go that checkpointing ran again: the backward is of the other."""
    if not torch.compiler.is_compiling() and ctx.lease is not None and int(ctx.lease) != int(lease):
        ctx.lease = None


def _group_of(ctx: Any) -> Target | str:
    """The group of a forward that no backward was applied to."""
    if ctx.group is None:
        raise _applied_already()
    return ctx.group  # type: ignore[no-any-return]


def _let_go(ctx: Any) -> None:
    """After its update a graph does not keep the tables and its lease any more: a loss may be kept for long."""
    if not torch.compiler.is_compiling():
        ctx.group = ctx.habits = ctx.lease = None


def _applied_already() -> BackwardError:
    return BackwardError(
        "[backward] wanted one backward for each forward; this graph's was applied already, and rows are updated "
        "in the backward. Run the forward again, or add the losses up before the backward."
    )


class PooledLookup(torch.autograd.Function):
    """[bags, columns]. `anchor` requires a gradient so that autograd calls back; it gets none."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        token: Tensor,
        update_token: Tensor,
        lookup: Lookup,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        columns: int,
    ) -> Tensor:
        out: Tensor
        out, lease = ops.lookup(lookup.group, token, lookup.pooled(values, offsets, weights, columns, keep=True))
        ctx.save_for_backward(lease, values, offsets, weights)
        _hold(ctx, lease)
        ctx.group, ctx.habits = lookup.held or lookup.group, lookup.habits
        # Not a saved tensor: other backwards change it, and autograd refuses saved tensors that were changed.
        ctx.token = update_token
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lease, values, offsets, weights = _saved(ctx)
        if ctx.habits is not None:
            ctx.habits.before_backward()
        _drop_other(ctx, lease)
        wanted = ctx.needs_input_grad[6]
        change = Update(lease, values, offsets, weights, [grad], wanted)
        to_weights = ops.update(_group_of(ctx), ctx.token, change)
        _let_go(ctx)
        return None, None, None, None, None, None, to_weights if wanted else None, None


def rows_of_each(
    token: Tensor,
    lookup: Lookup,
    values: Tensor,
    offsets: Tensor,
    counts: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    keep: bool,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The rows of every part, of the given shapes, and the lease. `counts`: keys of each of the batch's features."""
    sizes = [keys * dim for keys, dim in shapes]
    size = 0
    for part in sizes:  # the compiler makes an op of sum() that an exported program cannot be saved with
        size += part
    batch = Batch(lookup.names, values, offsets, None, counts)
    flat, lease = ops.lookup(lookup.group, token, Request(batch, Each(size), lookup.dtype, lookup.training, keep))
    return tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)), lease


class EachLookup(torch.autograd.Function):
    """One output of each of the shapes, [keys, dim], for each feature."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        token: Tensor,
        update_token: Tensor,
        lookup: Lookup,
        values: Tensor,
        offsets: Tensor,
        counts: Sequence[int],
        shapes: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, ...]:
        outs, lease = rows_of_each(token, lookup, values, offsets, counts, shapes, keep=True)
        ctx.save_for_backward(lease, values, offsets)
        _hold(ctx, lease)
        ctx.group, ctx.habits = lookup.held or lookup.group, lookup.habits
        ctx.token = update_token
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        lease, values, offsets = _saved(ctx)
        if ctx.habits is not None:
            ctx.habits.before_backward()
        _drop_other(ctx, lease)
        ops.update(_group_of(ctx), ctx.token, Update(lease, values, offsets, None, list(grads), False))
        _let_go(ctx)
        return (None,) * 8
