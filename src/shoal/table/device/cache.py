"""The tier above: copies, in device memory, of rows that live in pinned host memory; see ops/tier and ops/move.

Its index holds the keys whose rows are above. Slots that no key has are in a ring for each table; keys that were not
used for longest give theirs up when it runs dry. Nothing of that asks the host.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.index.device import BUCKET_BYTES, ENTRIES, WALKERS, DeviceIndex
from shoal.ops.launch import Launch, Variable, blocks, power_of_two
from shoal.ops.move import triton as moves
from shoal.ops.tier import triton as kernels
from shoal.storage.hbm import DIRTY_FLAG, HbmStorage, Layout

# What a lookup of tables with tiers wants of its caller beside FINDING: a list of the items that are not above, and
# beside it whose they are, where their slots below are written and where an item won an entry above; and a list of the
# slots that were won, where the rows are below, whose they are, and where their slots below are written. `counts` has
# two more, at its end: how long the lists are. Keys stamped with `pinned_from` or more are in use, or will be;
# with less than `held_from`, no batch at work has them. `sweepers`: programs
# that go over all that is above. `movers`: programs that move rows.
TIERING = (
    "asked", "asked_of", "home_at", "won_above", "seated", "seated_from", "seated_of", "seated_at", "pinned_from",
    "held_from", "sweepers", "movers",
)  # fmt: skip

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
# One for every second processor of an H200: addresses of host memory are translated one at a time, whoever asks. More
# programs are slower (25,000 rows: 1.08 ms with 132 of them, 1.36 with 2112), and leave no processor to updates, whose
# kernels want another split of its memory; with 32, rows that come up are waited for.
_MOVERS = 64
# How often it is looked at how many rows come up, and one in how many keys are few.
_BATCHES_BETWEEN = 16
_FEW_IN = 512


def tiering_pieces(total: int, keep: bool) -> list[tuple[torch.dtype, int]]:
    """The lists of TIERING for so many items; where nobody keeps or places rows, the first two."""
    rest = total if keep else 0
    places = [(torch.int64, rest), (torch.int64, rest), *[(torch.int32, rest)] * 3, (torch.int64, rest)]
    return [(torch.int32, total), (torch.int32, total), *places]


def bytes_above(layout: Layout, rows: int) -> int:
    """Bytes of device memory for copies of so many rows, with their index and what says where they belong."""
    return rows * (HbmStorage.copy_bytes(layout) + _RING_BYTES) + DeviceIndex.bytes_for(rows, UPPER_LOAD)


class UpperTier:
    """What of a group's tables is above. `budgets`: bytes, of the tables that have a tier below. `tells_ages`: whether
    somebody asks the index below which rows were used long ago."""

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
        """`sweepers` and `movers` of TIERING."""
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

    def _asked(self, v: Any) -> Any:
        """The variables with the list of what is not above as that of what is lost."""
        length = v.counts[1 + len(self._storage.families) :]
        return SimpleNamespace(**{**vars(v), "lost": v.asked, "lost_of": v.asked_of, "counts": length})

    def _seated(self, v: Any) -> tuple[Variable, ...]:
        """The list of slots that were won, and how long it is."""
        length = v.counts[2 + len(self._storage.families) :]
        return v.seated, v.seated_from, v.seated_of, v.seated_at, length

    def find(
        self, v: Any, tables_of: Tensor, shape: tuple[int, int], features_of: Variable | None,
        counted: tuple[Tensor, Tensor, Tensor] | None, stamped: bool, tickets: Variable | None,
    ) -> Launch:  # fmt: skip
        """Slots of all items whose rows are above, and a list of the others."""
        return self.index.find(self._asked(v), tables_of, shape, True, features_of, counted, stamped, tickets)

    def find_below(self, v: Any, missed: Tensor, insert: bool, place: bool, keep: bool) -> Launch:
        """Slots below of the others."""
        asked = self._asked(v)
        return self._walk(
            kernels.find_below,
            (
                self.anchor, self._below.tables, self.tiers, v.values, v.slots, asked.lost, asked.lost_of, asked.counts,
                v.home_at, v.lost, v.lost_of, v.counts, missed, v.n,
            ),
            v, INSERT=insert, PLACE=place, KEEP=keep, BLOCK=_LIST_BLOCK,
        )  # fmt: skip

    def place(self, v: Any) -> list[Launch]:
        """Slots above for the keys of the list that have a row."""
        asked, tables = self._asked(v), self.index.tables
        count = asked.counts
        many = len(self._numbers)
        common = (self.anchor, tables, self.tiers, v.values, v.slots, asked.lost, asked.lost_of, count)
        return [
            Launch(
                kernels.choose, (many,), (self.anchor, tables, self.tiers, self._numbers, count, v.pinned_from),
                {"SAMPLE": _SAMPLED_BUCKETS}, {"num_warps": 1},
            ),
            self._sweep(
                kernels.take_victims, (self.anchor, tables, self.tiers, self._numbers, count), v, BLOCK=_SWEPT_ENTRIES
            ),
            self._walk(
                kernels.claim_above,
                (*common, v.home_at, v.won_above, self._dummy, v.n, v.held_from), v, BLOCK=_LIST_BLOCK,
            ),
            self._walk(
                kernels.seat,
                (*common, v.home_at, v.won_above, *self._seated(v), v.n, v.stamp),
                v, BLOCK=_LIST_BLOCK,
            ),
        ]  # fmt: skip

    def settle(self, v: Any, place: bool) -> Launch:
        """Slots of all items of the list; what is used in place is known to be."""
        asked = self._asked(v)
        return self._walk(
            kernels.settle,
            (
                self.anchor, self.index.tables, self.tiers, v.values, v.slots, asked.lost, asked.lost_of, asked.counts,
                v.home_at, v.won_above, v.n, v.stamp,
            ),
            v, PLACE=place, BLOCK=_LIST_BLOCK,
        )  # fmt: skip

    def pin(self, v: Any) -> Launch:
        """Stamp the rows below of the list."""
        return self._walk(kernels.pin, (self.anchor, self._asked(v).counts, v.home_at, v.stamp), v, BLOCK=_LIST_BLOCK)

    def move(self, v: Any, births: Callable[[int, Mapping[str, Any]], Launch] | None) -> list[Launch]:
        """Rows up and down; `births` makes the launch that writes a family's first rows, given what rows are like."""
        asked, storage = self._asked(v), self._storage
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
            held, warps = (self.anchor, storage.slabs, storage.homes), 4 if words <= _MOVED_WORDS else 8
            if births is not None:
                launches.append(births(family, shape))
            rehomed = {name: shape[name] for name in ("FLAGS_AT", "SLAB_BITS", "ROW_WORDS")}
            rehomed |= {"AGES": self._tells_ages, "BLOCK": _LIST_BLOCK}
            launches += [
                Launch(
                    moves.step_aside, (v.walkers,),  # most often there is none, and the list must be walked
                    (*held, self._below.tables, self.tiers, *self._seated(v), family), shape, {"num_warps": warps},
                ),
                self._walk(
                    moves.rehome,
                    (*held, self._below.tables, self.tiers, *self._seated(v), family, v.pinned_from), v, **rehomed,
                ),
                Launch(
                    moves.exchange, (v.movers,), (*held, self._below.tables, *self._seated(v), family), shape,
                    {"num_warps": warps},
                ),
            ]  # fmt: skip
            arguments = (*held, self.index.tables, self.tiers, self._numbers, asked.counts, family)
            launches.append(self._sweep(moves.flush, arguments, v, warps, **shape))
        swept = (self.anchor, self.index.tables, self.tiers, self._numbers, asked.counts)
        return [
            *launches,
            self._sweep(kernels.go_back, (*swept, self._dummy), v, 1, BLOCK=_SWEPT_BUCKETS),
            self._sweep(kernels.clean, swept, v, 1, BLOCK=_SWEPT_BUCKETS),
        ]

    @staticmethod
    def _walk(kernel: Any, arguments: Sequence[Any], v: Any, **constants: Any) -> Launch:
        return Launch(kernel, (v.walkers,), arguments, constants, {"num_warps": 1})

    def _sweep(self, kernel: Any, arguments: Sequence[Any], v: Any, warps: int = 4, **constants: Any) -> Launch:
        """Over all that is above: most often there is nothing to do."""
        return Launch(kernel, (v.sweepers, len(self._numbers)), arguments, constants, {"num_warps": warps})


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
