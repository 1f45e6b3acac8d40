"""Pooling by the native core."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads

_DTYPES = {
    torch.float32: _native.Dtype.float32,
    torch.float16: _native.Dtype.float16,
    torch.bfloat16: _native.Dtype.bfloat16,
}
# Below this a fresh tensor's page faults cost less than asking for a kept buffer.
_KEPT_FROM_BYTES = 1 << 20


def _output(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if rows * columns * dtype.itemsize < _KEPT_FROM_BYTES:
        return torch.empty(rows, columns, dtype=dtype, device="cpu")
    return cast(Tensor, _native.output(rows, columns, _DTYPES[dtype]))


def pool(
    features: Sequence[_native.PoolFeature], bags: _native.Bags, batch: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Every feature's pooled rows in its columns of one [batch, columns] output."""
    out = _output(batch, columns, dtype)
    _native.pool(features, bags, out, get_num_threads())
    return out


def pool_each(
    features: Sequence[_native.PoolFeature],
    bags: _native.Bags,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> Tensor:
    """Every feature's rows, of the given shapes, one feature behind the other in one flat output."""
    sizes = [rows * columns for rows, columns in shapes]
    out = _output(1, sum(sizes), dtype)[0]
    outs = [part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True)]
    _native.pool_each(features, bags, outs, get_num_threads())
    return out
