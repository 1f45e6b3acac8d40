"""The rows of a group's tables that kernels reach: index, storage and what the kernels keep count of. A table with
Dram among its tiers has both in host memory, and above it copies of the rows that are used: see cache.py. Rows that
kernels do not reach are in a lower tier: see residency.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from shoal import _native, optim
from shoal.config import Constant, Normal, Table, Uniform, Zeros
from shoal.config.dtypes import WEIGHTS
from shoal.index.arguments import Batch, Finding, FoundLists, Lost, Tiering
from shoal.index.device import DeviceIndex, finding_grids
from shoal.ops.arguments import I32, Int, Pointer, Variable, lengths, variables
from shoal.ops.birth import triton as first_row_kernels
from shoal.ops.launch import Fill, Launch, Pieces, Programs, Scratch, blocks, power_of_two
from shoal.ops.library.tables import MOST_ROWS
from shoal.ops.library.uses import use_of
from shoal.ops.update.apply import COUNT_COLUMNS
from shoal.storage.hbm import HbmStorage, Layout
from shoal.storage.pinned import pinned_bytes
from shoal.table.device.arguments import Bear, Birth, FirstRows
from shoal.table.device.cache import UpperTier
from shoal.table.device.counts import Ledger
from shoal.table.device.kernels import birth as birth_kernels
from shoal.table.device.kernels import move as moves
from shoal.table.device.room import DeviceRoom, budget_above, budget_of, has_storage, is_tiered
from shoal.table.device.stamps import NO_BATCH, Stamps

_KINDS = {Zeros: first_row_kernels.ZEROS, Constant: first_row_kernels.CONSTANT, Uniform: first_row_kernels.UNIFORM}
TRITON_TYPES: dict[str, Any] = {name: getattr(triton.language, name) for name in WEIGHTS}
_BIRTH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def signed(word: int) -> int:
    """A 64-bit word as torch stores it."""
    return word - 2**64 if word >= 2**63 else word


class FreeSlots(NamedTuple):
    """By family, the slots that no row has, and how many they are."""

    free: tuple[I32, ...]
    supply: tuple[Int, ...]


class InsertCall(NamedTuple):
    """What a call brings that inserts keys of one table."""

    free: FreeSlots
    batch: Batch
    lists: FoundLists
    tables_of: I32


@dataclass(frozen=True)
class Pins:
    """Which rows are in use: those with the stamp of the `oldest` batch at work or on its way, or a later one. `held`:
    of the oldest at work. `stamp`: of this one. For as long as the group's lock is held: stamps may begin anew."""

    number: int = 0  # the batch's
    stamp: int = 0
    oldest: int = 0
    held: int = 0


