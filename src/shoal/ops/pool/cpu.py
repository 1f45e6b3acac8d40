"""Pooling by the native core. Tensors go to it as addresses: a step has no time for more."""

from typing import cast

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.config.dtypes import WEIGHTS, torch_dtype

_DTYPES: dict[torch.dtype, _native.Dtype] = {torch_dtype(name): getattr(_native.Dtype, name) for name in WEIGHTS}
# Below this a fresh tensor's page faults cost less than asking for a kept buffer.
_KEPT_FROM_BYTES = 1 << 20


def _integers(tensor: Tensor) -> tuple[int, int, bool]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype is torch.int32


def _address(weights: Tensor | None) -> int:
    return 0 if weights is None else weights.data_ptr()


def bags_of(values: Tensor, offsets: Tensor, weights: Tensor | None, features: int, slot_lists: int) -> _native.Bags:
    """A batch for the kernels, with room for its slots. It points into the tensors: contiguous, on CPU, and kept."""
    return _native.Bags(_integers(values), _integers(offsets), _address(weights), features, slot_lists)


def bind_again(bags: _native.Bags, values: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
    """The same batch in other tensors; raises InputError where they differ in shape or features."""
    bags.bind_again(_integers(values), _integers(offsets), _address(weights))


def has_bags_of(bags: _native.Bags, values: Tensor, offsets: Tensor) -> bool:
    """Whether these are as many keys, in the bags that there were when slots were found ahead. Keys that are others by
    now are found anew by the lookup."""
    return bags.has_bags_of(_integers(values), _integers(offsets))


def _output(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if rows * columns * dtype.itemsize < _KEPT_FROM_BYTES:
        return torch.empty(rows, columns, dtype=dtype, device="cpu")
    return cast(Tensor, _native.output(rows, columns, _DTYPES[dtype]))


def pool(
    lookup: _native.Lookup,
    bags: _native.Bags,
    batch: int,
    columns: int,
    dtype: torch.dtype,
    training: bool,
    known: bool,
) -> tuple[Tensor, list[int]]:
    """Every part's pooled rows in its columns of one [batch, columns] output.

    If rows are to come into memory first: how many each part lacks, and `bags.finish` completes the output. `known`:
    slots were found ahead, and those of the same keys are still right.
    """
    out = _output(batch, columns, dtype)
    return out, lookup.run(bags, out.data_ptr(), columns, _DTYPES[dtype], training, known, get_num_threads())


def pool_each(
    lookup: _native.Lookup, bags: _native.Bags, size: int, dtype: torch.dtype, training: bool, known: bool
) -> tuple[Tensor, list[int]]:
    """The same without pooling: every part's rows, one part behind the other in a flat output of `size` elements."""
    out = _output(1, size, dtype)[0]
    return out, lookup.run(bags, out.data_ptr(), -1, _DTYPES[dtype], training, known, get_num_threads())
