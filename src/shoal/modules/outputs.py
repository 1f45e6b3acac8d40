"""How a collection's output is put together of its groups' outputs, and its gradient taken apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.table import Each, Pooled


@dataclass
class Columns:
    """How the pooled output [bags, columns] of a collection is made of its groups' outputs."""

    outputs: Sequence[Pooled]  # of each group
    pieces: list[tuple[int, int, int]]  # in the collection's order: the group, the first column in it, and how many

    @staticmethod
    def of(widths: Sequence[int], groups: Sequence[int], count: int) -> "Columns":
        """For tables that have so many columns and are in these of `count` groups."""
        columns = [0] * count
        pieces = []
        for group, some in groupby(zip(groups, widths, strict=True), key=itemgetter(0)):
            width = sum(one for _, one in some)
            pieces.append((group, columns[group], width))
            columns[group] += width
        return Columns(list(map(Pooled, columns)), pieces)

    def together(self, outs: Sequence[Tensor]) -> Tensor:
        """The output for the caller."""
        return torch.cat([outs[group].narrow(1, begin, width) for group, begin, width in self.pieces], 1)

    def of_group(self, number: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of one group's output."""
        found, at = [], 0
        for group, _begin, width in self.pieces:
            if group == number:
                found.append(grads[0].narrow(1, at, width))
            at += width
        return [found[0] if len(found) == 1 else torch.cat(found, 1)]

    def require_gradients(self, where: str, grads: Sequence[Tensor]) -> None:
        """Raise InputError where gradients cannot be taken apart."""
        wanted = sum(output.columns for output in self.outputs)
        if len(grads) != 1 or grads[0].dim() != 2 or grads[0].shape[1] != wanted:
            got = [tuple(grad.shape) for grad in grads]
            raise InputError(f"[{where}] the backward wants gradients of the shapes [(bags, {wanted})]; got {got}.")


@dataclass
class Parts:
    """The same where the output has the rows of every key, one part for each feature of each table."""

    groups: Sequence[int]  # of each part
    shapes: list[tuple[int, int]]  # keys and dim of each part
    count: int  # of groups

    @property
    def outputs(self) -> Sequence[Each]:
        """Of each group."""
        sizes = [0] * self.count
        for group, (keys, dim) in zip(self.groups, self.shapes, strict=True):
            sizes[group] += keys * dim
        return list(map(Each, sizes))

    def together(self, outs: Sequence[Tensor]) -> Tensor:
        """The output for the caller."""
        begins = [0] * self.count
        found = []
        for group, (keys, dim) in zip(self.groups, self.shapes, strict=True):
            found.append(outs[group].narrow(0, begins[group], keys * dim))
            begins[group] += keys * dim
        return torch.cat(found)

    def of_group(self, number: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of one group's parts."""
        if len(grads) == 1 and grads[0].dim() == 1:  # of all parts
            sizes = [keys * dim for keys, dim in self.shapes]
            parts = zip(grads[0].split(sizes), self.shapes, strict=True)
            grads = [one.view(shape) for one, shape in parts]
        return [grad for grad, group in zip(grads, self.groups, strict=True) if group == number]

    def require_gradients(self, where: str, grads: Sequence[Tensor]) -> None:
        """Raise InputError where gradients cannot be taken apart."""
        size = sum(keys * dim for keys, dim in self.shapes)
        is_flat = len(grads) == 1 and grads[0].dim() == 1 and len(grads[0]) == size
        if not is_flat and len(grads) != len(self.groups):
            got = [tuple(grad.shape) for grad in grads]
            raise InputError(f"[{where}] the backward wants gradients of the shapes {self.shapes}; got {got}.")
