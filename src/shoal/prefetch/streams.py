"""CUDA streams for the thread that takes batches from a loader: its work on a device overlaps with the loop's."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

import torch

from shoal.torch_private import SUPPORTED_NODES, tree_leaves

Events = Sequence[torch.cuda.Event]
_DEPTH = 4  # objects within objects
# The most things within objects that are looked at, more than batches are made of. So many take two milliseconds a
# step.
_MOST_LOOKED_AT = 1 << 11


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a batch: all in its containers, and those in attributes of its objects, the nearest first,
    until so many things were looked at: an object that refers to its dataset is not searched at every step."""
    coming = deque((leaf, 0) for leaf in tree_leaves(batch))
    left = _MOST_LOOKED_AT
    while coming:
        one, depth = coming.popleft()
        if isinstance(one, torch.Tensor):
            yield one
            continue
        inside: Iterable[Any] = ()
        if isinstance(one, (list, tuple)):
            inside = one
        elif isinstance(one, dict):
            inside = one.values()
        elif type(one) in SUPPORTED_NODES:
            inside = tree_leaves(one)
        elif depth < _DEPTH and hasattr(one, "__dict__") and not isinstance(one, (type, ModuleType)):
            inside, depth = vars(one).values(), depth + 1
        found = list(islice(inside, left))
        left -= len(found)
        coming.extend((part, depth) for part in found)


class LoaderStreams:
    """One stream on each device. Without devices, all methods do nothing."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]
        # Batches that the loop is done with, as far as the host knows. Their memory belongs to these streams, which
        # must not use it again before the loop's streams are done too.
        self._used: deque[tuple[Any, Events]] = deque()
        for stream in self._streams:  # the loader's tensors may have been made there
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes them this thread's current streams."""
        with ExitStack() as stack:
            for stream in reversed(self._streams):  # so that the first one's device is the current one
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def ready(self) -> Events:
        """Returns events of all work that these streams have been given."""
        return [stream.record_event() for stream in self._streams]

    def hand_over(self, batch: Any, ready: Events) -> None:
        """The current streams wait for a batch, and keep its tensors for as long as any code holds them."""
        for stream, event in zip(self._streams, ready, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)
        for tensor in tensors_of(batch) if self._streams else ():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def take_back(self, batch: Any) -> None:
        """Keeps a batch that the loop is done with until the current streams are done with it."""
        if not self._streams:
            return
        self._used.append((batch, [torch.cuda.current_stream(one.device).record_event() for one in self._streams]))
        while self._used and all(event.query() for event in self._used[0][1]):
            self._used.popleft()

    def close(self) -> None:
        """Drops all batches. These streams may use their memory again after the loop's streams are done with it."""
        for _batch, events in self._used:
            for stream, event in zip(self._streams, events, strict=True):
                stream.wait_event(event)
        self._used.clear()
