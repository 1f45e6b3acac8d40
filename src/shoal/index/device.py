"""Indexes in device memory, or in host memory that the device reaches: the buckets of all tables of a group, behind one
anchor."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.index.arguments import Claim, Find, Finding, FindLost, Lost
from shoal.index.kernels import buckets as layout
from shoal.index.kernels import find as finds
from shoal.index.kernels import insert as inserts
from shoal.index.kernels import resize
from shoal.ops.arguments import Pointer, Variable
from shoal.ops.launch import Launch, blocks
from shoal.ops.library import tables as columns

_UNIT: int = layout.UNIT.value
BUCKET_BYTES: int = layout.BUCKET_UNITS.value * _UNIT
ENTRIES: int = layout.ENTRIES.value
_WORDS = BUCKET_BYTES // 4
_SLOTS = slice(layout.FIRST_SLOT.value, layout.FIRST_SLOT.value + ENTRIES)
_KEYS = slice(0, ENTRIES)
_STAMPS = slice(_SLOTS.stop, _SLOTS.stop + ENTRIES)
# At this load four buckets in nine are full, and one key in twelve is not in its home bucket (simulated).
MOST_LOAD = 0.8
_GROWTH = 1.5
_LEAST_BUCKETS = 4
_MOST_MOVED = 1 << 22  # buckets of several tables that move together
# Programs of kernels that walk a list whose length only the device knows.
WALKERS = 2112
# Keys that a program of one warp finds, or takes from the list at a time.
_FIND_BLOCK = 32
_LIST_BLOCK = 32
_RESTAMPED = 1024  # entries of a program


def finding_grids(n: int, slot_lists: int) -> tuple[int, int]:
    """`find_blocks` and `walkers` of a Batch."""
    return blocks(n, _FIND_BLOCK), max(1, min(blocks(slot_lists * n, _LIST_BLOCK), WALKERS))


def _buckets_for(keys: int, load: float) -> int:
    return max(math.ceil(keys / (ENTRIES * load)), _LEAST_BUCKETS)


def steps_of(features: int) -> int:
    """Halvings that find a position's feature."""
    return max(features - 1, 0).bit_length()


