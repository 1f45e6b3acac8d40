"""How many updates a row had, as a float32 of its state: docs/formats.md, section 6.

Up to 2^24 the float32 is the number. From there on each update makes it the next larger float32, whose bits as an
integer are larger by 1. It stops at the largest finite one, where the bias correction is 1 for every beta.
"""

import torch
from torch import Tensor

_EXACT = 2**24
_BITS_OF_EXACT = 0x4B800000
MOST = _EXACT + 0x7F7FFFFF - _BITS_OF_EXACT


def numbers_of(counts: Tensor) -> Tensor:
    """The numbers of updates, int64, that counts stand for."""
    bits = counts.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(counts <= _EXACT, counts.clamp(max=_EXACT).to(torch.int64), bits - _BITS_OF_EXACT + _EXACT)


def counts_of(numbers: Tensor) -> Tensor:
    """The counts, float32, that stand for numbers of updates; the largest one for those beyond."""
    beyond = numbers.clamp(_EXACT, MOST) - _EXACT + _BITS_OF_EXACT
    return torch.where(numbers <= _EXACT, numbers.to(torch.float32), beyond.to(torch.int32).view(torch.float32))


def count_update(count: Tensor) -> int:
    """Add one update to a row's count, in place, and return how many there are."""
    count.copy_(counts_of(numbers_of(count) + 1))
    return int(numbers_of(count))
