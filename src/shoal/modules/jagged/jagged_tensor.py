"""Bags of values."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.modules.jagged import pytree
from shoal.modules.jagged.base import LEAVES, Jagged
from shoal.modules.jagged.checks import require_indices, require_sum
from shoal.modules.jagged.text import show


class JaggedTensor(Jagged):
    """Bags of values of different lengths.

    values: [n, ...], of any type.
    weights: [n, ...], or None.
    lengths: values in each bag, int32 or int64.
    offsets: where each bag starts, and where the last ends. Give lengths or offsets, or both if they agree.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """No bags and no values."""
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> "JaggedTensor":
        """One bag for each tensor of the list."""
        where = "JaggedTensor.from_dense"
        if not values:
            raise InputError(f"[{where}] values: wanted at least one tensor; got none. Use JaggedTensor.empty().")
        lengths = [value.shape[0] for value in values]
        if weights is not None and [weight.shape[0] for weight in weights] != lengths:
            raise InputError(
                f"[{where}] weights: wanted tensors of lengths {lengths}, as the values; "
                f"got {[weight.shape[0] for weight in weights]}."
            )
        return JaggedTensor(
            values=torch.cat(list(values)),
            weights=None if weights is None else torch.cat(list(weights)),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """The first `lengths[i]` values of each row `values[i]`. Waits for the device."""
        where = "JaggedTensor.from_dense_lengths"
        require_indices(where, "lengths", lengths)
        if values.dim() < 2 or values.shape[0] != lengths.shape[0]:
            raise InputError(
                f"[{where}] values: wanted shape [{lengths.shape[0]}, ...] and 2 dimensions or more; "
                f"got {tuple(values.shape)}."
            )
        if weights is not None and weights.shape[:2] != values.shape[:2]:
            raise InputError(
                f"[{where}] weights: wanted shape {tuple(values.shape[:2])}, as the values; got {tuple(weights.shape)}."
            )
        if bool(((lengths < 0) | (lengths > values.shape[1])).any()):
            raise InputError(f"[{where}] lengths: wanted from 0 to {values.shape[1]}; got {lengths.tolist()}.")
        kept = torch.arange(values.shape[1], device=lengths.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[kept], None if weights is None else weights[kept], lengths)

    def to_dense(self) -> list[Tensor]:
        """The values of each bag. Waits for the device."""
        return self._split(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each bag, or None. Waits for the device."""
        return None if self._weights is None else self._split(self._weights)

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[bags, length, ...]: each bag's values, cut at the length or padded up to it.

        The length is the longest bag's unless it is given; then nothing waits for the device.
        """
        return self._pad(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """As `to_padded_dense`, for the weights; None if there are none."""
        return None if self._weights is None else self._pad(self._weights, desired_length, padding_value)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """A copy on `device`; tensors that are there already are shared."""
        return self._from_leaves(self._map(lambda leaf: leaf.to(device, non_blocking=non_blocking)))

    def _split(self, elements: Tensor) -> list[Tensor]:
        lengths: list[int] = self.lengths().tolist()
        require_sum("JaggedTensor", lengths, elements.shape[0])
        return list(torch.split(elements, lengths))

    def _pad(self, elements: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        where = "JaggedTensor.to_padded_dense"
        lengths, starts = self.lengths(), self.offsets()[:-1]
        if desired_length is None:
            counts: list[int] = lengths.tolist()
            require_sum(where, counts, elements.shape[0])
            desired_length = max(counts, default=0)
        if desired_length < 0:
            raise InputError(f"[{where}] desired_length: wanted 0 or more; got {desired_length}.")
        integral = not (elements.is_floating_point() or elements.is_complex())
        if integral and not float(padding_value).is_integer():
            raise InputError(f"[{where}] padding_value: wanted an integer for {elements.dtype}; got {padding_value}.")
        shape = (lengths.shape[0], desired_length, *elements.shape[1:])
        padding = elements.new_full((1, *elements.shape[1:]), int(padding_value) if integral else padding_value)
        column = torch.arange(desired_length, device=elements.device)
        # Cells outside their bag read the padding, which comes after the last element.
        source = torch.where(column < lengths.unsqueeze(1), starts.unsqueeze(1) + column, elements.shape[0])
        return torch.cat([elements, padding]).index_select(0, source.reshape(-1)).reshape(shape)

    def __repr__(self) -> str:
        return show(self, values=self._values, weights=self._weights, lengths=self._lengths, offsets=self._offsets)


def _flatten(jagged: JaggedTensor) -> tuple[list[Any], None]:
    return jagged._leaves(), None


def _unflatten(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor._from_leaves(list(leaves))


pytree.register(JaggedTensor, LEAVES, _flatten, _unflatten)
