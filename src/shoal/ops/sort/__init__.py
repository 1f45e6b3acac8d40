"""The slots of a batch in order, and where each was."""

import torch
from torch import Tensor

from shoal import _native


class Sorter:
    """Sorts slots of one device. Slots of -1 come first or last."""

    def __init__(self, device: torch.device) -> None:
        self._in_core = device.type == "cuda" and _native.can_sort_pairs()
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)

    def sort(self, slots: Tensor, bound: int, to: tuple[Tensor, Tensor]) -> None:
        """The slots, which are below `bound`, ascending, and their places: both int32 and stable, into `to`."""
        n = slots.numel()
        if not self._in_core:
            ordered, order = torch.sort(slots, stable=True)
            to[0].copy_(ordered)
            to[1].copy_(order)
            return
        if self._numbers.numel() < n:
            # It may be of another stream; what was launched there is before this.
            self._numbers.record_stream(torch.cuda.current_stream(slots.device))
            self._numbers = torch.arange(n + n // 4, dtype=torch.int32, device=slots.device)
        # By so many bits that -1 has more than any slot.
        addresses = (slots.data_ptr(), to[0].data_ptr(), self._numbers.data_ptr(), to[1].data_ptr())
        _native.sort_pairs(*addresses, n, max(bound, 1).bit_length())
