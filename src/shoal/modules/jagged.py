"""Jagged and keyed tensors, with the names and methods of TorchRec's, so that code moves by changing the import.

    KeyedJaggedTensor   keys ["a", "b"], stride 2:   a: [1, 2] [3]     b: [] [4]
                        values  [1, 2, 3, 4]         key by key, and in a key sample by sample
                        lengths [2, 1, 0, 1]         one per bag; offsets [0, 2, 3, 3, 4] say the same
    JaggedTensor        one key's share of it: values, and lengths or offsets
    KeyedTensor         keys ["a", "b"], length_per_key [2, 3]: a dense [stride, 5] tensor whose columns have names

Shapes and types are checked here. Contents are not (lengths that are negative or do not sum to the values), because
looking at them would stall a GPU and break a compiled graph; the lookup checks them. The methods that must know the
contents on the host say that they wait for the device, and check what they see.

Lengths and offsets are computed from each other when asked for, in the type of the one that was given.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from shoal.errors import DeviceError, InputError, NotFoundError

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]

T = TypeVar("T", bound="_Jagged")

_INDEX_DTYPES = (torch.int32, torch.int64)


class _Jagged:
    """Values in bags, with or without a weight each: what JaggedTensor and KeyedJaggedTensor share."""

    # Both are as given, never computed, so that a pytree has the same leaves whatever has been asked of the tensor.
    _lengths: Tensor | None
    _offsets: Tensor | None
    # The one of the two that was not given, once it has been asked for.
    _derived: Tensor | None

    def __init__(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None) -> None:
        where = type(self).__name__
        _require_tensor(where, "values", values)
        if values.dim() == 0:
            raise InputError(f"[{where}] values: wanted at least 1 dimension; got a scalar.")
        if lengths is None and offsets is None:
            raise InputError(f"[{where}] wanted lengths or offsets; got neither.")
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None:
                _require_indices(where, name, tensor)
                _require_device(where, name, tensor, values)
        if offsets is not None and _certainly(offsets.shape[0] == 0):
            raise InputError(f"[{where}] offsets: wanted at least one element, the leading 0; got none.")
        if lengths is not None and offsets is not None and _certainly(lengths.shape[0] + 1 != offsets.shape[0]):
            raise InputError(
                f"[{where}] offsets: wanted one element more than the {lengths.shape[0]} lengths; "
                f"got {offsets.shape[0]}. Give only one of the two."
            )
        if weights is not None:
            _require_tensor(where, "weights", weights)
            if weights.dim() == 0 or _certainly(weights.shape[0] != values.shape[0]):
                raise InputError(
                    f"[{where}] weights: wanted one for each of the {values.shape[0]} values; "
                    f"got shape {tuple(weights.shape)}."
                )
            _require_device(where, "weights", weights, values)
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
        return self._derive(_to_offsets, self._lengths)

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they were given or have been computed, else None."""
        return self._derived if self._offsets is None else self._offsets

    def device(self) -> torch.device:
        """The device of all the tensors."""
        return self._values.device

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


