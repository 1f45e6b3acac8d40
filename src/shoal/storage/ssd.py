"""Rows by key on a disk, in files that are appended to."""

import torch
from torch import Tensor

from shoal import _native
from shoal.storage.keyed import Storage

_DEPTH = 128


class SsdStorage(Storage):
    """Rows in files of a directory that is this storage's alone; they go when it is closed.

    size: bytes of the files at most, of which rows fill half. io: "io_uring", "threads", or "auto" for the first that
    the kernel allows. depth: requests that the disk has in hand at a time.
    """

    def __init__(
        self, directory: str, row_bytes: int, size: int, io: str = "auto", direct: bool = True, depth: int = _DEPTH
    ) -> None:
        self.row_bytes = row_bytes
        self._native: _native.SsdStore | None = _native.SsdStore.open(directory, row_bytes, size, direct, io, depth)

    @property
    def _store(self) -> _native.SsdStore:
        assert self._native is not None, "a storage that was closed"
        return self._native

    @property
    def capacity(self) -> int:
        """Rows that it takes at most."""
        return self._store.capacity

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of keys, and whether each has one."""
        rows = torch.empty(len(keys), self.row_bytes, dtype=torch.uint8, device="cpu")
        found = torch.empty(len(keys), dtype=torch.bool, device="cpu")
        self._store.read(keys, rows, found)
        return rows, found

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row; nothing is read for it."""
        found = torch.empty(len(keys), dtype=torch.bool, device="cpu")
        self._store.contains(keys, found)
        return found

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in place of those that the keys had, if any."""
        self._store.write(keys, rows)

    def erase(self, keys: Tensor) -> int:
        """Remove the rows of keys; returns how many there were."""
        return self._store.erase(keys)

    def keys(self) -> Tensor:
        """Every key, in any order."""
        return self._store.keys()

    def __len__(self) -> int:
        return self._store.rows

    def clear(self) -> None:
        """Remove every row."""
        self._store.clear()

    def stats(self) -> _native.SsdStats:
        """Rows, bytes and what was read and written so far."""
        return self._store.stats()

    def close(self) -> None:
        """Remove the files, and let the directory go."""
        self._native = None
