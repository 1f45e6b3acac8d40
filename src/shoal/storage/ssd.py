"""Rows by key on a disk, in files that are appended to."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import InputError, StorageError
from shoal.storage.keyed import Answer, Storage
from shoal.storage.packed import empty_packed

_DEPTH = 128
_IO = ("auto", "io_uring", "threads")


class SsdStorage(Storage):
    """Rows in files of a directory that only this storage uses. The files are removed when it is closed.

    size: the most bytes of the files; rows fill half of it. io: "io_uring", "threads", or "auto" for the first that the
    kernel allows. depth: the most requests that the disk has at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        row_bytes: int,
        size: int,
        io: str = "auto",
        direct: bool = True,
        depth: int = _DEPTH,
    ) -> None:
        if row_bytes < 1 or depth < 1:
            raise InputError(f"[ssd {directory}] row_bytes and depth must be 1 or more; got {row_bytes} and {depth}.")
        if io not in _IO:
            raise InputError(f"[ssd {directory}] io is one of {', '.join(_IO)}; got {io!r}.")
        self.row_bytes = row_bytes
        named = directory if isinstance(directory, _native.FilePath) else _native.FilePath(Path(directory))
        self._directory = named.absolute()  # the process may change its folder
        self._native: _native.SsdStore | None = _native.SsdStore.open(
            self._directory, row_bytes, size, direct, io, depth
        )

    @property
    def _store(self) -> _native.SsdStore:
        if self._native is None:
            raise StorageError(f"[ssd {self._directory}] this storage was closed. Make another one.")
        return self._native

    def _check(self, keys: Tensor, rows: Tensor | None = None) -> None:
        """Raise InputError for tensors of other types or shapes than the core expects."""
        if keys.dtype != torch.int64 or keys.dim() != 1 or keys.device.type != "cpu":
            raise InputError(
                f"[ssd {self._directory}] keys must be int64 [n] on cpu; got {keys.dtype} {tuple(keys.shape)} on "
                f"{keys.device}."
            )
        if rows is None:
            return
        wanted = (len(keys), self.row_bytes)
        if rows.dtype != torch.uint8 or tuple(rows.shape) != wanted or rows.device.type != "cpu":
            raise InputError(
                f"[ssd {self._directory}] rows must be uint8 {list(wanted)} on cpu; got {rows.dtype} "
                f"{list(rows.shape)} on {rows.device}."
            )

    @property
    def capacity(self) -> int:
        """The most rows that it can hold."""
        return self._store.capacity

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of keys, and whether each has one. If some cannot be read, they are the error's `keys`."""
        self._check(keys)
        rows = empty_packed(len(keys), self.row_bytes)
        found = torch.empty(len(keys), dtype=torch.bool, device="cpu")
        self._store.read(keys.contiguous(), rows, found)
        return rows, found

    @staticmethod
    def read_together(storages: "Sequence[SsdStorage]", keys: Sequence[Tensor]) -> list[Answer | Exception]:
        """Reads from several storages at a time, from each its own keys. What one raises is returned as its answer.

        The core gets tensors as addresses: to convert them would take as long as to read a few rows of each.
        """
        answers, reads = [], []
        asked = [some.contiguous() for some in keys]
        for storage, some in zip(storages, asked, strict=True):
            storage._check(some)
            rows = empty_packed(len(some), storage.row_bytes)
            found = torch.empty(len(some), dtype=torch.bool, device="cpu")
            answers.append((rows, found))
            reads.append((storage._store, some.data_ptr(), len(some), rows.data_ptr(), found.data_ptr()))
        have = _native.read_together(reads)
        return [
            Answer(rows, found, has) if isinstance(has, int) else has
            for (rows, found), has in zip(answers, have, strict=True)
        ]

    def contains(self, keys: Tensor) -> Tensor:
        """Returns whether each key has a row, without a read."""
        self._check(keys)
        found = torch.empty(len(keys), dtype=torch.bool, device="cpu")
        self._store.contains(keys.contiguous(), found)
        return found

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in place of those that the keys had, if any."""
        self._check(keys, rows)
        self._store.write(keys.contiguous(), rows.contiguous())

    def erase(self, keys: Tensor) -> int:
        """Remove the rows of keys; returns how many there were."""
        self._check(keys)
        return self._store.erase(keys.contiguous())

    def keys(self) -> Tensor:
        """Returns every key, in any order."""
        return self._store.keys()

    def __len__(self) -> int:
        return self._store.rows

    def clear(self) -> None:
        """Remove every row."""
        self._store.clear()

    def stats(self) -> _native.SsdStats:
        """Returns the rows and bytes, and what was read and written so far."""
        return self._store.stats()

    def close(self) -> None:
        """Remove the files, and release the directory."""
        self._native = None
