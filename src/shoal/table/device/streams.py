"""Which of a device's streams waits for which, so that a group's calls see the tables as if they came one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal import torch_private
from shoal.errors import DeviceError


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of the host to the device without a wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Streams:
    """The streams that a group's calls were launched on. Its lock covers every method.

    A call that changes rows comes after all others; calls that only read may run at the same time. Rows that are placed
    ahead of their use come on a stream of their own. It waits for the last lookup and not for updates after it, which
    only change rows that must stay where they are. `moved`: called when calls of one kind change their stream.
    """

    def __init__(self, name: str, device: torch.device, moved: Callable[[], None]) -> None:
        self._name = name
        self._device = device
        self._moved = moved
        self._is_cuda = device.type == "cuda"
        # The stream of the last exclusive call, and those of the calls that have read since.
        self._writer_stream = torch.cuda.current_stream(device) if self._is_cuda else None
        self._writer = -1 if self._writer_stream is None else self._writer_stream.cuda_stream
        self._sharing: dict[int, torch.cuda.Stream] = {}
        self._placing: torch.cuda.Stream | None = None
        self._placed: torch.cuda.Event | None = None  # what the writer's stream has still to wait for
        self._looked: torch.cuda.Event | None = None  # after it are updates only
        self.is_captured = False  # whether a lookup is in a CUDA graph: no call tells when that runs

    @property
    def is_capturing(self) -> bool:
        """Whether what comes next on the current stream goes into a CUDA graph."""
        return self._is_cuda and torch.cuda.is_current_stream_capturing()

    def follow(self, exclusive: bool, update: bool = False) -> None:
        """Order the next call on the current stream after those that it must follow. exclusive: it may change rows."""
        if not self._is_cuda:
            return
        capturing = self.is_capturing
        if exclusive and capturing:
            raise DeviceError(
                f"[{self._name}] the current stream is being captured into a CUDA graph, which would repeat one "
                f"batch's changes of the tables. Capture lookups in eval without gradients, or the model without the "
                f"tables."
            )
        self.is_captured |= capturing
        raw = torch_private.current_stream_handle(self._device.index)
        if not update and (exclusive or raw == self._writer):
            self._looked = None
        if update and self._is_read_elsewhere():
            self._looked = None  # after it are lookups too, which only this stream knows from here on
        placed = None if update else self._placed
        follows = raw == self._writer and self._sharing.keys() <= {raw} if exclusive else raw in self._sharing
        if (follows and placed is None) or capturing:
            return
        now = torch.cuda.current_stream(self._device)
        if placed is not None:
            now.wait_event(placed)
        earlier = dict(self._sharing) if exclusive else {}
        if self._writer_stream is not None:
            earlier[self._writer] = self._writer_stream
        for other, stream in earlier.items():
            if other != raw:
                now.wait_stream(stream)
        if not exclusive:
            self._sharing[raw] = now
            return
        if raw != self._writer:
            self._moved()
        self._writer, self._writer_stream = raw, now
        self._sharing.clear()
        if placed is not None:
            self._placed = None

    def _is_read_elsewhere(self) -> bool:
        """Whether rows are read on streams other than that of the last exclusive call and that of placing."""
        own = {self._writer} if self._placing is None else {self._writer, self._placing.cuda_stream}
        return bool(self._sharing.keys() - own)

    def looked_up(self, found: "torch.cuda.Event | None") -> None:
        """Lets rows be placed after what the current stream was given up to `found`, or up to now. What it is given
        later only reads and updates rows that must stay."""
        if self._placing is not None:
            # It may be recorded again when it is waited for: later on the same stream, which does no harm.
            self._looked = torch.cuda.current_stream(self._device).record_event() if found is None else found

    @property
    def waits_for_updates(self) -> bool:
        """Whether rows that are placed now wait for all updates that were launched."""
        return self._looked is None

    def forget_lookup(self) -> None:
        """What was launched since the last lookup changes more than rows that stay."""
        self._looked = None

    @property
    def placing(self) -> "torch.cuda.Stream | None":
        """The stream on which rows are placed ahead."""
        if self._placing is None and self._is_cuda:
            # Its kernels wait for the bus, and must not wait for room among those that fill the device.
            self._placing = torch.cuda.Stream(self._device, priority=-1)
        return self._placing

    @contextmanager
    def place(self, ready: "torch.cuda.Event | None") -> Iterator[None]:
        """What is launched inside places rows, once `ready` came."""
        stream = self.placing
        if stream is None:
            yield
            return
        if ready is not None:
            stream.wait_event(ready)
        if self._looked is not None:
            stream.wait_event(self._looked)
        elif self._writer_stream is not None:
            stream.wait_stream(self._writer_stream)
        for raw, other in self._sharing.items():
            if raw != self._writer:
                stream.wait_stream(other)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._placed = stream.record_event()
