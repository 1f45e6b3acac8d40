"""What a forward in device memory keeps until its backward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal import _native
from shoal.table.device.lookup import Looked
from shoal.table.device.plan import DevicePlan
from shoal.table.request import Update


@dataclass
class Forward:
    """A batch as its lookup saw it."""

    looked: Looked
    training: bool
    size: int  # bags of each feature
    sizes: _native.BatchSizes | None  # where they are needed
    number: int  # where tables have tiers; else 0
    steps: Tensor | None = None  # of the tables, where other backwards came since; else as they are now
    applied: bool = False

    @property
    def plan(self) -> DevicePlan:
        """How the batch's features meet the tables."""
        return self.looked.plan

    def was_checked(self, change: Update) -> bool:
        """Whether the tensors that come with a backward are those that its lookup checked."""
        return self.looked.is_of(change.values, change.offsets) and change.weights is None

    def gradients_of(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients as they are: kernels take them flat and apart."""
        return grads

    def gradient_shapes(self, grads: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Returns the shapes that so many gradients of its outputs have."""
        plan, sizes = self.plan, self.sizes
        if plan.columns or sizes is None:
            return [(self.size, plan.columns)]
        if len(grads) == 1 and grads[0].dim() == 1:
            return [(sizes.elements,)]
        return [(sizes.counts[part.source], part.dim) for part in plan.parts]
