"""Bags of ids for every key: a batch of sparse features."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.modules.jagged import pytree
from shoal.modules.jagged.base import LEAVES, Jagged
from shoal.modules.jagged.checks import position, require_indices, require_keys, require_sum
from shoal.modules.jagged.exchange import in_order
from shoal.modules.jagged.jagged_tensor import JaggedTensor
from shoal.modules.jagged.known import certainly
from shoal.modules.jagged.offsets import running_sum
from shoal.modules.jagged.text import show
from shoal.modules.tracing import traceable


class KeyedJaggedTensor(Jagged):
    """A batch of sparse features: for every key a bag of ids per sample.

    keys: names of the features, each once.
    values: [n] ids, int32 or int64, key by key.
    weights: [n, ...], one per id, or None.
    lengths: [len(keys) * stride] ids in each bag, int32 or int64.
    offsets: [len(keys) * stride + 1] where each bag starts, and where the last ends. Give lengths or offsets, or
        both if they agree.
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
        self._keys = require_keys(where, keys)
        super().__init__(values, weights, lengths, offsets)
        require_indices(where, "values", values)
        bags, count = self._bags(), len(self._keys)
        if stride is not None and certainly(stride < 0):
            raise InputError(f"[{where}] stride: wanted 0 or more; got {stride}.")
        uneven = bags != 0 if count == 0 else bags % count != 0
        if certainly(uneven) or (stride is not None and certainly(bags != stride * count)):
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
            KeyedJaggedTensor([key], part.values(), part.weights_or_none(), part.lengths())
            for key, part in jt_dict.items()
        ]
        return _concat(where, parts)

    @staticmethod
    @traceable
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

    def stride_per_key(self) -> list[int]:
        """Samples in the batch, for each key."""
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Nothing, as in TorchRec where all keys have the same stride."""
        return []

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """None: samples are not deduplicated."""
        return None

    def index_per_key(self) -> dict[str, int]:
        """The place of each key among the keys."""
        return {key: index for index, key in enumerate(self._keys)}

    def _key_indices(self) -> dict[str, int]:
        """`index_per_key`, as TorchRec's functions ask for it."""
        return self.index_per_key()

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key starts in the lengths, and where the last one ends."""
        return running_sum(self.stride_per_key())

    def length_per_key(self) -> list[int]:
        """Ids of each key. Waits for the device the first time."""
        if self._length_per_key is not None:
            return list(self._length_per_key)
        counts = self._count_per_key()
        if not torch.compiler.is_compiling():
            require_sum("KeyedJaggedTensor", counts, self._values.shape[0])
            self._length_per_key = counts
        return list(counts)

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if they are known on the host, else None."""
        return None if self._length_per_key is None else list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """Where each key starts in the values, and where the last one ends. Waits for the device the first time."""
        return running_sum(self.length_per_key())

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key starts if that is known on the host, else None."""
        return None if self._length_per_key is None else running_sum(self._length_per_key)

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
        bounds = running_sum(segments)
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
        return self._share(position("KeyedJaggedTensor", self._keys, key))

    def __len__(self) -> int:
        return len(self._keys)

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on `device`, its weights as `dtype`; tensors that are so already are shared."""
        made = self._alike(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and made._weights is not None:
            made._weights = made._weights.to(dtype)
        return made

    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked memory."""
        return self._alike(lambda tensor: tensor.pin_memory())

    def _alike(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        made = _unflatten(self._map(change), _context(self))
        # What is known goes along together: offsets computed anew could differ from the lengths per key.
        made._derived = None if self._derived is None else change(self._derived)
        made._length_per_key = self._length_per_key
        return made

    def _count_per_key(self) -> list[int]:
        count, stride = len(self._keys), self.stride()
        if count == 0 or stride == 0:
            return [0] * count
        if torch.compiler.is_compiling() and self._lengths is not None:
            # The inductor of torch 2.13 takes slices as long as these sums, and not as long as a difference of offsets.
            counts: list[int] = self._lengths.reshape(count, stride).sum(dim=1).tolist()
            return counts
        # From the offsets, which are what a lookup reads: even where lengths were changed meanwhile, the two agree.
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

    # ---- what TorchRec's sharded, quantized and other modules ask of a batch

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The same batch; lengths have one dimension here."""
        return self

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """An InputError: samples are not deduplicated."""
        raise InputError(
            "[KeyedJaggedTensor.inverse_indices] wanted deduplicated samples; got a batch of every sample. Ask "
            "inverse_indices_or_none()."
        )

    def dist_labels(self) -> list[str]:
        """The names of `dist_tensors`."""
        return ["lengths", "values"] if self._weights is None else ["lengths", "values", "weights"]

    def dist_tensors(self) -> list[Tensor]:
        """What ranks exchange of a batch."""
        tensors = [self.lengths(), self._values]
        return tensors if self._weights is None else [*tensors, self._weights]

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """For each of `dist_tensors` the elements of each part, of `key_splits[i]` keys each. Waits for the device."""
        bounds, offsets, stride = running_sum(key_splits), self.offset_per_key(), self.stride()
        bags = [stride * keys for keys in key_splits]
        values = [offsets[end] - offsets[start] for start, end in pairwise(bounds)]
        return [bags, values] if self._weights is None else [bags, values, values]

    @staticmethod
    def dist_init(
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: Sequence[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """A batch made of what `num_workers` ranks sent. Waits for the device.

        tensors: `dist_tensors` of all ranks, one after the other.
        variable_stride_per_key: False.
        recat: the order that brings the ranks' bags together key by key, or None where they are so.
        stride_per_rank: samples of each rank.
        stagger: already a part of `recat`.
        """
        where = "KeyedJaggedTensor.dist_init"
        if variable_stride_per_key or stride_per_rank is None:
            raise InputError(f"[{where}] wanted the same stride for all keys, on all ranks; got a variable one.")
        if len(tensors) not in (2, 3):
            raise InputError(f"[{where}] tensors: wanted lengths, values and perhaps weights; got {len(tensors)}.")
        lengths, values = tensors[:2]
        weights = tensors[2] if len(tensors) == 3 else None
        if recat is not None:
            lengths, values, weights = in_order(recat, stride_per_rank, lengths, values, weights)
        return KeyedJaggedTensor(keys, values, weights, lengths, stride=sum(stride_per_rank)).sync()

    # TorchRec's functions read these attributes of its class instead of calling its methods.

    @property
    def _stride(self) -> int:
        return self.stride()

    @property
    def _stride_per_key(self) -> list[int]:
        return self.stride_per_key()

    @property
    def _stride_per_key_per_rank(self) -> None:
        return None

    @property
    def _lengths_offset_per_key(self) -> list[int]:
        return self.lengths_offset_per_key()

    @property
    def _offset_per_key(self) -> list[int] | None:
        return self.offset_per_key_or_none()

    @property
    def _index_per_key(self) -> dict[str, int]:
        return self.index_per_key()

    @property
    def _inverse_indices(self) -> None:
        return None

    @property
    def _jt_dict(self) -> None:
        return None

    def __repr__(self) -> str:
        return show(
            self,
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
            stride=self.stride(),
        )


def _concat(where: str, parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    strides = [part.stride() for part in parts]
    if any(certainly(stride != strides[0]) for stride in strides):
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


def _context(keyed: KeyedJaggedTensor) -> list[Any]:
    return [keyed._keys, keyed._empty_stride]


def _flatten(keyed: KeyedJaggedTensor) -> tuple[list[Any], list[Any]]:
    return keyed._leaves(), _context(keyed)


def _unflatten(leaves: Iterable[Any], context: list[Any]) -> KeyedJaggedTensor:
    made = KeyedJaggedTensor._from_leaves(list(leaves))
    made._keys, made._empty_stride = context
    made._length_per_key = None
    return made


pytree.register(KeyedJaggedTensor, LEAVES, _flatten, _unflatten)
