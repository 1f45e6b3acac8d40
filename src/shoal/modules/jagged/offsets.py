"""From how long things are to where they start."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.modules.jagged.known import can_be_read


def to_offsets(lengths: Tensor) -> Tensor:
    """Where each bag starts, and where the last ends, in the type of the lengths."""
    if not can_be_read(lengths):
        # cumsum would widen int32 unless told.
        return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=lengths.dtype), (1, 0))
    # Without pad: it would copy on all of torch's threads, which then spin for milliseconds on the cores that the
    # lookup needs (batch 4096 of forty tables: 8.7 ms with it, 5.3 without).
    offsets = lengths.new_empty(len(lengths) + 1)
    offsets[0] = 0
    torch.cumsum(lengths, dim=0, dtype=lengths.dtype, out=offsets[1:])
    return offsets


def running_sum(lengths: Sequence[int]) -> list[int]:
    """The same on the host."""
    # A loop, because the compiler does not trace itertools.accumulate with symbolic sizes.
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums
