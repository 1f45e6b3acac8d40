"""Pooling in plain torch."""

import torch
from torch import Tensor


def pool(rows: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None = None) -> Tensor:
    """[n, dim] rows of the keys of all bags to one output row a bag (sum, mean), or a key (none).

    A weighted mean divides by the number of keys, not by the sum of weights; an empty bag gives zeros.
    """
    if weights is not None:
        rows = rows * weights[:, None]
    if pooling == "none":
        return rows
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    summed = torch.zeros(len(lengths), rows.shape[1], dtype=rows.dtype).index_add(0, bag, rows)
    return summed / lengths.clamp(min=1)[:, None] if pooling == "mean" else summed
