"""The index in host memory. Slots are int32 tensors; -1 is no slot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads

NO_SLOT = -1
# A scan hands out this many buckets at a time: about 100 k keys.
_EXPORT_BUCKETS = 1 << 15
_KEPT_FROM = 1 << 15


@dataclass(frozen=True)
class Entries:
    """Keys and their slots."""

    keys: Tensor
    slots: Tensor


def empty_slots(n: int) -> Tensor:
    """Room for n slots. A large one is a kept buffer, since a fresh one's page faults cost a tenth of a lookup."""
    if n < _KEPT_FROM:
        return torch.empty(n, dtype=torch.int32, device="cpu")
    return cast(Tensor, _native.output(1, n, _native.Dtype.float32))[0].view(torch.int32)


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
        slots = torch.empty(len(keys), dtype=torch.int32, device="cpu")
        find([KeyRange(self, 0, len(keys))], keys, slots)
        return slots

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Give absent keys, each once, their slots."""
        insert([self], [keys], [slots])

    def erase(self, keys: Tensor) -> Tensor:
        """Forget keys; returns the slot each had, or -1."""
        slots = torch.empty(len(keys), dtype=torch.int32, device="cpu")
        self.native.erase(keys, slots)
        return slots

    def reassign(self, keys: Tensor, slots: Tensor) -> None:
        """Give present keys other slots."""
        self.native.reassign(keys, slots)

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


@dataclass(frozen=True)
class KeyRange:
    """keys[begin:end] of a batch belong to `index`; key i has its slot at slots[shift + i]."""

    index: HostIndex
    begin: int
    end: int
    shift: int = 0

    @property
    def bounds(self) -> tuple[int, int, int]:
        """begin, end and shift."""
        return (self.begin, self.end, self.shift)


class Missing:
    """The keys of one table that a batch has and its index lacks: each once, in order of first appearance."""

    def __init__(self, native: _native.Missing) -> None:
        self._native = native
        self.keys: Tensor = native.keys

    def __len__(self) -> int:
        return self._native.count

    def fill(self, slots_of_keys: Tensor, slots: Tensor) -> None:
        """Give every position of the batch the slot that its key got."""
        self._native.fill(slots_of_keys, slots)


def find(ranges: Sequence[KeyRange], keys: Tensor, slots: Tensor) -> list[int]:
    """Write the slot of every key of every range; returns how many each lacks."""
    return _native.find([r.index.native for r in ranges], [r.bounds for r in ranges], keys, slots, get_num_threads())


def missing(tables: Sequence[Sequence[KeyRange]], keys: Tensor, slots: Tensor) -> list[Missing]:
    """For every table, given as its ranges of the batch, the keys that `find` gave no slot."""
    bounds = [[r.bounds for r in ranges] for ranges in tables]
    return [Missing(native) for native in _native.missing(bounds, keys, slots, get_num_threads())]


def insert(indexes: Sequence[HostIndex], keys: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    """Give absent keys, each once, their slots. If there is no memory, no key is added."""
    natives = [index.native for index in indexes]
    _native.reserve(natives, [len(k) for k in keys], get_num_threads())
    try:
        _native.insert(natives, keys, slots, get_num_threads())
    except BaseException:
        for index, absent in zip(indexes, keys, strict=True):
            index.erase(absent)
        raise
