"""What a forward in host memory keeps until its backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal import _native
from shoal.table.host.large import Large, touch
from shoal.table.host.plan import Plan
from shoal.table.host.table import HostTable
from shoal.table.request import Update


@dataclass
class Forward:
    """A batch as its lookup saw it. Its keys and offsets are autograd's to keep: the backward brings them again."""

    plan: Plan
    bags: _native.Bags  # with the slots of the keys
    keys: int
    size: int  # bags of each feature
    weights: Tensor | None
    training: bool
    known: bool = False  # slots were found when it was staged
    scores: Sequence[float] = ()  # by table
    refused: dict[int, int] = field(default_factory=dict)  # by table, keys that admission gave no row
    large: Large | None = None  # where memory does not hold its rows

    @property
    def applied(self) -> bool:
        """Whether its backward is done. The core keeps this: it changes together with the rows."""
        return self.bags.applied

    def was_checked(self, change: Update) -> bool:
        """Returns False: the tensors that come with a backward are always checked."""
        return False

    def gradients_of(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns one gradient for each part, where one flat tensor came for all."""
        if self.plan.columns or len(grads) != 1 or grads[0].dim() != 1:
            return grads
        shapes = self.gradient_shapes(grads)
        sizes = [keys * dim for keys, dim in shapes]
        if grads[0].numel() != sum(sizes):
            return grads
        return [one.view(shape) for one, shape in zip(grads[0].split(sizes), shapes, strict=True)]

    def gradient_shapes(self, _grads: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Returns the shapes that the gradients of its outputs have."""
        plan, bounds = self.plan, self.bags.bounds
        if plan.columns:
            return [(self.size, plan.columns)]
        return [(bounds[part.source + 1] - bounds[part.source], part.dim) for part in plan.parts]

    def values_of(self, number: int, values: Tensor) -> list[Tensor]:
        """Returns the keys that features which train bring to a table, out of the batch's values."""
        bounds = self.bags.bounds
        parts = [part for part in self.plan.parts if part.table == number and part.trains]
        return [values[bounds[part.source] : bounds[part.source + 1]] for part in parts]

    def touch(self, tables: Sequence[HostTable]) -> None:
        """Raise the scores of the rows that it trains on. To do so twice is to do it once."""
        if self.large is not None:
            touch(tables, self, self.large)
            return
        for part in self.plan.parts:
            if part.trains and self.training:
                table = tables[part.table]
                self.bags.touch(table.storage.rows, part.source, part.slot_list, self.scores[part.table], table.listed)

    def stamp(self, tables: Sequence[HostTable]) -> None:
        """Note that rows were used, where no backward will and memory is full."""
        for part in self.plan.fetching:
            table = tables[part.table]
            if table.is_full and not (part.trains and self.training):
                self.bags.stamp(table.storage.rows, part.source, part.slot_list, table.clock)

    def pin(self, number: int, pins: _native.Pins) -> None:
        """Pin its rows of a table."""
        pin(self.plan, self.bags, number, pins)


def pin(plan: Plan, bags: _native.Bags, number: int, pins: _native.Pins) -> None:
    """Pin a batch's rows of a table."""
    for part in plan.parts:
        if part.table == number:
            bags.pin(pins, part.source, part.slot_list)
