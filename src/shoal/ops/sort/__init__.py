"""The slots of a batch in order, and where each was."""

import torch
from torch import Tensor

from shoal import _native
from shoal.ops.launch import Space


class Sorter:
    """Sorts slots of one device. Slots of -1 come first or last."""

    def __init__(self, device: torch.device) -> None:
        self._in_core = device.type == "cuda" and _native.can_sort_pairs()
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)

    def sort(self, slots: Tensor, bound: int, to: Space) -> None:
        """The slots, which are below `bound`, ascending and stable, and their places: the first two pieces of `to`."""
        n = slots.numel()
        if not self._in_core:
            ordered, order = torch.sort(slots, stable=True)
            to.tensor(0).copy_(ordered)
            to.tensor(1).copy_(order)
            return
        if self._numbers.numel() < n:
            # It may be of another stream; what was launched there is before this.
            self._numbers.record_stream(torch.cuda.current_stream(slots.device))
            self._numbers = torch.arange(n + n // 4, dtype=torch.int32, device=slots.device)
        ordered_at, order_at = to.addresses()[:2]
        # By so many bits that -1 has more than any slot.
        bits = max(bound, 1).bit_length()
        _native.sort_pairs(slots.data_ptr(), ordered_at, self._numbers.data_ptr(), order_at, n, bits)
