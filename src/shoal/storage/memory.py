"""Rows by key in host memory: the plainest storage, for tests and as an example."""

import threading

import torch
from torch import Tensor

from shoal.storage.keyed import Storage


class MemoryStorage(Storage):
    """Rows in one tensor that doubles when it is full."""

    def __init__(self, row_bytes: int) -> None:
        self._rows = torch.empty(0, row_bytes, dtype=torch.uint8, device="cpu")
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._lock = threading.Lock()

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of keys, and whether each has one."""
        with self._lock:
            slots = torch.tensor([self._slots.get(key, -1) for key in keys.tolist()], dtype=torch.int64, device="cpu")
            found = slots >= 0
            rows = torch.zeros(len(keys), self._rows.shape[1], dtype=torch.uint8, device="cpu")
            rows[found] = self._rows[slots[found]]
            return rows, found

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in place of those that the keys had, if any."""
        with self._lock:
            slots = [self._slot(key) for key in keys.tolist()]
            self._rows[slots] = rows

    def erase(self, keys: Tensor) -> int:
        """Remove the rows of keys; returns how many there were."""
        with self._lock:
            freed = [self._slots.pop(key) for key in keys.tolist() if key in self._slots]
            self._free += freed
            return len(freed)

    def keys(self) -> Tensor:
        """Every key, in any order."""
        with self._lock:
            return torch.tensor(list(self._slots), dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self._slots)

    def _slot(self, key: int) -> int:
        slot = self._slots.get(key)
        if slot is None:
            if not self._free:
                used = len(self._rows)
                more = torch.empty(max(used, 16), self._rows.shape[1], dtype=torch.uint8, device="cpu")
                self._rows = torch.cat([self._rows, more])
                self._free = list(range(used, len(self._rows)))
            slot = self._slots[key] = self._free.pop()
        return slot
