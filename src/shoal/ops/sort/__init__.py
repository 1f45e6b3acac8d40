"""The slots of a batch in order, and where each was."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import ShoalError
from shoal.ops.launch import Space

_MOST_GRAPHS = 4
_MOST_SEEN = 16


@dataclass(frozen=True)
class _Graph:
    """A sort that is kept, with the memory that it works in."""

    graph: _native.CapturedGraph
    held: tuple[object, ...]


class Sorter:
    """Sorts slots of one device, for one caller at a time. Slots of -1 come first or last.

    The sort is some ten small launches. Batches that come again in the same memory, as those of one size do, are sorted
    by a graph that holds them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_core = device.type == "cuda" and _native.can_sort_pairs()
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._graphs: OrderedDict[tuple[int, ...], _Graph] = OrderedDict()
        # Graphs that were dropped, until the device is done with them.
        self._dropped: list[tuple[torch.cuda.Event, _Graph]] = []
        self._aside: _native.CaptureStream | None = None
        self._may_capture = True

    def sort(self, slots: Tensor, bound: int, to: Space) -> None:
        """The slots, which are below `bound`, ascending and stable, and their places: the first two pieces of `to`."""
        n = slots.numel()
        if n == 0:
            return
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
        call = (slots.data_ptr(), ordered_at, self._numbers.data_ptr(), order_at, n, bits)
        kept = self._graphs.get(call)
        if kept is not None:
            kept.graph.start(torch._C._cuda_getCurrentRawStream(self._device.index))
            return
        _native.sort_pairs(_native.SortCall(*call))
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
        """Keep a graph of the call. What torch takes of memory for it is of a pool that nobody else is given."""
        if torch.cuda.get_allocator_backend() != "native" or not torch.cuda.memory_reserved(self._device):
            self._may_capture = False  # memory that is not cached is gone once torch's call is over
            return
        pool = torch.cuda.MemPool()
        try:
            if self._aside is None:
                self._aside = _native.CaptureStream.make()
            stream = torch.cuda.ExternalStream(self._aside.handle, device=self._device)
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool, self._device):
                graph = self._aside.capture_sort(_native.SortCall(*call))
        except (ShoalError, RuntimeError):  # a driver that captures no such thing: the launches will do
            self._may_capture = False
            return
        self._graphs[call] = _Graph(graph, (pool, self._numbers))
        self._dropped = [(event, kept) for event, kept in self._dropped if not event.query()]
        if len(self._graphs) > _MOST_GRAPHS:
            behind = torch.cuda.Event()
            behind.record(torch.cuda.current_stream(self._device))
            self._dropped.append((behind, self._graphs.popitem(last=False)[1]))
