"""Columns with names: what a lookup of bags gives."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError, NotFoundError
from shoal.modules.jagged import pytree
from shoal.modules.jagged.checks import position, require_keys, require_tensor
from shoal.modules.jagged.known import certainly
from shoal.modules.jagged.offsets import running_sum
from shoal.modules.jagged.text import show
from shoal.modules.tracing import Traceable, traceable


class KeyedTensor(metaclass=Traceable):
    """A dense tensor whose columns belong to keys, such as the pooled embeddings of a batch.

    keys: names, each once.
    length_per_key: columns of each key.
    values: a tensor of sum(length_per_key) columns, most often [batch, columns].
    key_dim: the dimension of the columns.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1) -> None:
        where = "KeyedTensor"
        self._keys = require_keys(where, keys)
        self._length_per_key = list(length_per_key)
        require_tensor(where, "values", values)
        if len(self._length_per_key) != len(self._keys):
            raise InputError(
                f"[{where}] length_per_key: wanted one for each of the {len(self._keys)} keys; "
                f"got {self._length_per_key}."
            )
        if not 0 <= key_dim < values.dim():
            raise InputError(f"[{where}] key_dim: wanted from 0 to {values.dim() - 1}; got {key_dim}.")
        columns = values.shape[key_dim]
        if any(length < 0 for length in self._length_per_key) or certainly(sum(self._length_per_key) != columns):
            raise InputError(
                f"[{where}] length_per_key: wanted lengths that sum to the {columns} columns of the values; "
                f"got {self._length_per_key}."
            )
        self._values = values
        self._key_dim = key_dim

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """One key for each tensor, joined at `cat_dim`."""
        if not tensors:
            raise InputError("[KeyedTensor.from_tensor_list] tensors: wanted at least one; got none.")
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    @traceable
    def regroup(keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """For each group of keys one tensor, its keys' columns side by side."""
        where = "KeyedTensor.regroup"
        owners: dict[str, list[KeyedTensor]] = {}
        for keyed in keyed_tensors:
            for key in keyed._keys:
                owners.setdefault(key, []).append(keyed)
        dims = {keyed._key_dim for keyed in keyed_tensors}
        if len(dims) > 1:
            raise InputError(f"[{where}] keyed_tensors: wanted the same key_dim in all; got {sorted(dims)}.")
        grouped = []
        for group in groups:
            if not group:
                raise InputError(f"[{where}] groups: wanted at least one key in each; got {groups}.")
            for key in group:
                if key not in owners:
                    raise NotFoundError(f"[{where}] wanted one of {', '.join(owners)}; got {key!r}.")
                if len(owners[key]) > 1:
                    raise InputError(f"[{where}] wanted each key in one tensor; got {key!r} in {len(owners[key])}.")
            grouped.append(torch.cat([owners[key][0][key] for key in group], dim=keyed_tensors[0]._key_dim))
        return grouped

    @staticmethod
    @traceable
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """As `regroup`, by the names in `keys`."""
        if len(keys) != len(groups):
            raise InputError(
                f"[KeyedTensor.regroup_as_dict] keys: wanted one for each of the {len(groups)} groups; got {len(keys)}."
            )
        named = require_keys("KeyedTensor.regroup_as_dict", keys)
        return dict(zip(named, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """The names, in order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """The whole tensor."""
        return self._values

    def key_dim(self) -> int:
        """The dimension of the columns."""
        return self._key_dim

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Columns of each key."""
        return list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """Where each key's columns start, and where the last one's end."""
        return running_sum(self._length_per_key)

    def _key_indices(self) -> dict[str, int]:
        """The place of each key among the keys, as TorchRec's `regroup` asks for it."""
        return {key: index for index, key in enumerate(self._keys)}

    def __getitem__(self, key: str) -> Tensor:
        """A view of one key's columns."""
        index = position("KeyedTensor", self._keys, key)
        start = sum(self._length_per_key[:index])
        return self._values.narrow(self._key_dim, start, self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """A view of every key's columns, by key."""
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, self._key_dim), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on `device`; shared if it is there already."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the values."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        return show(
            self, keys=self._keys, length_per_key=self._length_per_key, values=self._values, key_dim=self._key_dim
        )


def _flatten(keyed: KeyedTensor) -> tuple[list[Any], list[Any]]:
    return [keyed._values], [keyed._keys, keyed._length_per_key, keyed._key_dim]


def _unflatten(leaves: Iterable[Any], context: list[Any]) -> KeyedTensor:
    made = KeyedTensor.__new__(KeyedTensor)
    (made._values,) = leaves
    made._keys, made._length_per_key, made._key_dim = context
    return made


pytree.register(KeyedTensor, ("_values",), _flatten, _unflatten)
