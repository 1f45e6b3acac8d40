"""What JaggedTensor and KeyedJaggedTensor share."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.modules.jagged.checks import (
    require_agreement,
    require_device,
    require_indices,
    require_tensor,
)
from shoal.modules.jagged.known import certainly
from shoal.modules.jagged.offsets import to_offsets
from shoal.modules.tracing import Traceable

T = TypeVar("T", bound="Jagged")

# The leaves of a pytree, in order.
LEAVES = ("_values", "_weights", "_lengths", "_offsets")


class Jagged(metaclass=Traceable):
    """Values in bags, with or without a weight each."""

    # Both are as given, never computed, so that a pytree has the same leaves whatever has been asked of the tensor.
    _lengths: Tensor | None
    _offsets: Tensor | None
    # The one of the two that was not given, once it has been asked for: as true as the given one stays what it was.
    _derived: Tensor | None

    def __init__(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None) -> None:
        where = type(self).__name__
        require_tensor(where, "values", values)
        if values.dim() == 0:
            raise InputError(f"[{where}] values: wanted at least 1 dimension; got a scalar.")
        if lengths is None and offsets is None:
            raise InputError(f"[{where}] wanted lengths or offsets; got neither.")
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None:
                require_indices(where, name, tensor)
                require_device(where, name, tensor, values)
        if offsets is not None and certainly(offsets.shape[0] == 0):
            raise InputError(f"[{where}] offsets: wanted at least one element, the leading 0; got none.")
        if lengths is not None and offsets is not None:
            require_agreement(where, lengths, offsets)
        if weights is not None:
            require_tensor(where, "weights", weights)
            if weights.dim() == 0 or certainly(weights.shape[0] != values.shape[0]):
                raise InputError(
                    f"[{where}] weights: wanted one for each of the {values.shape[0]} values; "
                    f"got shape {tuple(weights.shape)}."
                )
            require_device(where, "weights", weights, values)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._derived = None

    def values(self) -> Tensor:
        """The values, bag by bag."""
        return self._values

    def weights(self) -> Tensor:
        """The weights, one per value; an InputError if there are none."""
        if self._weights is None:
            raise InputError(f"[{type(self).__name__}.weights] wanted a tensor with weights; got one without.")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights, one per value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of values in each bag."""
        if self._lengths is not None:
            return self._lengths
        return self._derive(torch.diff, self._offsets)

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they were given or have been computed, else None."""
        return self._derived if self._lengths is None else self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts in the values; one element more than there are bags."""
        if self._offsets is not None:
            return self._offsets
        return self._derive(to_offsets, self._lengths)

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they were given or have been computed, else None."""
        return self._derived if self._offsets is None else self._offsets

    def device(self) -> torch.device:
        """The device of all the tensors."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of the tensors that were given."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self._leaves() if leaf is not None)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the tensors."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets, self._derived):
            if tensor is not None:
                tensor.record_stream(stream)

    def _derive(self, compute: Callable[[Tensor], Tensor], given: Tensor | None) -> Tensor:
        assert given is not None
        if self._derived is not None:
            return self._derived
        derived = compute(given)
        # Remembering it inside a traced function would be a side effect on an input, and a recompile the next time.
        if not torch.compiler.is_compiling():
            self._derived = derived
        return derived

    def _bags(self) -> int:
        if self._lengths is not None:
            return self._lengths.shape[0]
        assert self._offsets is not None
        return self._offsets.shape[0] - 1

    def _leaves(self) -> list[Tensor | None]:
        return [self._values, self._weights, self._lengths, self._offsets]

    @classmethod
    def _from_leaves(cls: type[T], leaves: Sequence[Any]) -> T:
        # Unchecked: pytrees put other things than tensors in the leaves, and these were checked before.
        made = cls.__new__(cls)
        made._values, made._weights, made._lengths, made._offsets = leaves
        made._derived = None
        return made

    def _map(self, change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        return [None if leaf is None else change(leaf) for leaf in self._leaves()]