class DeviceIndex:
    """key -> slot for each of a group's tables. What grows an index stops for the device; a find or claim does not.

    `find`, `claim` and `find_lost` are launches for a caller's program. `memory`: by table what gives so many
    bytes for its buckets, where that is not the device. `load`: keys to entries, at most.
    """

    def __init__(
        self,
        anchor: Tensor,
        tables: int,
        memory: Mapping[int, Callable[[int], Tensor]] | None = None,
        load: float = MOST_LOAD,
    ) -> None:
        self.anchor = anchor
        self._load = load
        self._memory = memory or {}
        self._buffers: list[Tensor | None] = [None] * tables
        self._buckets = [0] * tables
        self.moved = [0] * tables  # how often the entries of each table got other places
        # Where the tables' buckets are, and how many rows each may have.
        self.tables = torch.zeros(tables, columns.TABLE_COLUMNS.value, dtype=torch.int64, device=anchor.device)
        self.tables[:, columns.MOST_ROWS.value] = 2**31 - 1
        self._dummy = torch.zeros(1, dtype=torch.int32, device=anchor.device)

    def describe(self, families: Sequence[int], most_rows: Sequence[int]) -> None:
        """Say which family of rows each table has, and how many rows it may have."""
        self.tables[:, columns.FAMILY.value] = torch.tensor(families, dtype=torch.int64)
        self.tables[:, columns.MOST_ROWS.value] = torch.tensor(most_rows, dtype=torch.int64)

    # ---- memory

    def bytes(self, table: int) -> int:
        """Bytes of a table's buckets."""
        return self._buckets[table] * BUCKET_BYTES

    def capacity(self, table: int) -> int:
        """Keys that fit a table's buckets as they are."""
        return math.floor(self._buckets[table] * ENTRIES * self._load)

    @staticmethod
    def bytes_for(keys: int, load: float = MOST_LOAD) -> int:
        """Bytes of the least buckets that hold so many keys."""
        return _buckets_for(keys, load) * BUCKET_BYTES

    def reserve(self, wanted: Mapping[int, int], most: Sequence[int] | None = None) -> None:
        """Make room for so many keys in all, by table, of which there will never be more than `most`: buckets move to
        larger runs, no row does. Many tables cost as many launches as one."""
        sizes = {}
        for table, keys in wanted.items():
            if keys > self.capacity(table):
                # Some at a time, as a bucket that moves costs as much as several finds.
                ahead = math.ceil(self._buckets[table] * _GROWTH)
                ahead = ahead if most is None else min(ahead, _buckets_for(most[table], self._load))
                sizes[table] = max(_buckets_for(keys, self._load), ahead)
        self._resize(sizes)

    def rebuild(self, table: int) -> None:
        """The same keys in fresh buckets: erased entries are empty again, and finds end there."""
        if self._buckets[table]:
            self._resize({table: self._buckets[table]})

    def clear(self, table: int) -> None:
        """Forget all keys of a table. Waits for the device where the buckets are not its own."""
        self._wait(table)
        self._buffers[table] = None
        self._buckets[table] = 0
        self.tables[table, :2] = 0

    def empty(self, table: int) -> None:
        """Forget all keys of a table, and keep its buckets."""
        buffer = self._buffers[table]
        if buffer is not None:
            buffer[:, _SLOTS] = layout.EMPTY.value

    def _resize(self, sizes: Mapping[int, int]) -> None:
        some: dict[int, int] = {}
        for table, buckets in sizes.items():
            some[table] = buckets
            if sum(some.values()) > _MOST_MOVED:  # two copies of these, but not of all
                self._move(some)
                some = {}
        if some:
            self._move(some)

    def _move(self, sizes: Mapping[int, int]) -> None:
        device, tables = self.anchor.device, list(sizes)
        fresh = [self._fresh(table, buckets) for table, buckets in sizes.items()]
        moves = [(self._at(table), self._offset(to)) for table, to in zip(tables, fresh, strict=True)]
        before, after = [self._buckets[table] for table in tables], list(sizes.values())
        # Of each: where the buckets are and will be, and how many of all tables come before, of either.
        columns = [*zip(*moves, strict=True), *(list(accumulate(counts, initial=0)) for counts in (before, after))]
        told = torch.zeros(4, len(tables) + 1, dtype=torch.int64)
        for row, column in enumerate(columns):
            told[row, : len(column)] = torch.tensor(column)
        told = told.to(device)
        refused = torch.zeros(1, dtype=torch.int32, device=device)
        # As many steps as all tables would need: one kernel for any number of them.
        shape = {"BLOCK": 32, "STEPS": steps_of(len(self._buckets)), "num_warps": 1}
        per_program = shape["BLOCK"] // ENTRIES
        resize.clear[(blocks(sum(after), per_program),)](self.anchor, told, len(tables), **shape)
        if sum(before):
            grid = (blocks(sum(before), per_program),)
            resize.rehash[grid](self.anchor, told, refused, len(tables), **shape)
        if int(refused):
            raise ShoalError(
                f"[index] {int(refused)} keys found no place in {sum(after)} buckets. No key was lost; this should "
                f"not happen with keys that were not made for it. Please report it."
            )
        for table, to in zip(tables, fresh, strict=True):
            self._buffers[table] = to
            self._buckets[table] = sizes[table]
            self.moved[table] += 1
        places = torch.stack([told[1, :-1], told[3].diff()], dim=1)
        self.tables[torch.tensor(tables, device=device), :2] = places

    def _fresh(self, table: int, buckets: int) -> Tensor:
        if table in self._memory:
            return self._memory[table](buckets * BUCKET_BYTES).view(torch.int32).view(buckets, _WORDS)
        return torch.empty(buckets, _WORDS, dtype=torch.int32, device=self.anchor.device)

    def _offset(self, tensor: Tensor) -> int:
        return (tensor.data_ptr() - self.anchor.data_ptr()) // _UNIT

    def _at(self, table: int) -> int:
        buffer = self._buffers[table]
        return 0 if buffer is None else self._offset(buffer)

    # ---- batches

    def find(
        self,
        finding: Finding,
        tables_of: Tensor | Variable,
        shape: tuple[int, int],
        insert: bool,
        features_of: Pointer | None = None,
        counted: tuple[Tensor, Tensor, Tensor] | None = None,
        stamped: bool = False,
        tickets: Pointer | None = None,
    ) -> Launch:
        """Slots of all items; -1 where there is no row. `shape` is of `tables_of`.

        `features_of` gets the feature of every item, `tickets` that of items in no bag. `counted`: by table, the keys
        that it was asked for and missed; and bad bags. Where `stamped`, keys that are found are.
        """
        slot_lists, features = shape
        batch, lists = finding
        # Where there is none, any tensor of that type: not touched.
        looked, missed, bad_bags = (self.tables, self.tables, self._dummy) if counted is None else counted
        arguments = Find(
            anchor=self.anchor,
            tables=self.tables,
            values=batch.values,
            offsets=batch.offsets,
            tables_of=tables_of,
            slots=batch.slots,
            features_of=batch.slots if features_of is None else features_of,
            tickets=looked if tickets is None else tickets,
            lost=Lost(lists.lost, lists.lost_of, lists.counts),
            looked=looked,
            missed=missed,
            bad_bags=bad_bags,
            n=batch.n,
            batch=batch.batch,
            features=features,
            stamp=batch.stamp,
        )
        return self._launch(
            finds.find, (batch.find_blocks, slot_lists), arguments,
            INSERT=insert, NAME=features_of is not None, TALLY=counted is not None, BLOCK=_FIND_BLOCK,
            STEPS=steps_of(features), STAMP=stamped, TICKET=tickets is not None,
        )  # fmt: skip

    def claim(self, finding: Finding, refused: Tensor) -> Launch:
        """Entries for the keys that were not found. REQUIRES: room for them."""
        batch, lists = finding
        arguments = Claim(
            anchor=self.anchor,
            tables=self.tables,
            values=batch.values,
            lost=Lost(lists.lost, lists.lost_of, lists.counts),
            won_at=lists.won_at,
            refused=refused,
            dummy=self._dummy,
            n=batch.n,
        )
        return self._launch(inserts.claim, (batch.walkers,), arguments, BLOCK=_LIST_BLOCK)

    def find_lost(self, finding: Finding) -> Launch:
        """Slots of the items that were missing, now that their keys are in."""
        batch, lists = finding
        arguments = FindLost(
            anchor=self.anchor,
            tables=self.tables,
            values=batch.values,
            slots=batch.slots,
            lost=Lost(lists.lost, lists.lost_of, lists.counts),
            n=batch.n,
        )
        return self._launch(inserts.find_lost, (batch.walkers,), arguments, BLOCK=_LIST_BLOCK)

    @staticmethod
    def _launch(kernel: Any, grid: tuple[Any, ...], arguments: tuple[Any, ...], **constants: Any) -> Launch:
        return Launch(kernel, grid, arguments, constants, {"num_warps": 1})

    # ---- one table

    def find_keys(self, table: int, keys: Tensor) -> Tensor:
        """The slot of each key, or -1."""
        slots = torch.full((len(keys),), -1, dtype=torch.int32, device=self.anchor.device)
        if len(keys) and self._buckets[table]:
            finds.find_keys[(blocks(len(keys), 32),)](
                self.anchor, self._at(table), self._buckets[table], keys, slots, len(keys), BLOCK=32, num_warps=1
            )
        return slots

    def stamp_keys(self, table: int, keys: Tensor, stamp: int) -> None:
        """Stamp the keys that are there."""
        self._stamp(table, keys, self._dummy, stamp, read=False)

    def stamps_of(self, table: int, keys: Tensor) -> Tensor:
        """The stamp of each key; undefined for those that are not there."""
        stamps = torch.zeros(len(keys), dtype=torch.int32, device=self.anchor.device)
        self._stamp(table, keys, stamps, 0, read=True)
        return stamps

    def _stamp(self, table: int, keys: Tensor, stamps: Tensor, stamp: int, read: bool) -> None:
        if len(keys) and self._buckets[table]:
            finds.stamp_keys[(blocks(len(keys), 32),)](
                self.anchor, self._at(table), self._buckets[table], keys, stamps, stamp, len(keys),
                READ=read, BLOCK=32, num_warps=1,
            )  # fmt: skip

    def restamp(self, firsts: Tensor) -> None:
        """Of all tables, each stamp becomes how many of `firsts`, stamps in ascending order, are not later."""
        for table, buckets in enumerate(self._buckets):
            if buckets:
                finds.restamp[(blocks(buckets * ENTRIES, _RESTAMPED),)](
                    self.anchor, self._at(table), buckets, firsts, len(firsts), BLOCK=_RESTAMPED
                )

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Take distinct keys out; returns the slot that each had, or -1."""
        slots = torch.full((len(keys),), -1, dtype=torch.int32, device=self.anchor.device)
        if len(keys) and self._buckets[table]:
            finds.erase[(blocks(len(keys), 32),)](
                self.anchor, self._at(table), self._buckets[table], keys, slots, len(keys), BLOCK=32, num_warps=1
            )
        return slots

    def entries(self, table: int) -> tuple[Tensor, Tensor]:
        """All keys of a table and their slots, in no order."""
        buffer = self._buffers[table]
        if buffer is None:
            device = self.anchor.device
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int32, device=device)
        self._wait(table)
        slots = buffer[:, _SLOTS]
        used = slots >= 0
        return buffer.view(torch.int64)[:, _KEYS][used].to(self.anchor.device), slots[used].to(self.anchor.device)

    def stamps(self, table: int) -> Tensor:
        """The stamps of a table's keys, in no order."""
        return self.stamped(table, 0, self._buckets[table])[1]

    def buckets(self, table: int) -> int:
        """Buckets that a table has."""
        return self._buckets[table]

    def stamped(self, table: int, first: int, buckets: int) -> tuple[Tensor, Tensor]:
        """The keys of some buckets, and their stamps."""
        device, buffer = self.anchor.device, self._buffers[table]
        if buffer is None:
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int32, device=device)
        self._wait(table)
        some = buffer[first : first + buckets]
        used = some[:, _SLOTS] >= 0
        return some.view(torch.int64)[:, _KEYS][used].to(device), some[:, _STAMPS][used].to(device)

    def _wait(self, table: int) -> None:
        if table in self._memory and self.anchor.is_cuda:
            torch.cuda.current_stream(self.anchor.device).synchronize()
