"""Storages by key, which hold the rows of a table's lower tier. To a storage, a row is a fixed number of bytes."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Answer(NamedTuple):
    """What a storage holds for some keys."""

    rows: Tensor  # uint8 [n, row_bytes]
    found: Tensor  # bool [n]: whether each has one
    has: int  # how many of them have one


class Storage(ABC):
    """Rows by key, many at a time. Keys are int64 [n], all different; rows are uint8 [n, row_bytes], on cpu.

    Calls come from several threads. A call that fails raises, and may have done a part of its work. It is repeated with
    the same arguments after the cause is gone, or the rows stay where they are. A storage may change neither its
    arguments nor, later, the tensors that it returned: rows that were read ahead are kept while others are read.
    `check_storage` of `shoal.storage` checks all of this on a storage of your own.

    `tiers=[Dram(...), MyStorage]` names a class or a function that makes one. It is called with the bytes of a row, for
    each table and each deepcopy: tables do not share a storage. A storage is a tier, not a backup: rows that changed in
    memory are written to it when they leave memory, and not when the process ends. To keep rows, commit or save them.
    """

    @abstractmethod
    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of keys, and bool [n]: whether each key has one. The rows of the others may be any bytes.

        The tensors are the caller's from then on: no later call may change them. Do not change `keys`.
        """

    @abstractmethod
    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in place of those that the keys had, if any."""

    @abstractmethod
    def erase(self, keys: Tensor) -> int:
        """Remove the rows of keys; returns how many there were."""

    @abstractmethod
    def keys(self) -> Tensor:
        """Returns every key, in any order."""

    @abstractmethod
    def __len__(self) -> int: ...

    def clear(self) -> None:
        """Remove every row."""
        self.erase(self.keys())

    def flush(self) -> None:  # noqa: B027 (most have nothing to do)
        """Complete all writes. Called before `close`; reads must see what was written even without it."""

    def close(self) -> None:  # noqa: B027
        """Release everything. It is the last call."""
