"""Updates by the native core."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads


@dataclass(frozen=True)
class Step:
    """What one optimizer does in one backward, as the kernel takes it.

    settings: numbered in its C++ file. device_settings: more, that only the kernels of devices read, after `settings`.
    clip_value, clip_norm, max_norm: limits; 0 is none.
    is_of_one_backward: whether the table's next backward has another step while no setting changes.
    """

    kind: _native.Optimizer
    lr: float = 0.0
    settings: tuple[float, ...] = ()
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    reduce: _native.Reduce = _native.Reduce.sum
    device_settings: tuple[float, ...] = ()
    clip_value: float = 0.0
    clip_norm: float = 0.0
    max_norm: float = 0.0
    is_of_one_backward: bool = False

    @property
    def shrink(self) -> float:
        """The factor of decoupled decay."""
        return 1.0 - self.lr * self.decoupled_weight_decay

    @property
    def is_plain(self) -> bool:
        """Whether there is no decay and no limit: kernels leave these out."""
        limits = self.clip_value, self.clip_norm, self.max_norm
        return not any(limits) and self.weight_decay == 0.0 and self.shrink == 1.0

    @property
    def device_numbers(self) -> tuple[float, ...]:
        """All its numbers in the order of the columns that `ops.update.apply` names."""
        limits = self.clip_value, self.clip_norm, self.max_norm
        return (self.lr, self.weight_decay, self.shrink, *limits, *self.settings, *self.device_settings)

    def tell(self, table: _native.UpdateTable) -> None:
        """Make it the step of the table's next updates in the core."""
        table.set(
            self.kind,
            self.reduce,
            float(self.lr),
            self.settings,
            float(self.weight_decay),
            float(self.shrink),
            self.clip_value,
            self.clip_norm,
            self.max_norm,
        )


@dataclass(frozen=True)
class LeftOut:
    """Rows that an update left alone in one of its tables, as the sum of their gradients overflowed."""

    table: int
    overflowed: int


def all_finite(values: Tensor) -> bool:
    """Whether a float32 tensor of one or two dimensions, its last one dense, holds neither NaN nor infinity."""
    rows, stride = (values.shape[0], values.stride(0)) if values.dim() == 2 else (1, 0)
    return _native.all_finite(values.data_ptr(), rows, values.shape[-1], stride, get_num_threads())


def update(
    tables: Sequence[_native.UpdateTable],
    features: Sequence[_native.UpdateFeature],
    grads: Sequence[Tensor],
    bags: _native.Bags,
) -> list[LeftOut]:
    """Reduce the gradients of every row and apply its table's optimizer; what was left out, of tables where any was.

    Rows, the tables' steps and that the batch's backward is applied change in one call of the core."""
    left_out = _native.update(tables, features, _addresses(grads), bags, get_num_threads())
    return [LeftOut(*counts) for counts in left_out]


def weight_gradients(
    rows: Sequence[_native.Rows],
    features: Sequence[_native.UpdateFeature],
    grads: Sequence[Tensor],
    missing: Sequence[_native.Init],
    bags: _native.Bags,
    keys: int,
) -> Tensor:
    """The gradient of every per-sample weight, from the rows as they are now."""
    out = torch.zeros(keys, dtype=torch.float32, device="cpu")
    _native.weight_gradients(rows, features, _addresses(grads), missing, bags, out, get_num_threads())
    return out


def _addresses(grads: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(grad.data_ptr(), grad.stride(0)) for grad in grads]
