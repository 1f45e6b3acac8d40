"""What a group's kernels count, and how it comes to the host: after a step, without a wait."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Forwards and backwards send one each.
_COPIES = 16
_LAST_COPIES = 6


class Ledger:
    """What the kernels count, in one tensor: it comes to the host in one copy.

    By table the keys, by family the slots taken; then what went wrong: by table keys refused for want of room,
    gradients dropped and rows skipped; bad bags, bad weights. And how many rows of the last update had one item.
    """

    def __init__(self, tables: int, families: int, device: torch.device) -> None:
        self.rooms = tables + families
        self._end = self.rooms + 3 * tables + 2
        self.device = torch.zeros(self._end + 1, dtype=torch.int32, device=device)
        self.keys = self.device[:tables]
        self.taken = self.device[tables : self.rooms]
        self.refused = self.device[self.rooms : self.rooms + tables]
        self.left_out = self.device[self.rooms + tables : self.rooms + 3 * tables]
        # Bags first, weights after them: kernels have one address.
        self.bad_batches = self.device[self.rooms + 3 * tables : self._end]
        self.single_rows = self.device[self._end :]
        on_gpu = device.type == "cuda"
        copies = torch.zeros(_COPIES, len(self.device), dtype=torch.int32, pin_memory=on_gpu)
        self._copies = list(copies)
        self._read = copies.numpy()
        self._wrong = self.wrong(self._read)
        self._single_rows = self._read[:, self._end]
        self._events: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in range(_COPIES)]
        for event in self._events if on_gpu else []:
            event.record(torch.cuda.current_stream(device))  # it has a handle from then on
        self.sent = 0
        self._heard = 0

    def wrong(self, counted: np.ndarray) -> np.ndarray:
        """What went wrong, of a copy or several."""
        return counted[..., self.rooms : self._end]

    def rows_of_one_item(self) -> int:
        """Most of them in the updates that the copies tell of, as far as these came; 0 before the first."""
        return int(max(self._single_rows.tolist()))

    @property
    def copies(self) -> int:
        """How many copies are kept: older ones are overwritten."""
        return len(self._copies)

    def next(self) -> tuple[Tensor, Any]:
        """Where the next copy goes, and the event after it. The sender counts it in `sent`."""
        at = self.sent % len(self._copies)
        return self._copies[at], self._events[at]

    def send(self) -> None:
        """Copy it to the host behind what was launched so far."""
        copy, event = self.next()
        copy.copy_(self.device, non_blocking=True)
        if event is not None:
            event.record()
        self.sent += 1

    def hear(self, wait: bool = False) -> tuple[int, np.ndarray] | None:
        """The newest copy that is there and was not heard yet, and its number; with `wait`, at least the oldest.

        It is the caller's until others were sent.
        """
        oldest = max(self._heard, self.sent - len(self._copies)) + 1
        for number in range(self.sent, oldest - 1, -1):
            event = self._events[(number - 1) % len(self._copies)]
            if event is None or event.query():
                break
            if wait and number == oldest:
                event.synchronize()
                break
        else:
            return None
        self._heard = number
        return number, self._read[(number - 1) % len(self._copies)]

    def says_worse(self, reported: np.ndarray) -> bool:
        """Whether more went wrong than was reported, as far as the last copies came; they are read where they lie."""
        known = reported.tobytes()
        for number in range(max(self.sent - _LAST_COPIES, 0), self.sent):
            told = self._wrong[number % len(self._copies)]
            if told.tobytes() != known and (told > reported).any():
                return True
        return False

    def hear_all(self) -> tuple[int, np.ndarray]:
        """What is counted now: waits for the device."""
        self.send()
        while (heard := self.hear(wait=True)) is None or heard[0] < self.sent:
            pass
        return heard
