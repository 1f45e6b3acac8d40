"""The tier above: copies, in device memory, of rows that live in pinned host memory.

Its kernels: index/kernels/tiers.py, index/kernels/victims.py, kernels/move.py.

Its index holds the keys whose rows are above. Slots that no key has are in a ring for each table; keys that were not
used for longest give theirs up when it runs dry. Nothing of that asks the host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.index.arguments import (
    Asked,
    Batch,
    Choose,
    ClaimAbove,
    FindBelow,
    Finding,
    FoundLists,
    GoBack,
    Pin,
    Seat,
    Seated,
    Settle,
    Sweep,
    Tiering,
    TierLists,
    TierNumbers,
)
from shoal.index.device import BUCKET_BYTES, ENTRIES, WALKERS, DeviceIndex
from shoal.index.kernels import tiers as kernels
from shoal.index.kernels import victims
from shoal.ops.arguments import Pointer, lengths
from shoal.ops.launch import Launch, blocks, power_of_two
from shoal.storage.hbm import DIRTY_FLAG, HbmStorage, Layout
from shoal.table.device.arguments import Exchange, Flush, Rehome, StepAside
from shoal.table.device.kernels import move as moves

# Keys come and go in every batch, and most of those that are not there are asked for in vain: a find must end soon.
UPPER_LOAD = 0.5
_RING_BYTES = 4
_LEAST_GROWTH = 1024  # rows
_LIST_BLOCK = 32
_SWEPT_ENTRIES = 512
_SWEPT_BUCKETS = 32
_SWEPT_SLOTS = 256  # by a program, at least
_SAMPLED_BUCKETS = 128
_MOVED_WORDS = 1024  # of rows that a program has in hand
# One for every second processor of an H200: addresses of host memory are translated one at a time. More
# programs are slower (25,000 rows: 1.08 ms with 132 of them, 1.36 with 2112), and leave no processor to updates, whose
# kernels want another split of its memory; with 32, rows that come up are waited for.
_MOVERS = 64
# How often it is looked at how many rows come up, and one in how many keys are few.
_BATCHES_BETWEEN = 16
_FEW_IN = 512


def tier_lengths(total: int, keeps: bool = True, places: bool = True) -> TierLists:
    """How long the lists are for so many items. Only a batch whose rows are kept or placed has more than the first two,
    and only one whose rows are placed more than `home_at`."""
    home = total if keeps else 0
    rest = total if keeps and places else 0
    return lengths(
        TierLists, asked=total, asked_of=total, home_at=home, won_above=rest,
        seated=rest, seated_from=rest, seated_of=rest, seated_at=rest,
    )  # fmt: skip


def bytes_above(layout: Layout, rows: int) -> int:
    """Bytes of device memory for copies of so many rows, with their index and what says where they belong."""
    return rows * (HbmStorage.copy_bytes(layout) + _RING_BYTES) + DeviceIndex.bytes_for(rows, UPPER_LOAD)


class UpperTier:
    """What of a group's tables is above. `budgets`: bytes, of the tables that have a tier below. `tells_ages`: whether
    the index below is asked which rows were used long ago."""

    def __init__(
        self,
        below: DeviceIndex,
        storage: HbmStorage,
        families: Sequence[int],
        budgets: Mapping[int, int],
        tells_ages: bool,
    ) -> None:
        device = below.anchor.device
        self.anchor = below.anchor
        self.index = DeviceIndex(self.anchor, len(families), load=UPPER_LOAD)
        self._below = below
        self._storage = storage
        self._families = families
        self._budgets = budgets
        self._tells_ages = tells_ages
        # Most rows that may be above, by table.
        self.most = [self._rows_within(table, budgets.get(table)) for table in range(len(families))]
        self.index.describe(families, self.most)
        self.tiers = torch.zeros(len(families), kernels.TIER_COLUMNS.value, dtype=torch.int64, device=device)
        self._numbers = torch.tensor(sorted(budgets), dtype=torch.int64).to(device)
        self.tiers[self._numbers, kernels.TIERED.value] = 1
        alone = [table for table in range(len(families)) if table not in budgets]
        self._others = torch.tensor(alone, dtype=torch.int64).to(device)
        self._rings: dict[int, Tensor] = {}
        self._slots: dict[int, list[Tensor]] = {table: [] for table in budgets}
        self._homes: dict[int, list[Tensor]] = {table: [] for table in budgets}
        self._dummy = torch.zeros(1, dtype=torch.int32, device=device)
        self._followed = dict.fromkeys(budgets, 0)  # moves of the index below
        self._sweepers = 1  # for each table: as many as run at a time, or as there is work for

    def has(self, table: int) -> bool:
        """Whether a table has a tier below this one."""
        return table in self._budgets

    def grids(self, items: int) -> tuple[int, int]:
        """`sweepers` and `movers` of TierNumbers."""
        return self._sweepers, max(1, min(blocks(items, _LIST_BLOCK), _MOVERS))

    def follow(self) -> None:
        """Know where the indexes of tables with one tier are now, as they are above too, and the entries below of keys
        that are above."""
        self.index.tables[self._others, :2] = self._below.tables[self._others, :2]
        for table, seen in self._followed.items():
            moved = self._below.moved[table]
            if moved != seen and (entries := self.index.bytes(table) // BUCKET_BYTES * ENTRIES):
                moves.locate[(blocks(entries, _LIST_BLOCK),)](
                    self.anchor, self.index.tables, self._below.tables, self._storage.homes, table,
                    SLAB_BITS=self._storage.slab_bits, BLOCK=_LIST_BLOCK, num_warps=1,
                )  # fmt: skip
            self._followed[table] = moved

    # ---- memory

    def _layout(self, table: int) -> Layout:
        return self._storage.families[self._families[table]].layout

    def bytes(self, table: int) -> int:
        """Bytes of device memory that a table has here."""
        each = self._storage.copy_bytes(self._layout(table)) + _RING_BYTES
        return self.capacity(table) * each + self.index.bytes(table)

    def _rows_within(self, table: int, budget: int | None) -> int:
        if budget is None:
            return 0
        each = self._storage.copy_bytes(self._layout(table))
        rows = budget // each
        while rows > 0 and (over := bytes_above(self._layout(table), rows) - budget) > 0:
            rows -= max(1, over // (2 * each + BUCKET_BYTES))
        return max(rows, 0)

    def capacity(self, table: int) -> int:
        """Slots that a table has above."""
        return sum(len(slots) for slots in self._slots[table])

    def reserve(self, table: int, rows: int) -> None:
        """Slots above for so many rows, as far as the budget goes. Waits for the device."""
        have, most = self.capacity(table), self.most[table]
        if min(rows, most) <= have:
            return
        more = min(max(rows - have, have // 2, _LEAST_GROWTH), most - have)
        self.index.reserve({table: have + more}, self.most)
        ring = torch.empty(have + more, dtype=torch.int32, device=self.anchor.device)
        free = self._free(table)
        slots, homes = self._storage.grow_above(self._families[table], more)
        self._slots[table].append(slots)
        self._homes[table].append(homes)
        self._set_ring(table, ring, torch.cat([free, slots]))
        sweepers = min(WALKERS // len(self._budgets), blocks(have + more, _SWEPT_SLOTS))
        self._sweepers = max(self._sweepers, sweepers)

    def _free(self, table: int) -> Tensor:
        """The slots in a table's ring. Waits for the device."""
        ring = self._rings.get(table)
        if ring is None:
            return torch.empty(0, dtype=torch.int32, device=self.anchor.device)
        tier = self.tiers[table].tolist()
        found = min(tier[kernels.FOUND.value], tier[kernels.WANTED.value])
        begin, end = tier[kernels.POPPED.value], tier[kernels.PUSHED.value] + found
        return ring[torch.arange(begin, end, device=ring.device) % len(ring)]

    def _set_ring(self, table: int, ring: Tensor, free: Tensor) -> None:
        ring[: len(free)] = free
        before = self._rings.get(table)
        if before is not None and before.is_cuda:  # it may be of another stream; what was launched there is before this
            before.record_stream(torch.cuda.current_stream(before.device))
        self._rings[table] = ring
        first, last = kernels.RING_AT.value, kernels.ASKED.value
        tier = self.tiers[table].cpu()
        tier[first : last + 1] = 0
        tier[kernels.RING_AT.value] = (ring.data_ptr() - self.anchor.data_ptr()) // _RING_BYTES
        tier[kernels.RING_SIZE.value] = len(ring)
        tier[kernels.PUSHED.value] = len(free)
        self.tiers[table] = tier.to(self.tiers.device)

    # ---- one table

    def find_keys(self, table: int, keys: Tensor) -> Tensor:
        """The slot above of each key, or -1."""
        return self.index.find_keys(table, keys)

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Take distinct keys out; returns the slots that they had. Their rows are never written down."""
        slots = self.index.erase(table, keys)
        slots = slots[slots >= 0]
        for held, homes in zip(self._slots[table], self._homes[table], strict=True):
            here = slots[(slots >= held[0]) & (slots <= held[-1])]
            homes[(here - held[0]).long()] = -1
        return slots

    def giving(self, table: int, slots: Tensor) -> Callable[[], None]:
        """What frees slots of erased rows, once it is called, and then asks for no memory. Waits for the device."""
        if not len(slots):
            return lambda: None
        ring, free = torch.empty_like(self._rings[table]), torch.cat([self._free(table), slots])
        return lambda: self._set_ring(table, ring, free)

    def clear(self, table: int) -> None:
        """Forget all rows of a table; all its slots are free."""
        if table not in self._rings:
            return
        self.index.empty(table)
        for homes in self._homes[table]:
            homes.fill_(-1)
        self._set_ring(table, torch.empty_like(self._rings[table]), torch.cat(self._slots[table]))

    def restamp(self, firsts: Tensor) -> None:
        """Each stamp becomes how many of `firsts`, stamps in ascending order, are not later."""
        self.index.restamp(firsts)
        in_place = self.tiers[:, kernels.IN_PLACE.value]
        in_place.copy_(torch.searchsorted(firsts.long(), in_place.contiguous(), right=True))

    def counted(self, table: int) -> tuple[int, int]:
        """How many rows came up and how many were written down."""
        tier = self.tiers[table].tolist()
        return tier[kernels.PROMOTED.value], tier[kernels.DEMOTED.value]

    def held(self, table: int, oldest_at_work: int | None) -> tuple[int, int, int]:
        """How many rows are above, how many of them are dirty, and how many are in use by that batch or a later one."""
        _keys, slots = self.index.entries(table)
        flags = self._storage.read_flags(self._families[table], slots)
        pinned = 0 if oldest_at_work is None else int((self.index.stamps(table) >= oldest_at_work).sum())
        return len(slots), int(((flags & DIRTY_FLAG) != 0).sum()), pinned

    # ---- launches

    def tiering(self, batch: Batch, found: FoundLists, lists: TierLists, numbers: TierNumbers) -> Tiering:
        """What the launches below take of a call. The list of what is not above is the first after the families'."""
        families = len(self._storage.families)
        return Tiering(batch, found, lists, numbers, found.counts[1 + families :], found.counts[2 + families :])

    def _asked(self, t: Tiering) -> Asked:
        return Asked(
            anchor=self.anchor,
            tables=self.index.tables,
            tiers=self.tiers,
            values=t.batch.values,
            slots=t.batch.slots,
            asked=t.lists.asked,
            asked_of=t.lists.asked_of,
            asked_count=t.asked_count,
        )

    def _seated(self, t: Tiering) -> Seated:
        lists = t.lists
        return Seated(lists.seated, lists.seated_from, lists.seated_of, lists.seated_at, t.seated_count)

    def _swept(self, t: Tiering) -> Sweep:
        return Sweep(self.anchor, self.index.tables, self.tiers, self._numbers, t.asked_count)

    def find(
        self, t: Tiering, tables_of: Tensor, shape: tuple[int, int], features_of: Pointer | None,
        counted: tuple[Tensor, Tensor, Tensor] | None, stamped: bool, tickets: Pointer | None,
    ) -> Launch:  # fmt: skip
        """Slots of all items whose rows are above, and a list of the others."""
        missing = t.found._replace(counts=t.asked_count, lost=t.lists.asked, lost_of=t.lists.asked_of)
        finding = Finding(t.batch, missing)
        return self.index.find(finding, tables_of, shape, True, features_of, counted, stamped, tickets)

    def find_below(self, t: Tiering, missed: Tensor, insert: bool, place: bool, keep: bool) -> Launch:
        """Slots below of the others."""
        arguments = FindBelow(
            asked=self._asked(t)._replace(tables=self._below.tables),
            home_at=t.lists.home_at,
            lost=t.found.lost,
            lost_of=t.found.lost_of,
            lost_count=t.found.counts,
            missed=missed,
            n=t.batch.n,
        )
        return self._walk(kernels.find_below, arguments, t, INSERT=insert, PLACE=place, KEEP=keep, BLOCK=_LIST_BLOCK)

    def place(self, t: Tiering) -> list[Launch]:
        """Slots above for the keys of the list that have a row."""
        asked, swept, lists = self._asked(t), self._swept(t), t.lists
        chosen = Choose(swept, t.numbers.pinned_from)
        claimed = ClaimAbove(asked, lists.home_at, lists.won_above, self._dummy, t.batch.n, t.numbers.held_from)
        seat = Seat(asked, lists.home_at, lists.won_above, self._seated(t), t.batch.n, t.batch.stamp)
        return [
            Launch(victims.choose, (len(self._numbers),), chosen, {"SAMPLE": _SAMPLED_BUCKETS}, {"num_warps": 1}),
            self._sweep(victims.take_victims, swept, t, BLOCK=_SWEPT_ENTRIES),
            self._walk(kernels.claim_above, claimed, t, BLOCK=_LIST_BLOCK),
            self._walk(kernels.seat, seat, t, BLOCK=_LIST_BLOCK),
        ]

    def settle(self, t: Tiering, place: bool) -> Launch:
        """Slots of all items of the list; what is used in place is known to be."""
        arguments = Settle(self._asked(t), t.lists.home_at, t.lists.won_above, t.batch.n, t.batch.stamp)
        return self._walk(kernels.settle, arguments, t, PLACE=place, BLOCK=_LIST_BLOCK)

    def pin(self, t: Tiering) -> Launch:
        """Stamp the rows below of the list."""
        arguments = Pin(self.anchor, t.asked_count, t.lists.home_at, t.batch.stamp)
        return self._walk(kernels.pin, arguments, t, BLOCK=_LIST_BLOCK)

    def move(self, t: Tiering, births: Callable[[int, Mapping[str, Any]], Launch] | None) -> list[Launch]:
        """Rows up and down; `births` makes the launch that writes a family's first rows, given what rows are like."""
        storage, seated = self._storage, self._seated(t)
        anchor, slabs, homes, below = self.anchor, storage.slabs, storage.homes, self._below.tables
        launches: list[Launch] = []
        families = sorted({self._families[table] for table in self._budgets})
        for family in families:
            layout = storage.families[family].layout
            words = 4 * layout.row_units
            shape = {
                "FLAGS_AT": 4 * layout.weight_units + layout.flags_at,
                "SLAB_BITS": storage.slab_bits,
                "ROW_WORDS": words,
                "R": power_of_two(words),
                "BLOCK": max(1, min(16, _MOVED_WORDS // power_of_two(words))),
            }
            warps = 4 if words <= _MOVED_WORDS else 8
            if births is not None:
                launches.append(births(family, shape))
            rehomed = {name: shape[name] for name in ("FLAGS_AT", "SLAB_BITS", "ROW_WORDS")}
            rehomed |= {"AGES": self._tells_ages, "BLOCK": _LIST_BLOCK}
            aside = StepAside(anchor, slabs, homes, below, self.tiers, seated, family)
            exchange = Exchange(anchor, slabs, homes, below, seated, family)
            flush = Flush(anchor, slabs, homes, self.index.tables, self.tiers, self._numbers, t.asked_count, family)
            launches += [
                # Most often there is none, and the list must be walked.
                Launch(moves.step_aside, (t.batch.walkers,), aside, shape, {"num_warps": warps}),
                self._walk(moves.rehome, Rehome(aside, t.numbers.pinned_from), t, **rehomed),
                Launch(moves.exchange, (t.numbers.movers,), exchange, shape, {"num_warps": warps}),
                self._sweep(moves.flush, flush, t, warps, **shape),
            ]
        return [
            *launches,
            self._sweep(victims.go_back, GoBack(self._swept(t), self._dummy), t, 1, BLOCK=_SWEPT_BUCKETS),
            self._sweep(victims.clean, self._swept(t), t, 1, BLOCK=_SWEPT_BUCKETS),
        ]

    @staticmethod
    def _walk(kernel: Any, arguments: tuple[Any, ...], t: Tiering, **constants: Any) -> Launch:
        return Launch(kernel, (t.batch.walkers,), arguments, constants, {"num_warps": 1})

    def _sweep(self, kernel: Any, arguments: tuple[Any, ...], t: Tiering, warps: int = 4, **constants: Any) -> Launch:
        """Over all that is above: most often there is nothing to do."""
        return Launch(kernel, (t.numbers.sweepers, len(self._numbers)), arguments, constants, {"num_warps": warps})


class Traffic:
    """How many rows come up: where there are few, bringing them ahead costs the host more than it saves."""

    def __init__(self, tiers: Tensor) -> None:
        self._counted = tiers[:, kernels.PROMOTED.value]
        self._copy = torch.zeros(len(tiers), dtype=torch.int64, pin_memory=tiers.is_cuda)
        self._copied = torch.cuda.Event() if tiers.is_cuda else None
        self._is_on_its_way = False
        self._batches = self._keys = self._came = 0
        self.is_heavy = True

    def hear_of(self, keys: int) -> None:
        """A batch of so many keys will be looked up. Waits for nothing."""
        self._batches += 1
        self._keys += keys
        if self._batches < _BATCHES_BETWEEN or (self._copied is not None and not self._copied.query()):
            return
        if self._is_on_its_way:
            came = int(self._copy.sum())
            self.is_heavy = (came - self._came) * _FEW_IN > self._keys
            self._came = came
        self._copy.copy_(self._counted, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._counted.device))
        self._is_on_its_way = True
        self._batches = self._keys = 0
