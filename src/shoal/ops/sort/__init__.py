"""The slots of a batch in order, and where each was."""

from collections import OrderedDict

import torch
from torch import Tensor

from shoal import _native
from shoal.ops.launch import Space

_MOST_GRAPHS = 4
_MOST_SEEN = 16


class Sorter:
    """Sorts slots of one device, for one caller at a time. Slots of -1 come first or last.

    The sort is a dozen small launches. Batches that come again in the same memory, as those of one size do, are
    sorted by a graph that holds them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_core = device.type == "cuda" and _native.can_sort_pairs()
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._graphs: OrderedDict[tuple[int, ...], torch.cuda.CUDAGraph] = OrderedDict()
        self._aside: torch.cuda.Stream | None = None
        self._may_capture = True

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
            self._graphs.clear()
        ordered_at, order_at = to.addresses()[:2]
        # By so many bits that -1 has more than any slot.
        bits = max(bound, 1).bit_length()
        call = (slots.data_ptr(), ordered_at, self._numbers.data_ptr(), order_at, n, bits)
        graph = self._graphs.get(call)
        if graph is not None:
            graph.replay()
            return
        _native.sort_pairs(*call)
        if self._may_capture and self._was_seen(call):
            self._capture(call)

    def _was_seen(self, call: tuple[int, ...]) -> bool:
        seen = call in self._seen
        self._seen[call] = None
        self._seen.move_to_end(call)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return seen

    def _capture(self, call: tuple[int, ...]) -> None:
        """Keep a graph of the call; what it needs of memory is the graph's own."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._aside):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    _native.sort_pairs(*call)
                finally:
                    graph.capture_end()
        except (RuntimeError, MemoryError):  # a torch or driver that captures no such thing: the launches will do
            self._may_capture = False
            return
        self._graphs[call] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