class DeviceRows(DeviceRoom):
    """Index and rows of all tables of a group."""

    def __init__(self, configs: Sequence[Table], seed: int, device: torch.device, slab_bits: int = 15) -> None:
        self.device = device
        layouts: list[Layout] = []
        below: list[bool] = []  # by family, whether its rows are in host memory
        families: list[int] = []
        kinds: list[Any] = []
        for config in configs:
            layout = Layout(config.format, whole=is_tiered(config))
            # Tables with a budget are apart: once their family has all the slots it may, it needs no more.
            kind = (layout, optim.kernel_of(config.optimizer), budget_of(config) is not None, is_tiered(config))
            if kind not in kinds:
                kinds.append(kind)
                layouts.append(layout)
                below.append(is_tiered(config))
            families.append(kinds.index(kind))
        tables = len(configs)
        ledger = Ledger(tables, len(layouts), device)
        # By table: keys looked up and missed, backwards skipped; where there are tiers, keys that were not above. And
        # keys that are gone, erased or replaced.
        self.tally = torch.zeros(4, tables, dtype=torch.int64, device=device)
        self.uncounted = torch.zeros(tables, dtype=torch.int64, device=device)  # for finds that are not counted
        self._gone = [0] * tables
        self._holes = [0] * tables  # most that erased and refused keys left since the index was built
        self.anchor = torch.zeros(128, dtype=torch.int32, device=device)
        tiered = {number: config for number, config in enumerate(configs) if is_tiered(config)}
        index = DeviceIndex(self.anchor, tables, dict.fromkeys(tiered, partial(pinned_bytes, device=device)))
        storage = HbmStorage(self.anchor, layouts, below, ledger.taken, slab_bits)
        above = {number: budget_above(config) for number, config in tiered.items()}
        self.tiered = frozenset(tiered)
        self.deep = frozenset(number for number, config in enumerate(configs) if has_storage(config))
        tells_ages = bool(self.deep & self.tiered)
        upper = UpperTier(index, storage, families, above, tells_ages) if tiered else None
        super().__init__(configs, families, ledger, index, storage, upper)
        # Tells the batches whose rows are in use, those on their way too or not; its group knows.
        self.at_work: Callable[[bool], Sequence[int]] = lambda _coming: ()
        self.stamps = Stamps()
        self.steps = torch.zeros(tables, dtype=torch.int64, device=device)
        self.inits, self.scales = self._initialisers(seed)
        self.normal = _native.normal_table().to(device)
        self.has_normal = any(isinstance(config.init, Normal) for config in configs)
        self._programs = Programs()
        self.scratch = Scratch(device)  # for what inserts, which has the tables to itself

    def _initialisers(self, seed: int) -> tuple[Tensor, Tensor]:
        inits, scales = [], []
        for config in self.configs:
            name = _native.name_hash(config.name)
            init = config.init
            kind = _KINDS.get(type(init), first_row_kernels.NORMAL).value
            births = _native.birth_stream(seed, name)
            inits.append([kind, signed(births), signed(_native.rounding_stream(seed, name))])
            match init:
                case Uniform(low, high):
                    scales.append([low, high - low])
                case Normal(mean, std):
                    scales.append([mean, std])
                case Constant(value):
                    scales.append([value, 0.0])
                case _:
                    scales.append([0.0, 0.0])
        return (
            torch.tensor(inits, dtype=torch.int64).to(self.device),
            torch.tensor(scales, dtype=torch.float32).to(self.device),
        )

    def not_above(self, number: int) -> int:
        """Keys that were looked up and had no copy above."""
        return int(self.tally[3, number])

    def births_of(self, number: int) -> int:
        """How many rows of a table were born."""
        return int(self.ledger.keys[number]) + self._gone[number]

    def counted(self, number: int) -> dict[str, int]:
        """What the device counted about a table since it was made."""
        looked, missed, backwards, not_above = self.tally[:, number].tolist()
        if not is_tiered(self.configs[number]):  # counted where other tables have tiers
            missed += not_above
        births = self.births_of(number)
        dropped, skipped = self.ledger.left_out[2 * number : 2 * number + 2].tolist()
        return {
            "lookups": looked,
            "hits": looked - missed,
            "births": births,
            "dropped_gradients": dropped,
            "skipped_rows": skipped,
            "skipped_backwards": backwards,
        }

    # ---- keys

    def pin(self) -> Pins:
        """For a batch whose rows must not move until its backward, if one follows. REQUIRES: the group is alone."""
        number = self.stamps.number()
        if self.stamps.are_used_up(number):
            self.restamp()
            number = self.stamps.number()
        return self.pins_of(number)

    def pins_of(self, number: int) -> Pins:
        """For the batch of that number, as others are at work now."""
        stamp, held, oldest = self.stamps.of(number), self.oldest_at_work(False), self.oldest_at_work(True)
        return Pins(number, stamp, min(oldest or stamp, stamp), held or NO_BATCH)

    def pins_at_work(self, pins: Pins) -> Pins:
        """The same, where batches that are only on their way do not count."""
        held = self.oldest_at_work(False) or NO_BATCH
        return Pins(pins.number, pins.stamp, min(held, pins.stamp), held)

    def oldest_at_work(self, coming: bool) -> int | None:
        """The least stamp of batches whose rows are in use; with `coming`, also of those on their way."""
        return min(map(self.stamps.of, self.at_work(coming)), default=None)

    def restamp(self) -> None:
        """Let stamps begin anew. Rows in use stay so; it is forgotten which of the others were used last.
        REQUIRES: the group is alone."""
        firsts = torch.tensor(self.stamps.begin_anew(self.at_work(True)), dtype=torch.int32).to(self.device)
        self.index.restamp(firsts)
        if self.above is not None:
            self.above.restamp(firsts)

    def free_slots(self) -> FreeSlots:
        """Each family's free slots, and how many they are."""
        free = tuple(family.free for family in self.storage.families)
        return FreeSlots(free, tuple(one.numel() for one in free))

    def batch(
        self, values: Tensor, offsets: Tensor, slots: Tensor, batch: int, slot_lists: int, stamp: int = 0
    ) -> Batch:
        """What a call brings of a batch."""
        n = values.numel()
        return Batch(n, batch, *finding_grids(n, slot_lists), stamp, values, offsets, slots)

    def found_lengths(self, total: int, insert: bool) -> FoundLists:
        """How long the counts and lists are for so many items."""
        most = total if insert else 0
        return lengths(FoundLists, counts=3 + len(self.storage.families), lost=most, lost_of=most, won_at=most)

    def find(
        self, free: FreeSlots, finding: Finding, tables_of: Tensor | Variable, shape: tuple[int, int], insert: bool,
        features_of: Pointer | None = None, count: bool = False, rows: bool = True, tickets: Pointer | None = None,
        stamped: bool = False,
    ) -> list[Launch | Fill]:  # fmt: skip
        """Slots of a batch; where `insert`, keys that have no row get one; where `count`, tables count it.

        After the index's own, `counts` has one for each family. Where not `rows`, slots are given out, and their rows
        are left as they are. `tickets` gets that of items in no bag. Of tables with tiers: the slots below. Where
        `stamped`, keys that are found are.
        """
        counted = (self.tally[0], self.tally[1], self.ledger.bad_batches) if count else None
        launches: list[Launch | Fill] = [
            Fill(finding.lists.counts, 1 + len(self.storage.families), 0),
            self.index.find(finding, tables_of, shape, insert, features_of, counted, stamped, tickets),
        ]
        return [*launches, *self._insert(free, finding, [rows] * len(self.storage.families))] if insert else launches

    @property
    def _above(self) -> UpperTier:
        assert self.above is not None
        return self.above

    def find_in_tiers(
        self, free: FreeSlots, t: Tiering, tables_of: Tensor, shape: tuple[int, int], insert: bool, place: bool,
        keep: bool, features_of: Pointer | None, tickets: Pointer | None,
    ) -> list[Launch | Fill]:  # fmt: skip
        """The same where tables have tiers, counted. Where `place`, rows come up; where `keep`, they stay where they
        are until the batch's backward."""
        above, finding = self._above, Finding(t.batch, t.found)
        counted = (self.tally[0], self.tally[3], self.ledger.bad_batches)
        launches: list[Launch | Fill] = [
            Fill(t.found.counts, 3 + len(self.storage.families), 0),
            above.find(t, tables_of, shape, features_of, counted, place or keep, tickets),
            above.find_below(t, self.tally[1], insert, place, keep),
        ]
        if insert:
            launches += self._insert(free, finding, [not family.below for family in self.storage.families])
        if place:
            launches += above.place(t)
        if place or keep:
            launches.append(above.settle(t, place))
        if place:
            launches += above.move(t, partial(self._bear, finding) if insert else None)
        return launches

    def place_ahead(self, t: Tiering, tables_of: Tensor, shape: tuple[int, int]) -> list[Launch | Fill]:
        """Rows of a batch that will be looked up come up, where tables have tiers."""
        above = self._above
        return [
            Fill(t.found.counts, 3 + len(self.storage.families), 0),
            above.find(t, tables_of, shape, None, None, stamped=True, tickets=None),
            above.find_below(t, self.uncounted, insert=False, place=True, keep=False),
            *above.place(t),
            *above.move(t, None),
        ]

    def _insert(self, free: FreeSlots, finding: Finding, rows: Sequence[bool]) -> list[Launch]:
        births = [self._birth(free, finding, family, own) for family, own in enumerate(rows)]
        return [self.index.claim(finding, self.ledger.refused), *births, self.index.find_lost(finding)]

    def _born(self, family: int) -> dict[str, Any]:
        """What a kernel that gives birth is compiled with."""
        layout = self.storage.families[family].layout
        return {
            "WEIGHTS": TRITON_TYPES[layout.dtype],
            "WEIGHT_BYTES": layout.weight_type.itemsize,
            "HAS_NORMAL": self.has_normal,
            "SLAB_BITS": self.storage.slab_bits,
            "DIM": layout.dim,
            "D": power_of_two(layout.dim),
            "STATE": layout.state_floats,
            "S": power_of_two(max(layout.state_floats, 1)),
        }

    def _first_rows_of(self, family: int) -> FirstRows:
        return FirstRows(self.inits, self.scales, self.storage.families[family].first_state, self.normal)

    def _birth(self, free: FreeSlots, finding: Finding, family: int, rows: bool) -> Launch:
        born, layout = self._born(family), self.storage.families[family].layout
        batch, lists = finding
        arguments = Birth(
            anchor=self.anchor,
            slabs=self.storage.slabs,
            tables=self.index.tables,
            first_rows=self._first_rows_of(family),
            values=batch.values,
            slots=batch.slots,
            lost=Lost(lists.lost, lists.lost_of, lists.counts),
            won_at=lists.won_at,
            free=free.free[family],
            supply=free.supply[family],
            taken=self.ledger.taken[family:],
            counts=self.ledger.keys,
            refused=self.ledger.refused,
            steps=self.steps,
            n=batch.n,
            family=family,
            weight_stride=layout.weight_stride,
            tail_stride=layout.tail_stride,
            stamp=batch.stamp,
        )
        constants = {**born, "BLOCK": max(1, min(128, 4096 // max(born["D"], born["S"]))), "ROWS": rows}
        return Launch(birth_kernels.birth, (batch.walkers,), arguments, constants, _BIRTH_OPTIONS)

    def _bear(self, finding: Finding, family: int, shape: Mapping[str, Any]) -> Launch:
        """First rows of keys that were born below, wherever their slots are."""
        layout = self.storage.families[family].layout
        batch, lists = finding
        arguments = Bear(
            anchor=self.anchor,
            slabs=self.storage.slabs,
            homes=self.storage.homes,
            tables=self.index.tables,
            tiers=self._above.tiers,
            first_rows=self._first_rows_of(family),
            steps=self.steps,
            values=batch.values,
            slots=batch.slots,
            lost=Lost(lists.lost, lists.lost_of, lists.counts),
            won_at=lists.won_at,
            n=batch.n,
            family=family,
            weight_stride=layout.weight_stride,
            tail_stride=layout.tail_stride,
        )
        return Launch(moves.bear, (batch.walkers,), arguments, {**self._born(family), **shape}, _BIRTH_OPTIONS)

    def first_rows(self, table: int, keys: Tensor) -> Tensor:
        """The rows that keys are born with, float32 [n, dim]."""
        dim = self.configs[table].dim
        out = torch.empty(len(keys), dim, dtype=torch.float32, device=self.device)
        if len(keys):
            d = power_of_two(dim)
            block = max(1, min(32, 4096 // d))
            first_row_kernels.first_rows[(blocks(len(keys), block),)](
                self.inits, self.scales, self.normal, table, keys, out, len(keys), dim,
                HAS_NORMAL=self.has_normal, D=d, BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def upsert(self, table: int, keys: Tensor, rows: bool = True, stamp: int = 0) -> Tensor:
        """Slots of distinct keys of one table; those without a row are born, or, where not `rows`, get a slot for one.
        New keys are stamped."""
        by_table = [0] * len(self.configs)
        by_table[table] = len(keys)
        self.make_room(self.room.births(by_table))
        return self.insert(table, keys, rows, stamp)

    def insert(self, table: int, keys: Tensor, rows: bool = True, stamp: int = 0) -> Tensor:
        """The same. REQUIRES: room was made."""
        n = len(keys)
        offsets = torch.tensor([0, n], dtype=torch.int64).to(self.device)
        tables_of = torch.tensor([[use_of(table, trains=True)]], dtype=torch.int32).to(self.device)
        slots = torch.empty(n, dtype=torch.int32, device=self.device)
        v = variables(InsertCall, len(self.storage.families))
        program = self._programs.of(
            ("insert", keys.data_ptr() % 16, rows),
            True,
            lambda: self.find(v.free, Finding(v.batch, v.lists), v.tables_of, (1, 1), insert=True, rows=rows),
        )
        space = self.scratch.take(Pieces(self.found_lengths(n, insert=True)))
        batch = self.batch(keys, offsets, slots, 1, 1, stamp)
        program.run(InsertCall(self.free_slots(), batch, space.as_(FoundLists), tables_of))
        return slots

    def find_rows(self, table: int, keys: Tensor) -> Tensor:
        """The slot of each key's row, -1 where it has none: of its copy above, if there is one."""
        slots = self.index.find_keys(table, keys)
        if self.above is not None and self.above.has(table):
            above = self.above.find_keys(table, keys)
            slots = torch.where(above >= 0, above, slots)
        return slots

    def erase(self, table: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Take distinct keys out; returns the slots that they had, and those of their copies above. Waits for the
        device."""
        slots = self.index.erase(table, keys)
        slots = slots[slots >= 0]
        copies = slots[:0]
        if self.above is not None and self.above.has(table):
            copies = self.above.erase(table, keys)
        self.ledger.keys[table] -= len(slots)
        self._gone[table] += len(slots)
        self.tidy(table, len(slots))
        return slots, copies

    def returned(self, table: int, keys: int) -> None:
        """So many keys that got a slot were not born: they came back from a lower tier, or were loaded."""
        self._gone[table] -= keys

    def tidy(self, table: int, gone: int) -> None:
        """Build a table's index anew once as many keys are gone from it, or were refused, as half of what it holds."""
        self._holes[table] += gone
        if 2 * self._holes[table] > self.index.capacity(table):
            self.index.rebuild(table)
            self._follow_index()
            self._holes[table] = 0

    def hold(self, table: int, slots: int) -> None:
        """Count slots of erased rows that leases may hold against the table's budget; less than 0: no longer."""
        self._held[table] += slots
        if self._budgets[table] is not None:
            self.room.lower(table, slots)
            self.index.tables[table, MOST_ROWS.value] -= slots
            self.hear_all()  # as the erased keys would count twice, there and among the rows

    def give(self, table: int, slots: Tensor, copies: Tensor) -> None:
        """Free the slots of erased rows, and of their copies above."""
        family = self.families[table]
        free_copies = None if self.above is None else self.above.giving(table, copies)
        self.storage.give(family, slots)
        if free_copies is not None:
            free_copies()
        self._relisted(family)

    def _relisted(self, family: int) -> None:
        # What is on its way to the host was counted against the list before.
        self.hear_all()
        self._taken_anew(family)

    def clear(self, table: int) -> None:
        """Forget all rows of a table."""
        _keys, slots = self.index.entries(table)
        self.index.clear(table)
        self._follow_index()
        if self.above is not None and self.above.has(table):
            self.above.clear(table)
        self.room.set_fit(table, 0)
        self.ledger.keys[table] = 0
        self._gone[table] += len(slots)
        self.give(table, slots, slots[:0])

    @property
    def update_counts(self) -> Tensor:
        """By table: gradients dropped, rows skipped."""
        assert COUNT_COLUMNS.value == 2
        return self.ledger.left_out
