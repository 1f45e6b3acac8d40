"""What a group is asked: a lookup or an update as one value, which is built once and passed on as it is."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config.dtypes import TORCH_WEIGHTS
from shoal.errors import DeviceError, InputError
from shoal.ops.hash_ids import hint_for

_INTEGERS = (torch.int32, torch.int64)


# These are named tuples and not dataclasses: a frozen dataclass takes three times as long to make, a microsecond in
# every lookup.


class Batch(NamedTuple):
    """The keys of some features. Those of one feature follow those of the one before; each has equally many bags."""

    names: Sequence[str]  # of the features
    values: Tensor  # [keys]
    offsets: Tensor  # [features * bags + 1]
    weights: Tensor | None = None  # [keys]
    counts: Sequence[int] | None = None  # keys of each feature, where the caller knows them; a device would be asked

    @property
    def size(self) -> int:
        """Bags of each feature."""
        return (self.offsets.numel() - 1) // max(len(self.names), 1)

    def check(self, where: str, device: torch.device) -> None:
        """Raise DeviceError or InputError where kernels of that device cannot take the tensors."""
        values, offsets, weights = self.values, self.offsets, self.weights
        for what, tensor in (("values", values), ("offsets", offsets), ("weights", weights)):
            if tensor is not None and tensor.device != device:
                raise DeviceError(
                    f"[{where}] the tables are on {device}; the batch's {what} are on {tensor.device}. "
                    f"Move the batch with .to({str(device)!r})."
                )
        if values.dtype not in _INTEGERS or offsets.dtype not in _INTEGERS:
            raise InputError(
                f"[{where}] values and offsets must be int32 or int64; got {values.dtype} and {offsets.dtype}."
                f"{hint_for(values)}"
            )
        if values.dim() != 1 or offsets.dim() != 1 or offsets.numel() == 0:
            raise InputError(
                f"[{where}] values must be [n] and offsets [features * batch + 1]; got {tuple(values.shape)} and "
                f"{tuple(offsets.shape)}."
            )
        if values.numel() >= 2**32:
            raise InputError(f"[{where}] a batch holds less than 2^32 values; got {values.numel()}. Split it.")
        if weights is not None and (weights.shape != values.shape or not weights.is_floating_point()):
            raise InputError(
                f"[{where}] weights must be one float for each of the {values.numel()} values; got "
                f"{tuple(weights.shape)} of {weights.dtype}."
            )
        if (offsets.numel() - 1) % max(len(self.names), 1):
            raise InputError(
                f"[{where}] {len(self.names)} features must have equally many bags; got {offsets.numel() - 1} bags."
            )

    def for_kernels(self) -> "Batch":
        """The same batch with contiguous tensors, its weights as float32."""
        weights = self.weights
        if weights is not None:
            weights = weights.detach().to(torch.float32).contiguous()
        return Batch(self.names, self.values.contiguous(), self.offsets.contiguous(), weights, self.counts)


class Pooled(NamedTuple):
    """The output has one pooled row for each bag: [bags, columns]."""

    columns: int


class Each(NamedTuple):
    """The output has the row of every key, feature after feature: [size]."""

    size: int


class Request(NamedTuple):
    """One lookup. `output` says what the caller takes its shape to be; a group refuses another one."""

    batch: Batch
    output: Pooled | Each
    dtype: torch.dtype
    training: bool
    keep: bool  # a backward may follow

    def check(self, where: str, device: torch.device) -> None:
        """Raise DeviceError or InputError where no group on that device can answer."""
        if self.dtype not in TORCH_WEIGHTS:
            raise InputError(f"[{where}] outputs are float32, float16 or bfloat16; got {self.dtype}.")
        self.batch.check(where, device)


class Update(NamedTuple):
    """The output gradients of one forward, to be applied to its rows.

    `values`, `offsets` and `weights` are the forward's, as autograd kept them: a compiled program reuses the memory of
    tensors that it does not know to be needed. `grads` is one [bags, columns] tensor; where the forward's output was
    `Each`, one [keys, dim] tensor for each part of the plan, or one [size] tensor for all.
    """

    lease: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    grads: Sequence[Tensor]
    weight_gradient: bool  # whether the gradient of the per-sample weights is wanted