class JaggedTensor(_Jagged):
    """Bags of values of different lengths.

    values: [n, ...], of any type.
    weights: [n, ...], or None.
    lengths: values in each bag, int32 or int64.
    offsets: where each bag starts, with the end of the last behind; instead of lengths, or beside them.
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
        _require_indices(where, "lengths", lengths)
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
        _require_sum("JaggedTensor", lengths, elements.shape[0])
        return list(torch.split(elements, lengths))

    def _pad(self, elements: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        where = "JaggedTensor.to_padded_dense"
        lengths, starts = self.lengths(), self.offsets()[:-1]
        if desired_length is None:
            counts: list[int] = lengths.tolist()
            _require_sum(where, counts, elements.shape[0])
            desired_length = max(counts, default=0)
        if desired_length < 0:
            raise InputError(f"[{where}] desired_length: wanted 0 or more; got {desired_length}.")
        integral = not (elements.is_floating_point() or elements.is_complex())
        if integral and not float(padding_value).is_integer():
            raise InputError(f"[{where}] padding_value: wanted an integer for {elements.dtype}; got {padding_value}.")
        shape = (lengths.shape[0], desired_length, *elements.shape[1:])
        padding = elements.new_full((1, *elements.shape[1:]), int(padding_value) if integral else padding_value)
        column = torch.arange(desired_length, device=elements.device)
        # Cells outside their bag read the padding, which stands behind the last element.
        source = torch.where(column < lengths.unsqueeze(1), starts.unsqueeze(1) + column, elements.shape[0])
        return torch.cat([elements, padding]).index_select(0, source.reshape(-1)).reshape(shape)

    def __repr__(self) -> str:
        return _show(self, values=self._values, weights=self._weights, lengths=self._lengths, offsets=self._offsets)


class KeyedJaggedTensor(_Jagged):
    """A batch of sparse features: for every key a bag of ids per sample.

    keys: names of the features, each once.
    values: [n] ids, int32 or int64, key by key.
    weights: [n, ...], one per id, or None.
    lengths: [len(keys) * stride] ids in each bag, int32 or int64.
    offsets: [len(keys) * stride + 1]; instead of lengths, or beside them.
    stride: samples in the batch. It follows from the lengths, unless there are no keys.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        where = "KeyedJaggedTensor"
        self._keys = _require_keys(where, keys)
        super().__init__(values, weights, lengths, offsets)
        _require_indices(where, "values", values)
        bags, count = self._bags(), len(self._keys)
        if stride is not None and _certainly(stride < 0):
            raise InputError(f"[{where}] stride: wanted 0 or more; got {stride}.")
        uneven = bags != 0 if count == 0 else bags % count != 0
        if _certainly(uneven) or (stride is not None and _certainly(bags != stride * count)):
            wanted = f"a multiple of the {count} keys" if stride is None else f"{count} keys * stride {stride}"
            raise InputError(f"[{where}] lengths: wanted as many as {wanted}; got {bags}.")
        # With keys the stride is read off the lengths, where the compiler can keep it symbolic.
        self._empty_stride = (stride or 0) if count == 0 else 0
        self._length_per_key: list[int] | None = None

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None, stride: int | None = None
    ) -> "KeyedJaggedTensor":
        """Made from lengths, with its lengths per key known. Waits for the device."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None, stride: int | None = None
    ) -> "KeyedJaggedTensor":
        """Made from offsets, with its lengths per key known. Waits for the device."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """One key for each entry; all must have the same number of bags, and weights all or none."""
        where = "KeyedJaggedTensor.from_jt_dict"
        if not jt_dict:
            raise InputError(f"[{where}] wanted at least one entry; got none. Use KeyedJaggedTensor.empty().")
        parts = [
            KeyedJaggedTensor([key], part.values(), part.weights_or_none(), part.lengths_or_none(), part._offsets)
            for key, part in jt_dict.items()
        ]
        return _concat(where, parts)

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The keys of all of them, in order; all must have the same stride, and weights all or none."""
        where = "KeyedJaggedTensor.concat"
        if not kjt_list:
            raise InputError(f"[{where}] wanted at least one KeyedJaggedTensor; got none.")
        return _concat(where, kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No keys and no values; ids are int64 unless `values_dtype` says otherwise."""
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=torch.int64 if values_dtype is None else values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | str | None = None) -> "KeyedJaggedTensor":
        """No keys and no values, with the stride and the types of `kjt`."""
        device = kjt.device() if device is None else device
        weights = kjt.weights_or_none()
        lengths = kjt._offsets if kjt._lengths is None else kjt._lengths
        assert lengths is not None
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=kjt.values().dtype, device=device),
            weights=None if weights is None else weights.new_empty((0, *weights.shape[1:]), device=device),
            lengths=torch.empty(0, dtype=lengths.dtype, device=device),
            stride=kjt.stride(),
        )

    def keys(self) -> list[str]:
        """The names of the features, in order."""
        return list(self._keys)

    def stride(self) -> int:
        """Samples in the batch."""
        return self._bags() // len(self._keys) if self._keys else self._empty_stride

    def variable_stride_per_key(self) -> bool:
        """False: all keys have the same stride."""
        return False

    def length_per_key(self) -> list[int]:
        """Ids of each key. Waits for the device the first time."""
        if self._length_per_key is not None:
            return list(self._length_per_key)
        counts = self._count_per_key()
        if not torch.compiler.is_compiling():
            _require_sum("KeyedJaggedTensor", counts, self._values.shape[0])
            self._length_per_key = counts
        return list(counts)

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if they are known on the host, else None."""
        return None if self._length_per_key is None else list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """Where each key starts in the values, with the end of the last behind. Waits for the device the first time."""
        return _running_sum(self.length_per_key())

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key starts if that is known on the host, else None."""
        return None if self._length_per_key is None else _running_sum(self._length_per_key)

    def sync(self) -> "KeyedJaggedTensor":
        """Find out the lengths per key now. Waits for the device."""
        self.length_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forget the lengths per key."""
        self._length_per_key = None
        return self

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Parts of `segments[i]` consecutive keys each, which together are all keys. Waits for the device."""
        if any(size < 0 for size in segments) or sum(segments) != len(self._keys):
            raise InputError(
                f"[KeyedJaggedTensor.split] segments: wanted sizes that sum to the {len(self._keys)} keys; "
                f"got {list(segments)}."
            )
        bounds = _running_sum(segments)
        return [self._part(start, end) for start, end in pairwise(bounds)]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """The keys at `indices`, in that order. Waits for the device.

        indices_tensor: the same indices as a tensor, which TorchRec can use; here the list is enough.
        """
        where = "KeyedJaggedTensor.permute"
        if any(not 0 <= index < len(self._keys) for index in indices):
            raise InputError(f"[{where}] indices: wanted from 0 to {len(self._keys) - 1}; got {list(indices)}.")
        if indices_tensor is not None and indices_tensor.numel() != len(indices):
            raise InputError(
                f"[{where}] indices_tensor: wanted the {len(indices)} indices of the list; "
                f"got {indices_tensor.numel()}."
            )
        if not indices:
            return self._part(0, 0)
        return _concat(where, [self._part(index, index + 1) for index in indices])

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Every key's share, by key. Waits for the device."""
        return {key: self._share(index) for index, key in enumerate(self._keys)}

    def __getitem__(self, key: str) -> JaggedTensor:
        """One key's share. Waits for the device."""
        return self._share(_position("KeyedJaggedTensor", self._keys, key))

    def __len__(self) -> int:
        return len(self._keys)

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on `device`, its weights as `dtype`; tensors that are so already are shared."""
        leaves = self._map(lambda leaf: leaf.to(device, non_blocking=non_blocking))
        if dtype is not None and leaves[1] is not None:
            leaves[1] = leaves[1].to(dtype)
        return self._alike(leaves)

    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked memory."""
        return self._alike(self._map(lambda leaf: leaf.pin_memory()))

    def _alike(self, leaves: Sequence[Any]) -> "KeyedJaggedTensor":
        made = _unflatten_keyed_jagged(leaves, _keyed_jagged_context(self))
        made._length_per_key = self._length_per_key
        return made

    def _count_per_key(self) -> list[int]:
        count, stride = len(self._keys), self.stride()
        if count == 0 or stride == 0:
            return [0] * count
        if self._lengths is not None:
            counts: list[int] = self._lengths.reshape(count, stride).sum(dim=1).tolist()
            return counts
        bounds: list[int] = self.offsets()[::stride].tolist()
        return [end - start for start, end in pairwise(bounds)]

    def _part(self, start: int, end: int) -> "KeyedJaggedTensor":
        stride, offsets = self.stride(), self.offset_per_key()
        first, last = offsets[start], offsets[end]
        part = KeyedJaggedTensor(
            self._keys[start:end],
            self._values[first:last],
            None if self._weights is None else self._weights[first:last],
            lengths=self.lengths()[start * stride : end * stride],
            stride=stride,
        )
        part._length_per_key = self.length_per_key()[start:end]
        return part

    def _share(self, index: int) -> JaggedTensor:
        part = self._part(index, index + 1)
        return JaggedTensor(part._values, part._weights, part._lengths)

    def __repr__(self) -> str:
        return _show(
            self,
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
            stride=self.stride(),
        )


class KeyedTensor:
    """A dense tensor whose columns belong to keys, such as the pooled embeddings of a batch.

    keys: names, each once.
    length_per_key: columns of each key.
    values: a tensor of sum(length_per_key) columns, most often [batch, columns].
    key_dim: the dimension of the columns.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1) -> None:
        where = "KeyedTensor"
        self._keys = _require_keys(where, keys)
        self._length_per_key = list(length_per_key)
        _require_tensor(where, "values", values)
        if len(self._length_per_key) != len(self._keys):
            raise InputError(
                f"[{where}] length_per_key: wanted one for each of the {len(self._keys)} keys; "
                f"got {self._length_per_key}."
            )
        if not 0 <= key_dim < values.dim():
            raise InputError(f"[{where}] key_dim: wanted from 0 to {values.dim() - 1}; got {key_dim}.")
        columns = values.shape[key_dim]
        if any(length < 0 for length in self._length_per_key) or _certainly(sum(self._length_per_key) != columns):
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
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """As `regroup`, by the names in `keys`."""
        if len(keys) != len(groups):
            raise InputError(
                f"[KeyedTensor.regroup_as_dict] keys: wanted one for each of the {len(groups)} groups; got {len(keys)}."
            )
        named = _require_keys("KeyedTensor.regroup_as_dict", keys)
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
        """Where each key's columns start, with the end of the last behind."""
        return _running_sum(self._length_per_key)

    def __getitem__(self, key: str) -> Tensor:
        """A view of one key's columns."""
        index = _position("KeyedTensor", self._keys, key)
        start = sum(self._length_per_key[:index])
        return self._values.narrow(self._key_dim, start, self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """A view of every key's columns, by key."""
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, self._key_dim), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on `device`; shared if it is there already."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the values."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        return _show(
            self, keys=self._keys, length_per_key=self._length_per_key, values=self._values, key_dim=self._key_dim
        )


def _to_offsets(lengths: Tensor) -> Tensor:
    # cumsum would widen int32 unless told.
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=lengths.dtype), (1, 0))


