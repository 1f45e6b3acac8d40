"""From how long things are to where they start."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_offsets(lengths: Tensor) -> Tensor:
    """Where each bag starts, and where the last ends, in the type of the lengths."""
    # cumsum would widen int32 unless told.
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=lengths.dtype), (1, 0))


def running_sum(lengths: Sequence[int]) -> list[int]:
    """The same on the host."""
    # A loop, because the compiler does not trace itertools.accumulate with symbolic sizes.
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums
