"""A batch on its way to the tables' device, on a stream of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _tensors(features: Any) -> list[Tensor]:
    return [value for value in vars(features).values() if isinstance(value, Tensor)]


class MovingBatch:
    """A KeyedJaggedTensor, ours or TorchRec's, that `read` moves to a device in place: its holder need not know."""

    def __init__(self, features: Any, device: torch.device) -> None:
        self._features = features
        self._device = device
        self._moved: torch.cuda.Event | None = None

    def read(self) -> None:
        """Begin to copy it, from page-locked memory: nobody waits."""
        features = self._features
        if features.values().device == self._device:  # another collection had it moved
            return
        features.length_per_key()  # known here, it need not be asked of the device
        features.offsets()
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            there = features.pin_memory().to(self._device, non_blocking=True)
        self._moved = torch.cuda.Event()
        self._moved.record(stream)
        vars(features).update(vars(there))

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Nothing is left to do."""

    def arrive(self) -> None:
        """Let the current stream use it."""
        if self._moved is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._moved)
        for tensor in _tensors(self._features):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def release(self) -> None:
        """Nothing is held."""
