"""Batches of the host on their way to the tables' device, and back."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal import torch_private


@dataclass(eq=False)
class _Moved:
    """A batch that was moved: its attributes on the host and on the device, and by how many it is needed there."""

    features: Any
    host: dict[str, Any]
    there: dict[str, Any]
    as_moved: dict[str, tuple[int, bool]]
    copied: torch.cuda.Event | None  # after the copy, on the stream that made it
    holders: int = 0

    def is_unchanged(self) -> bool:
        """Whether it is as it was moved: what was written to it since is nowhere else."""
        now = vars(self.features)
        return all(
            now.get(name) is self.there[name] and _marks(self.there[name]) == marks
            for name, marks in self.as_moved.items()
        )


def _marks(tensor: Tensor) -> tuple[int, bool]:
    """Returns what differs after a write to a tensor, or after its gradient was asked for."""
    return torch_private.version_of(tensor), tensor.requires_grad


# By the batch's id, which no other object has while it is here. A batch may be moved twice, or for two loops.
_moved: dict[int, _Moved] = {}
_lock = threading.RLock()  # a garbage collection may close a loop in the thread that holds it


def move_in_place(features: Any, device: torch.device) -> Callable[[], None] | None:
    """Move a KeyedJaggedTensor, ours or TorchRec's, to a device in place, after the current stream's work. It is
    copied through page-locked memory, and the host does not wait for the copy.

    Returns a function that the caller calls once, when it no longer needs the batch there. The batch then has its
    tensors of the host again, unless it is still needed elsewhere or was changed. None where it was not on the host.
    """
    with _lock:  # and not while it is copied: a loop may wait to let another one go
        if (moved := _moved.get(id(features))) is not None:
            return _held(moved, device)
        host = copy.copy(features)  # another thread may move it meanwhile
    if host.values().device.type != "cpu":
        return None
    host.length_per_key()  # known here, it need not be asked of the device
    host.offsets()
    there = dict(vars(host.pin_memory().to(device, non_blocking=True)))
    as_moved = {name: _marks(value) for name, value in there.items() if isinstance(value, Tensor)}
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    with _lock:
        moved = _moved.get(id(features))
        if moved is None:  # or another thread was quicker
            moved = _moved[id(features)] = _Moved(features, dict(vars(host)), there, as_moved, copied)
            vars(features).update(there)
        return _held(moved, device)


def _held(moved: _Moved, device: torch.device) -> Callable[[], None]:
    """One more needs it there: the current stream waits for the copy, which another one may have made."""
    if moved.copied is not None:
        torch.cuda.current_stream(device).wait_event(moved.copied)
    moved.holders += 1
    return partial(_let_go, moved)


def _let_go(moved: _Moved) -> None:
    for name in moved.as_moved:  # its memory is the loader's stream's: not again before this one is done with it
        tensor = moved.there[name]
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    with _lock:
        moved.holders -= 1
        if moved.holders:
            return
        del _moved[id(moved.features)]
        if moved.is_unchanged():
            vars(moved.features).update({name: moved.host.get(name) for name in moved.there})