def _running_sum(lengths: Sequence[int]) -> list[int]:
    # A loop, because the compiler does not trace itertools.accumulate with symbolic sizes.
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def _concat(where: str, parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    strides = [part.stride() for part in parts]
    if any(_certainly(stride != strides[0]) for stride in strides):
        raise InputError(f"[{where}] wanted the same stride in all; got {strides}.")
    weights = [part._weights for part in parts if part._weights is not None]
    if weights and len(weights) < len(parts):
        raise InputError(f"[{where}] wanted weights in all or in none; got them in {len(weights)} of {len(parts)}.")
    joined = KeyedJaggedTensor(
        [key for part in parts for key in part._keys],
        torch.cat([part._values for part in parts]),
        torch.cat(weights) if weights else None,
        lengths=torch.cat([part.lengths() for part in parts]),
        stride=strides[0],
    )
    known = [part._length_per_key for part in parts if part._length_per_key is not None]
    if len(known) == len(parts):
        joined._length_per_key = [length for lengths in known for length in lengths]
    return joined


def _position(where: str, keys: list[str], key: str) -> int:
    if key not in keys:
        raise NotFoundError(f"[{where}] wanted one of {', '.join(keys) or 'no keys'}; got {key!r}.")
    return keys.index(key)


def _certainly(condition: bool) -> bool:
    # The compiler may know a size only when the graph runs. Then no shape is refused here, and the lookup decides.
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(condition)
    return condition


def _require_tensor(where: str, name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise InputError(f"[{where}] {name}: wanted a tensor; got {type(given).__name__}.")


def _require_indices(where: str, name: str, given: Tensor) -> None:
    _require_tensor(where, name, given)
    if given.dim() != 1 or given.dtype not in _INDEX_DTYPES:
        raise InputError(
            f"[{where}] {name}: wanted a 1-D tensor of int32 or int64; got {given.dim()}-D of {given.dtype}."
        )


def _require_device(where: str, name: str, given: Tensor, values: Tensor) -> None:
    if given.device != values.device:
        raise DeviceError(
            f"[{where}] {name}: wanted them on {values.device}, as the values; got {given.device}. Use .to(device)."
        )


def _require_keys(where: str, keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise InputError(f"[{where}] keys: wanted a list of names; got the str {keys!r}. Write keys=[{keys!r}].")
    listed = list(keys)
    for key in listed:
        if not isinstance(key, str):
            raise InputError(f"[{where}] keys: wanted names; got {key!r}.")
    if len(set(listed)) < len(listed):
        raise InputError(f"[{where}] keys: wanted each name once; got {listed}.")
    return listed


def _require_sum(where: str, lengths: Sequence[int], total: int) -> None:
    if sum(lengths) != total or any(length < 0 for length in lengths):
        raise InputError(
            f"[{where}] lengths: wanted none negative, and a sum of {total}, the number of values; got a sum of "
            f"{sum(lengths)} with a minimum of {min(lengths, default=0)}."
        )


def _show(instance: object, **parts: object) -> str:
    lines = [f"    {name}={part!r},\n" for name, part in parts.items()]
    return f"{type(instance).__name__}(\n{''.join(lines)})"


# As pytree nodes the three can be arguments and results of torch.export, functional transforms and tree_map. Contexts
# are lists, not tuples, because they must come back equal from JSON.

_JAGGED_NAMES = ("_values", "_weights", "_lengths", "_offsets")


def _flatten_jagged(jagged: JaggedTensor) -> tuple[list[Any], None]:
    return jagged._leaves(), None


def _unflatten_jagged(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor._from_leaves(list(leaves))


def _keyed_jagged_context(keyed: KeyedJaggedTensor) -> list[Any]:
    return [keyed._keys, keyed._empty_stride]


def _flatten_keyed_jagged(keyed: KeyedJaggedTensor) -> tuple[list[Any], list[Any]]:
    return keyed._leaves(), _keyed_jagged_context(keyed)


def _unflatten_keyed_jagged(leaves: Iterable[Any], context: list[Any]) -> KeyedJaggedTensor:
    made = KeyedJaggedTensor._from_leaves(list(leaves))
    made._keys, made._empty_stride = context
    made._length_per_key = None
    return made


def _flatten_keyed(keyed: KeyedTensor) -> tuple[list[Any], list[Any]]:
    return [keyed._values], [keyed._keys, keyed._length_per_key, keyed._key_dim]


def _unflatten_keyed(leaves: Iterable[Any], context: list[Any]) -> KeyedTensor:
    made = KeyedTensor.__new__(KeyedTensor)
    (made._values,) = leaves
    made._keys, made._length_per_key, made._key_dim = context
    return made


def _with_names(
    flatten: Callable[[Any], tuple[list[Any], Any]], names: tuple[str, ...]
) -> Callable[[Any], tuple[list[tuple[KeyEntry, Any]], Any]]:
    def flatten_with_keys(node: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        leaves, context = flatten(node)
        return [(GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context

    return flatten_with_keys


register_pytree_node(
    JaggedTensor,
    _flatten_jagged,
    _unflatten_jagged,
    serialized_type_name="shoal.JaggedTensor",
    flatten_with_keys_fn=_with_names(_flatten_jagged, _JAGGED_NAMES),
)
register_pytree_node(
    KeyedJaggedTensor,
    _flatten_keyed_jagged,
    _unflatten_keyed_jagged,
    serialized_type_name="shoal.KeyedJaggedTensor",
    flatten_with_keys_fn=_with_names(_flatten_keyed_jagged, _JAGGED_NAMES),
)
register_pytree_node(
    KeyedTensor,
    _flatten_keyed,
    _unflatten_keyed,
    serialized_type_name="shoal.KeyedTensor",
    flatten_with_keys_fn=_with_names(_flatten_keyed, ("_values",)),
)

# torch.export.save keeps the example inputs, and torch.load reads only classes that it is told are plain data.
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])
