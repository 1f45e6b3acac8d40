"""How many rows the tables of a group may have, and the room for those that are born.

A step does not ask the device: room is made from what the host knows, which is how many keys there were when it last
heard, and how many have come since. The device's counts come back after the step, and are read once they are there.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shoal import _native
from shoal.config import Dram, Hbm, Table, format_size
from shoal.errors import CapacityError, OutOfMemoryError
from shoal.index.device import BUCKET_BYTES, DeviceIndex
from shoal.storage.hbm import HbmStorage, Layout
from shoal.table.device.cache import UpperTier
from shoal.table.device.counts import Ledger

_UNLIMITED = 2**31 - 1
_BATCHES_AHEAD = 4
_LEAST_GROWTH = 1024  # rows

# What a table without Hbm or Dram among its tiers has of device memory to work in.
_WORKING_BYTES = 64 << 20


def is_tiered(config: Table) -> bool:
    """Whether the table's rows are in host memory, with copies in the device's."""
    return config.tier(Dram) is not None


def has_storage(config: Table) -> bool:
    """Whether the table has a tier that kernels do not reach."""
    return config.tiers is not None and not isinstance(config.tiers[-1], (Hbm, Dram))


def budget_above(config: Table) -> int:
    """Bytes for copies in device memory, of a table whose rows are in host memory."""
    hbm = config.tier(Hbm)
    return 0 if hbm is None else hbm.bytes or 0


def budget_of(config: Table) -> int | None:
    """Bytes that the rows may take in the last tier that kernels reach."""
    tier = config.tier(Dram) or config.tier(Hbm)
    if tier is None:
        return _WORKING_BYTES if config.tiers else None
    return tier.bytes


def last_tier(config: Table) -> str:
    """The name of that tier."""
    return "Dram" if is_tiered(config) else "Hbm"


class DeviceRoom:
    """The budgets of all tables of a group, and the room in their index and storage."""

    def __init__(
        self,
        configs: Sequence[Table],
        families: list[int],
        ledger: Ledger,
        index: DeviceIndex,
        storage: HbmStorage,
        above: UpperTier | None,
    ) -> None:
        self.configs = tuple(configs)
        self.families = families
        self.ledger = ledger
        self.index = index
        self.storage = storage
        self.above = above
        self._budgets = [budget_of(config) for config in configs]
        self._held = [0] * len(self.configs)  # slots of erased rows that leases may hold
        # Most rows that a table may have.
        self._within = [self._rows_within(budget, number) for number, budget in enumerate(self._budgets)]
        self.index.describe(self.families, self._within)
        self._hopeless = [number for number, rows in enumerate(self._within) if rows == 0]
        self.room = _native.Room(self.families, self._within, len(storage.families))
        self._no_memory = False  # for more than the batch at hand

    def layout(self, table: int) -> Layout:
        """The layout of a table's rows."""
        return self.storage.families[self.families[table]].layout

    def _rows_within(self, budget: int | None, number: int) -> int:
        """The most rows that fit a table's budget together with their index."""
        if budget is None:
            return _UNLIMITED
        rows = min(budget // self.layout(number).row_bytes, _UNLIMITED)
        while rows > 0 and (over := self.bytes_of(number, rows) - budget) > 0:
            rows -= max(1, over // (2 * self.layout(number).row_bytes + BUCKET_BYTES))
        return max(rows, 0)

    def bytes_of(self, number: int, rows: int) -> int:
        """Bytes that so many rows of a table take with their index."""
        return rows * self.layout(number).row_bytes + self.index.bytes_for(rows)

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
        # With room for one batch alone the next call would wait too.
        wanted = 1 if self._no_memory else 2
        if self.room.fits(births, wanted):
            return
        self.hear_all()
        if self.room.fits(births, wanted):
            return
        try:
            self._grow(births)
            self._no_memory = False
        except (torch.OutOfMemoryError, OutOfMemoryError):
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
        try:
            self.index.reserve(wanted, self._within)
        finally:  # some may have moved before memory ran out
            self._follow_index()
        for number in wanted:
            room.set_fit(number, self.index.capacity(number))
        for family, new in enumerate(room.new_rows(births, _BATCHES_AHEAD)):
            lacking = room.most(tables + family) + new - room.fit(tables + family)
            if lacking > 0:
                held = self.storage.families[family]
                ahead = held.slots // (4 if held.below else 8)  # host memory is slow to be pinned
                more_rows = min(max(ahead, _LEAST_GROWTH), self._rows_of(family) - held.slots)
                self.storage.grow(family, max(lacking, more_rows))
                self._taken_anew(family)
        if self.above is not None:
            for number in wanted:
                if self.above.has(number):
                    self.above.reserve(number, min(room.fit(number), self._within[number]))

    def _follow_index(self) -> None:
        if self.above is not None:
            self.above.follow()

    def require_room(self, number: int, keys: int, held: bool = True) -> None:
        """Raise CapacityError where a table's budget does not hold so many keys and the slots that leases hold."""
        budget = self._budgets[number]
        if budget is not None and keys > self._within[number] - (self._held[number] if held else 0):
            size = format_size(self.bytes_of(number, keys))
            raise CapacityError(
                f"[table {self.configs[number].name!r}] {keys} rows take {size}; the budget is "
                f"{last_tier(self.configs[number])}({format_size(budget)!r}). Raise it in Table(tiers=), or erase keys "
                f"that are not needed."
            )

    def budget(self, number: int) -> int | None:
        """Bytes that a table's rows may take with their index."""
        return self._budgets[number]

    def held_slots(self, number: int) -> int:
        """Slots of erased rows that leases may hold."""
        return self._held[number]

    def capacity(self, number: int) -> int | None:
        """Most rows that a table may have, if that is known."""
        return None if self._budgets[number] is None else self._within[number]

    def _require_budget(self, number: int, keys: int) -> None:
        budget = self._budgets[number]
        if keys and budget is not None:
            least = format_size(self.bytes_of(number, 1))
            raise CapacityError(
                f"[table {self.configs[number].name!r}] a row and its index take {least}; the budget is "
                f"{last_tier(self.configs[number])}({format_size(budget)!r}). Raise it in Table(tiers=)."
            )
