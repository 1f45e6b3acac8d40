"""The rows of a group's tables in device memory: index, storage and what the kernels keep count of.

Nothing that a step does asks the device anything. Room is made from what the host knows: how many keys there were when
it last heard, and how many came since. What the device counted comes back behind the step, and is read once it is
there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from shoal import _native
from shoal.config import Constant, Hbm, Normal, Table, Uniform, Zeros, format_size
from shoal.errors import CapacityError
from shoal.index.device import BUCKET_BYTES, EVICTING, FINDING, NOT_WON, DeviceIndex, finding_grids
from shoal.ops.apply.triton import COUNT_COLUMNS
from shoal.ops.birth import triton as birth_kernels
from shoal.ops.find.triton import MOST_ROWS
from shoal.ops.launch import Fill, Launch, Pieces, Programs, Scratch, Space, Variable, blocks, power_of_two, variables
from shoal.ops.rows import triton as row_kernels
from shoal.storage.hbm import HbmStorage, Layout
from shoal.table.ledger import Ledger

_KINDS = {Zeros: birth_kernels.ZEROS, Constant: birth_kernels.CONSTANT, Uniform: birth_kernels.UNIFORM}
TRITON_TYPES = {
    "float32": triton.language.float32,
    "float16": triton.language.float16,
    "bfloat16": triton.language.bfloat16,
}
_UNLIMITED = 2**31 - 1
_BATCHES_AHEAD = 4
_LEAST_GROWTH = 1024  # rows


def _budget(config: Table) -> int | None:
    hbm = config.tier(Hbm)
    return None if hbm is None else hbm.bytes


def signed(word: int) -> int:
    """A 64-bit word as torch stores it."""
    return word - 2**64 if word >= 2**63 else word


class DeviceRows:
    """Index and rows of all tables of a group."""

    def __init__(self, configs: Sequence[Table], seed: int, device: torch.device, slab_bits: int = 15) -> None:
        self.configs = tuple(configs)
        self.device = device
        layouts: list[Layout] = []
        self.families: list[int] = []
        kinds: list[Any] = []
        for config in configs:
            layout = Layout(config.dim, config.dtype, config.columns)
            # Tables with a budget are apart: once their family has all the slots it may, it needs no more.
            duplicates = getattr(config.optimizer, "duplicates", None)
            kind = (layout, type(config.optimizer), duplicates, _budget(config) is not None)
            if kind not in kinds:
                kinds.append(kind)
                layouts.append(layout)
            self.families.append(kinds.index(kind))
        tables = len(configs)
        self.ledger = Ledger(tables, len(layouts), device)
        # By table: keys looked up and missed, backwards skipped; and keys that are gone, erased or replaced.
        self.tally = torch.zeros(3, tables, dtype=torch.int64, device=device)
        self._gone = [0] * tables
        self._holes = [0] * tables  # most that erased and refused keys left since the index was built
        self.anchor = torch.zeros(128, dtype=torch.int32, device=device)
        self.index = DeviceIndex(self.anchor, tables)
        self.storage = HbmStorage(self.anchor, layouts, self.ledger.taken, slab_bits)
        self.steps = torch.zeros(tables, dtype=torch.int64, device=device)
        self.inits, self.scales = self._initialisers(seed)
        self.normal = _native.normal_table().to(device)
        self.has_normal = any(isinstance(config.init, Normal) for config in configs)
        self._budgets = [_budget(config) for config in configs]
        self._held = [0] * tables  # slots of erased rows that leases may hold
        # Most rows that a table may have.
        self._within = [self._rows_within(budget, number) for number, budget in enumerate(self._budgets)]
        self.index.describe(self.families, self._within)
        self._hopeless = [number for number, rows in enumerate(self._within) if rows == 0]
        self.room = _native.Room(self.families, self._within, len(layouts))
        self._no_memory = False  # for more than the batch at hand
        self._programs = Programs()
        self.scratch = Scratch(device)  # for what inserts, which has the tables to itself

    def _initialisers(self, seed: int) -> tuple[Tensor, Tensor]:
        inits, scales = [], []
        for config in self.configs:
            name = _native.name_hash(config.name)
            init = config.init
            kind = _KINDS.get(type(init), birth_kernels.NORMAL).value
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

    def layout(self, table: int) -> Layout:
        """The layout of a table's rows."""
        return self.storage.families[self.families[table]].layout

    def _rows_within(self, budget: int | None, number: int) -> int:
        """The most rows that fit a table's budget together with their index."""
        if budget is None:
            return _UNLIMITED
        rows = min(budget // self.layout(number).row_bytes, _UNLIMITED)
        while rows > 0 and (over := self._bytes_of(number, rows) - budget) > 0:
            rows -= max(1, over // (2 * self.layout(number).row_bytes + BUCKET_BYTES))
        return max(rows, 0)

    def _bytes_of(self, number: int, rows: int) -> int:
        return rows * self.layout(number).row_bytes + self.index.bytes_for(rows)

    # ---- room

    def make_room(self, births: _native.Births) -> None:
        """Room for new keys. Waits for the device only where what is known is not enough."""
        for number in self._hopeless:
            self._require_budget(number, births.of(number))
        if not self.room.take(births):
            self._make_more_room(births)
            self.room.add(births)

    def _make_more_room(self, births: _native.Births) -> None:
        self.hear()
        if self.room.fits(births):
            return
        # Copies that are on their way, oldest first: waiting for the newest would let the device run dry.
        while not self.room.fits(births) and self.hear(wait=True) is not None:
            pass
        # Who waits for one batch would wait for the next one too.
        wanted = 1 if self._no_memory else 2
        if self.room.fits(births, wanted):
            return
        self.hear_all()
        if self.room.fits(births, wanted):
            return
        try:
            self._grow(births)
            self._no_memory = False
        except torch.OutOfMemoryError:
            self._no_memory = True
            if not self.room.fits(births):
                raise

    def sent(self) -> None:
        """Know that a copy of the ledger is on its way."""
        self.ledger.sent += 1
        self.room.sent(self.ledger.sent, self.ledger.copies)

    def hear(self, wait: bool = False) -> np.ndarray | None:
        """Read what the device counted, if it is there; with `wait`, the oldest that is on its way at least."""
        heard = self.ledger.hear(wait)
        return None if heard is None else self._know(*heard)

    def hear_all(self) -> np.ndarray:
        """Read what the device has counted once all is done that was launched."""
        self.room.sent(self.ledger.sent + 1, self.ledger.copies)
        return self._know(*self.ledger.hear_all())

    def _know(self, number: int, counted: np.ndarray) -> np.ndarray:
        self.room.heard(number, torch.from_numpy(counted))
        return counted

    def _taken_anew(self, family: int) -> None:
        """The family's list of free slots is a new one."""
        at = len(self.configs) + family
        self.room.recount(at)
        self.room.set_fit(at, self.storage.supply(family))
        self.room.set_whole(family, self.storage.families[family].slots >= self._rows_of(family))

    def _rows_of(self, family: int) -> int:
        """Most rows that a family's tables may have."""
        return sum(self._within[number] for number, other in enumerate(self.families) if other == family)

    def _grow(self, births: _native.Births) -> None:
        # Beyond this batch, room for some like it: so far may the host be ahead of the device without waiting.
        tables, room = len(self.configs), self.room
        wanted = {}
        for number, within in enumerate(self._within):
            if new := _BATCHES_AHEAD * births.of(number):
                wanted[number] = min(room.most(number) + new, within)
        self.index.reserve(wanted, self._within)
        for number in wanted:
            room.set_fit(number, self.index.capacity(number))
        for family, new in enumerate(room.new_rows(births, _BATCHES_AHEAD)):
            lacking = room.most(tables + family) + new - room.fit(tables + family)
            if lacking > 0:
                slots = self.storage.families[family].slots
                more_rows = min(max(slots // 8, _LEAST_GROWTH), self._rows_of(family) - slots)
                self.storage.grow(family, max(lacking, more_rows))
                self._taken_anew(family)

    def require_room(self, number: int, keys: int, held: bool = True) -> None:
        """Raise CapacityError where a table's budget does not hold so many keys, beside slots that leases hold."""
        budget = self._budgets[number]
        if budget is not None and keys > self._within[number] - (self._held[number] if held else 0):
            size = format_size(self._bytes_of(number, keys))
            raise CapacityError(
                f"[table {self.configs[number].name!r}] {keys} rows take {size}; the budget is "
                f"Hbm({format_size(budget)!r}). Raise it in Table(tiers=[Hbm(...)]), or erase keys that are not needed."
            )

    def counted(self, number: int) -> dict[str, int]:
        """What the device counted about a table since it was made."""
        looked, missed, backwards = self.tally[:, number].tolist()
        births = int(self.ledger.keys[number]) + self._gone[number]
        dropped, skipped = self.ledger.left_out[2 * number : 2 * number + 2].tolist()
        return {
            "lookups": looked,
            "hits": looked - missed,
            "births": births,
            "dropped_gradients": dropped,
            "skipped_rows": skipped,
            "skipped_backwards": backwards,
        }

    def _require_budget(self, number: int, keys: int) -> None:
        budget = self._budgets[number]
        if keys and budget is not None:
            least = format_size(self._bytes_of(number, 1))
            raise CapacityError(
                f"[table {self.configs[number].name!r}] a row and its index take {least}; the budget is "
                f"Hbm({format_size(budget)!r}). Raise it in Table(tiers=[Hbm(...)])."
            )

    # ---- keys

    @property
    def variables(self) -> tuple[str, ...]:
        """What `find` wants of its caller: each family's free slots and how many they are, and FINDING."""
        families = range(len(self.storage.families))
        return (*(f"free{family}" for family in families), *(f"supply{family}" for family in families), *FINDING)

    def values(
        self, values: Tensor, offsets: Tensor, slots: Tensor, space: Space, batch: int, copies: int, stamp: int = 0
    ) -> list[Tensor | Space | int]:
        """Their values; `space` begins with `finding_pieces`."""
        n = values.numel()
        free = [family.free for family in self.storage.families]
        supplies = [one.numel() for one in free]
        return [*free, *supplies, n, batch, *finding_grids(n, copies), stamp, values, offsets, slots, space]

    def finding_pieces(self, total: int, insert: bool) -> list[tuple[torch.dtype, int]]:
        """Counts and lists for so many items."""
        most = total if insert else 0
        lists = [(torch.int32, most), (torch.int32, most), (torch.int64, most)]
        return [(torch.int32, 1 + len(self.storage.families)), *lists]

    def find(
        self,
        v: Any,
        tables_of: Tensor | Variable,
        shape: tuple[int, int],
        insert: bool,
        features_of: Variable | None = None,
        count: bool = False,
        evict: bool = False,
        rows: bool = True,
        tickets: Variable | None = None,
    ) -> list[Launch | Fill]:
        """Slots of a batch; where `insert`, keys that have no row get one; where `count`, tables count it.

        Behind the index's own, `counts` has one for each family. Where `evict`, keys are stamped, and those without a
        row take the slots of others; `v` then has the variables of EVICTING too. Where not `rows`, slots are given out,
        and their rows are left as they are. `tickets` gets that of items in no bag.
        """
        counted = (self.tally, self.ledger.bad_bags) if count else None
        launches: list[Launch | Fill] = [
            Fill(v.counts, 1 + len(self.storage.families), 0),
            self.index.find(v, tables_of, shape, insert, features_of, counted, evict, tickets),
        ]
        if insert:
            take = self.index.evict if evict else self.index.claim
            births = [self._birth(v, family, evict, rows) for family in range(len(self.storage.families))]
            launches += [take(v, self.ledger.refused), *births, self.index.find_lost(v)]
        return launches

    def _birth(self, v: Any, family: int, evict: bool, rows: bool) -> Launch:
        held = self.storage.families[family]
        layout = held.layout
        d = power_of_two(layout.dim)
        s = power_of_two(max(layout.state_floats, 1))
        return Launch(
            birth_kernels.birth,
            (v.walkers,),
            (
                self.anchor, self.storage.slabs, self.index.tables, self.inits, self.scales, held.first_state,
                self.normal, v.values, v.slots, v.lost, v.lost_of, v.counts, v.won_at,
                v.won_slots if evict else v.lost,
                getattr(v, f"free{family}"), getattr(v, f"supply{family}"), self.ledger.taken[family:],
                self.ledger.keys, self.ledger.refused, self.steps,
                v.n, family, layout.weight_stride, layout.tail_stride, v.stamp,
            ),
            {
                "WEIGHTS": TRITON_TYPES[layout.dtype],
                "WEIGHT_BYTES": layout.weight_type.itemsize,
                "HAS_NORMAL": self.has_normal,
                "SLAB_BITS": self.storage.slab_bits,
                "DIM": layout.dim,
                "D": d,
                "STATE": layout.state_floats,
                "S": s,
                "BLOCK": max(1, min(128, 4096 // max(d, s))),
                "EVICT": evict,
                "ROWS": rows,
            },
            {"num_warps": 4, "enable_fp_fusion": False},
        )  # fmt: skip

    def first_rows(self, table: int, keys: Tensor) -> Tensor:
        """The rows that keys are born with, float32 [n, dim]."""
        dim = self.configs[table].dim
        out = torch.empty(len(keys), dim, dtype=torch.float32, device=self.device)
        if len(keys):
            d = power_of_two(dim)
            block = max(1, min(32, 4096 // d))
            row_kernels.first_rows[(blocks(len(keys), block),)](
                self.inits, self.scales, self.normal, table, keys, out, len(keys), dim,
                HAS_NORMAL=self.has_normal, D=d, BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def upsert(self, table: int, keys: Tensor) -> Tensor:
        """Slots of distinct keys of one table; those without a row are born."""
        by_table = [0] * len(self.configs)
        by_table[table] = len(keys)
        self.make_room(self.room.births(by_table))
        return self.insert(table, keys)

    def insert(self, table: int, keys: Tensor) -> Tensor:
        """The same. REQUIRES: room was made."""
        n = len(keys)
        offsets = torch.tensor([0, n], dtype=torch.int64).to(self.device)
        tables_of = torch.tensor([[4 * table + 1]], dtype=torch.int32).to(self.device)
        slots = torch.empty(n, dtype=torch.int32, device=self.device)
        v = variables(*self.variables, "tables_of")
        program = self._programs.of(
            ("insert", keys.data_ptr() % 16), True, lambda: self.find(v, v.tables_of, (1, 1), insert=True)
        )
        space = self.scratch.take(Pieces(*self.finding_pieces(n, insert=True)))
        program.run(*self.values(keys, offsets, slots, space, 1, 1), tables_of)
        return slots

    def insert_evicting(self, table: int, keys: Tensor, stamp: int, pinned_from: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of a table's keys, which are stamped; those without a row take the slots of keys stamped longest ago.

        Returns also the keys that gave up their slots, and these. A key finds none (-1) where all that are near it are
        stamped with `pinned_from` or more. Waits for the device.
        """
        n = len(keys)
        offsets = torch.tensor([0, n], dtype=torch.int64).to(self.device)
        tables_of = torch.tensor([[4 * table + 1]], dtype=torch.int32).to(self.device)
        slots = torch.empty(n, dtype=torch.int32, device=self.device)
        v = variables(*self.variables, *EVICTING, "tables_of")
        program = self._programs.of(
            ("evict", keys.data_ptr() % 16), True, lambda: self.find(v, v.tables_of, (1, 1), insert=True, evict=True)
        )
        space = self.scratch.take(Pieces(*self.finding_pieces(n, insert=True), (torch.int32, n), (torch.int64, n)))
        program.run(*self.values(keys, offsets, slots, space, 1, 1, stamp), pinned_from, tables_of)
        counts, _lost, _lost_of, won_at, won_slots, victims = space.tensors()
        won = torch.nonzero(won_at[: int(counts[0])] != NOT_WON)[:, 0]
        self._gone[table] += len(won)
        return slots, victims[won], won_slots[won]

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Take distinct keys out; returns the slots that they had. Waits for the device."""
        slots = self.index.erase(table, keys)
        slots = slots[slots >= 0]
        self.ledger.keys[table] -= len(slots)
        self._gone[table] += len(slots)
        self.tidy(table, len(slots))
        return slots

    def tidy(self, table: int, gone: int) -> None:
        """Build a table's index anew once as many keys are gone from it, or were refused, as half of what it holds."""
        self._holes[table] += gone
        if 2 * self._holes[table] > self.index.capacity(table):
            self.index.rebuild(table)
            self._holes[table] = 0

    def hold(self, table: int, slots: int) -> None:
        """Count slots of erased rows that leases may hold against the table's budget; less than 0: no longer."""
        self._held[table] += slots
        if self._budgets[table] is not None:
            self.room.lower(table, slots)
            self.index.tables[table, MOST_ROWS.value] -= slots
            self.hear_all()  # as the erased keys would count twice, there and among the rows

    def give(self, table: int, slots: Tensor) -> None:
        """Free the slots of erased rows."""
        family = self.families[table]
        self.storage.give(family, slots)
        self._relisted(family)

    def _relisted(self, family: int) -> None:
        # What is on its way to the host was counted against the list before.
        self.hear_all()
        self._taken_anew(family)

    def clear(self, table: int) -> None:
        """Forget all rows of a table."""
        _keys, slots = self.index.entries(table)
        self.index.clear(table)
        self.room.set_fit(table, 0)
        self.ledger.keys[table] = 0
        self._gone[table] += len(slots)
        self.give(table, slots)

    @property
    def update_counts(self) -> Tensor:
        """By table: gradients dropped, rows skipped."""
        assert COUNT_COLUMNS.value == 2
        return self.ledger.left_out
