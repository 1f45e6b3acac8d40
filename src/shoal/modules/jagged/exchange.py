"""Bags that come from several ranks, brought into the order of a batch: the end of TorchRec's exchange of features."""

from collections.abc import Sequence

import torch
from torch import Tensor


def in_order(
    order: Tensor, sizes: Sequence[int], lengths: Tensor, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lengths, values and weights of bags that come rank by rank, key by key as `order` says.

    order: of blocks of bags, where all ranks have equally many samples, and of bags otherwise, as TorchRec makes it.
    sizes: samples of each rank.
    """
    order = order.long()
    if all(size == sizes[0] for size in sizes):
        order = torch.arange(lengths.numel(), device=lengths.device).reshape(len(order), sizes[0])[order].reshape(-1)
    counts = lengths.long()
    starts = torch.cumsum(counts, 0) - counts
    wanted = counts[order]
    shift = starts[order] - (torch.cumsum(wanted, 0) - wanted)
    n = values.shape[0]
    source = torch.repeat_interleave(shift, wanted, output_size=n) + torch.arange(n, device=values.device)
    return lengths[order], values[source], None if weights is None else weights[source]
