"""The index in host memory. Slots are int32 tensors; -1 is no slot."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads

NO_SLOT = -1
# A scan hands out this many buckets at a time: about 100 k keys.
_EXPORT_BUCKETS = 1 << 15


@dataclass(frozen=True)
class Entries:
    """Keys and their slots."""

    keys: Tensor
    slots: Tensor


class HostIndex:
    """Key to slot for one table, in host memory. Any int64 is a key."""

    def __init__(self) -> None:
        self.native = _native.Index()

    def __len__(self) -> int:
        return len(self.native)

    @property
    def bytes(self) -> int:
        """Bytes in use."""
        return self.native.bytes

    def bytes_after(self, more: int) -> int:
        """Bytes in use once `more` keys came."""
        return self.native.bytes_after(more)

    def find(self, keys: Tensor) -> Tensor:
        """The slot of every key, or -1."""
        return self.find_and_count(keys)[0]

    def find_and_count(self, keys: Tensor) -> tuple[Tensor, int]:
        """The slot of every key, or -1; and how many have one."""
        slots = torch.empty(len(keys), dtype=torch.int32, device="cpu")
        return slots, _native.find(self.native, keys, slots, get_num_threads())

    def reserve(self, more: int) -> None:
        """Make room for so many keys."""
        self.native.reserve(more)

    def shrink(self, budget: int) -> bool:
        """Give memory back after many erases, looking at `budget` buckets; True when nothing is left to do."""
        return self.native.shrink(budget)

    @property
    def extent(self) -> int:
        """The number of buckets that may hold keys: the range of a scan."""
        return self.native.extent

    def entries(self, from_bucket: int, to_bucket: int, from_slot: int = 0) -> Entries:
        """The entries of a range of buckets whose slot, as an unsigned number, is not below `from_slot`."""
        return Entries(*self.native.entries(from_bucket, to_bucket, from_slot))

    def export(self) -> Iterator[Entries]:
        """All entries, in chunks."""
        for start in range(0, self.extent, _EXPORT_BUCKETS):
            yield self.entries(start, start + _EXPORT_BUCKETS)
