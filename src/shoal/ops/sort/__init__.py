"""The slots of a batch in order, and where each was."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import ShoalError
from shoal.torch_private import current_stream_handle

_MOST_GRAPHS = 4
_MOST_SEEN = 16


@dataclass(frozen=True)
class _Graph:
    """A captured sort, and the pool with the memory that it works in."""

    graph: _native.CapturedGraph
    pool: torch.cuda.MemPool


class Sorter:
    """Sorts slots of one device, for one caller at a time.

    The sort is torch's: some ten small launches on a GPU. A sort that comes again in the same memory, as those of
    batches of one size do, is captured, and from then on its launches are started as one graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._graphs: OrderedDict[tuple[int, ...], _Graph] = OrderedDict()
        # Graphs that were dropped, until the device is done with them.
        self._dropped: list[tuple[torch.cuda.Event, _Graph]] = []
        self._aside: _native.CaptureStream | None = None
        self._may_capture = device.type == "cuda"

    def sort(self, slots: Tensor, ordered: Tensor, order: Tensor) -> None:
        """Writes the int32 slots, ascending and stable, to `ordered`, and the place that each had to `order`, int64."""
        n = slots.numel()
        if n == 0:
            return
        call = (slots.data_ptr(), ordered.data_ptr(), order.data_ptr(), n)
        kept = self._graphs.get(call)
        if kept is not None:
            kept.graph.start(current_stream_handle(self._device.index))
            return
        torch.sort(slots, stable=True, out=(ordered, order))
        if self._may_capture and self._was_seen(call):
            self._capture(call, slots, ordered, order)

    def _was_seen(self, call: tuple[int, ...]) -> bool:
        seen = call in self._seen
        self._seen[call] = None
        self._seen.move_to_end(call)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return seen

    def _capture(self, call: tuple[int, ...], slots: Tensor, ordered: Tensor, order: Tensor) -> None:
        """Keeps a graph of the call. The memory that torch takes for the sort comes from a pool of the graph's own."""
        if torch.cuda.get_allocator_backend() != "native" or not torch.cuda.memory_reserved(self._device):
            self._may_capture = False  # memory that is not cached is gone once torch's call is over
            return
        pool = torch.cuda.MemPool()
        try:
            if self._aside is None:
                self._aside = _native.CaptureStream.make()
            stream = torch.cuda.ExternalStream(self._aside.handle, device=self._device)
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool, self._device):
                graph = self._aside.capture(lambda: torch.sort(slots, stable=True, out=(ordered, order)))
        except (ShoalError, RuntimeError):  # a driver that captures no such thing: the launches will do
            self._may_capture = False
            return
        self._graphs[call] = _Graph(graph, pool)
        self._dropped = [(event, kept) for event, kept in self._dropped if not event.query()]
        if len(self._graphs) > _MOST_GRAPHS:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._device))
            self._dropped.append((after, self._graphs.popitem(last=False)[1]))
