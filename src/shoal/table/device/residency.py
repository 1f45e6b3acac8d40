"""Which rows of a table are where kernels reach them, and which are in the lower tier alone, which the host asks.

Rows are brought before a batch is looked up, and leave when others need their place: the host chooses them, writes the
changed ones, and then takes them out. Until they are written they stay, so no row is ever in no place.
"""

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Table, format_size
from shoal.errors import CapacityError
from shoal.metrics import Counters
from shoal.storage import Answer
from shoal.storage.hbm import CHANGED_FLAG, UNSAVED_FLAG
from shoal.table.changes import Changes
from shoal.table.device.missing import Missing
from shoal.table.device.room import last_tier
from shoal.table.device.rows import DeviceRows, Pins
from shoal.table.device.streams import send
from shoal.table.lower.departures import Departure
from shoal.table.lower.residency import Residency
from shoal.table.lower.row_count import RowCount
from shoal.table.lower.tier import Below

# Rows leave some at a time: choosing them stops for the device. At most so many, or this part of the table.
_LEAVE_TOGETHER = 1 << 16
_LEAVING_PART = 16
# They are the oldest among so many times as many, from one place of the index to the next.
_LOOKED_AT = 4
# Keys of a call that go through memory together, as a part of what it holds.
_CHUNK_PART = 4


class _Slots(NamedTuple):
    """Slots of rows, and of their copies above."""

    rows: Tensor
    copies: Tensor


class DeviceMemory(Residency[Departure]):
    """The rows of one table that has a lower tier, as far as kernels reach them. The group's lock covers every method
    but `write`. Its count is of the rows that are in the lower tier alone."""

    def __init__(self, rows: DeviceRows, number: int, changes: Changes, folder: str, counters: Counters) -> None:
        self.config: Table = rows.configs[number]
        below = Below(self.config, folder, rows.device)
        super().__init__(below, RowCount(len(below.storage), counters), last_tier(self.config), rows.budget(number))
        self.fetched = 0  # positions of batches whose keys were in the lower tier alone
        self._rows = rows
        self._changes = changes
        self._number = number
        self._family = rows.families[number]
        self._hand = 0  # the bucket where the next that leave are looked for
        self._ungiven: list[_Slots] = []  # that there was no memory to list

    @property
    def away(self) -> int:
        """Rows that are in the lower tier alone."""
        return self._count.now(lambda: int(self.is_absent(self.lower.storage.keys()).sum()))

    def _came(self, rows: int) -> None:
        """So many rows have come from the lower tier; if it is less than 0, gone there."""
        self._count.settle(self._count.doubt(), -rows)

    @property
    def reached(self) -> DeviceRows:
        """The rows of all tables that kernels reach."""
        return self._rows

    @property
    def _most(self) -> int:
        """Rows that fit the memory that kernels reach."""
        most = self._rows.capacity(self._number)
        assert most is not None
        return most

    @property
    def budget(self) -> int | None:
        """Bytes of the memory that kernels reach, if it has a limit."""
        return self._rows.budget(self._number)

    @property
    def chunk(self) -> int:
        """Keys of a call that go through memory together."""
        return max(self._most // _CHUNK_PART, 1)

    # ---- rows that come

    def bring(self, missing: Missing, answer: Answer, pins: Pins, training: bool) -> int:
        """Put rows of keys that kernels do not reach where they do, and make room for those that will be born.
        `answer`: what the storage said of the keys. Returns at how many positions of the batch these rows are."""
        rows, found, _has = answer
        births = int((missing.trains & ~found).sum()) if training else 0
        self.require_place(births)
        has = int(found.sum())
        self._make_room(has + births, pins)
        if has:
            self.insert(missing.keys[found], rows[found], pins.stamp)
        return int(missing.times[found].sum())

    def insert(self, keys: Tensor, rows: Tensor, stamp: int) -> None:
        """Put rows of the storage in memory. REQUIRES: none of them is there, and there is room."""
        reached = self._rows
        came = send(rows, reached.device)
        wanted = keys.to(reached.device)
        try:
            slots = reached.upsert(self._number, wanted, rows=False, stamp=stamp)
            if bool((slots < 0).any()):
                raise CapacityError(
                    f"[table {self.config.name!r}] {int((slots < 0).sum())} rows of its storage found no place in "
                    f"memory. Raise {last_tier(self.config)}(...) in Table(tiers=)."
                )
            reached.storage.unpack(self._family, slots, came)
        except BaseException:  # keys that have a slot have no row yet
            slots, copies = reached.erase(self._number, wanted)
            reached.returned(self._number, len(slots))
            with suppress(torch.OutOfMemoryError):
                self._give(slots, copies)
            raise
        reached.returned(self._number, len(keys))
        self._came(len(keys))
        self._promotions.add(len(keys))

    def require_place(self, births: int) -> None:
        """Raise CapacityError where the lower tier has no place for so many rows more."""
        self.lower.require_place(births, lambda: self._in_memory() + self.away)

    def _in_memory(self) -> int:
        return int(self._rows.ledger.keys[self._number])

    def spare(self) -> int:
        """Rows that memory has room for."""
        return self._most - self._rows.held_slots(self._number) - self._in_memory()

    def is_absent(self, keys: Tensor) -> Tensor:
        return (self._rows.index.find_keys(self._number, keys.to(self._rows.device)) < 0).cpu()

    def keep(self, keys: Tensor, pins: Pins) -> None:
        """Rows of these keys of the host stay, as long as that batch is at work or on its way."""
        self._rows.index.stamp_keys(self._number, keys.to(self._rows.device), pins.stamp)

    # ---- rows that leave

    def has_room_for_births(self, births: int, pins: Pins) -> bool:
        """Let rows leave for so many that will be born; says whether enough could. Waits for the device only where what
        is known is not enough."""
        if not births:
            return True
        most = self._rows.room.most(self._number) + births
        capacity = self.lower.capacity
        if capacity is not None and most + self.away > capacity:
            self.require_place(births)
        return most + self._rows.held_slots(self._number) <= self._most or self._has_made_room(births, pins)

    def _make_room(self, more: int, pins: Pins) -> None:
        """Let rows leave for so many others; those that batches on their way need only if no others can."""
        if self._has_made_room(more, pins):
            return
        self.epoch += 1
        at_work = self._rows.pins_at_work(pins)
        if self._has_made_room(more, at_work):
            return
        self._await_departures(lambda departure: self.end_departure(departure, at_work))
        if self._has_made_room(more, at_work):
            return
        where = f"[table {self.config.name!r}] its memory of {format_size(self._rows.budget(self._number) or 0)}"
        if more > self._most:
            raise CapacityError(
                f"{where} takes {self._most} rows; this batch brings {more} that are not there. Raise it to "
                f"{self._tier_for(self._in_memory() + more)} or more in Table(tiers=), or use smaller batches."
            )
        raise CapacityError(
            f"{where} holds {self._in_memory()} rows, of which this batch and others at work need so many that there "
            f"is room for {max(self.spare(), 0)} and not for {more} more. Raise it to "
            f"{self._tier_for(self._in_memory() + more)} in Table(tiers=), use smaller batches, or run backwards "
            f"before further forwards."
        )

    def _tier_for(self, rows: int) -> str:
        """The last tier that kernels reach, with memory for so many rows."""
        return f"{last_tier(self.config)}({self._rows.bytes_of(self._number, rows)})"

    def _has_made_room(self, more: int, pins: Pins) -> bool:
        """Let rows leave, if enough can; what had changed is written below first."""
        self._give_what_is_left()
        lacking = more - self.spare()
        if lacking <= 0:
            return True
        for also_above in (False, True):
            departure = self.begin_departure(lacking, pins, also_above)
            if departure is not None:
                self.write_now(departure)
                self._departures.remove(departure)
                self._forget(departure.keys)
                return True
        return False

    def begin_departure(self, n: int, pins: Pins, also_above: bool = False) -> Departure | None:
        """Choose n rows to leave, and copy those that are to be written; None where so many cannot leave. They count as
        unchanged from here on. `also_above`: also rows that have a copy in device memory, which were used last."""
        wanted = max(n, min(self._in_memory() // _LEAVING_PART, _LEAVE_TOGETHER))
        keys = self._oldest(wanted, pins, also_above)
        if len(keys) < n:
            return None
        storage, slots = self._rows.storage, self._rows.find_rows(self._number, keys)
        flags = storage.read_flags(self._family, slots)
        if self._changes.has_cursors:  # the storage has no place for flags
            self._changes.add(keys[(flags & CHANGED_FLAG) != 0].cpu())
        changed = (flags & UNSAVED_FLAG) != 0
        packed = storage.pack(self._family, slots[changed]).cpu()
        departure = Departure(keys, keys[changed].cpu(), [packed] if len(packed) else [])
        self._departures.append(departure)  # before they count as unchanged
        storage.set_flags(self._family, slots[changed], flags[changed] & ~UNSAVED_FLAG)
        return departure

    def _oldest(self, wanted: int, pins: Pins, also_above: bool) -> Tensor:
        """Keys that were not used for long, and are not in use."""
        index, above, number = self._rows.index, self._rows.above, self._number
        buckets = index.buckets(number)
        self._hand %= max(buckets, 1)  # there were more, it may be
        looked = min(buckets, max(_LOOKED_AT * wanted * buckets // max(self._in_memory(), 1), 1))
        found: list[tuple[Tensor, Tensor]] = []
        seen = many = 0
        while seen < buckets and many < wanted:
            run = min(looked, buckets - seen, buckets - self._hand)
            keys, stamps = index.stamped(number, self._hand, run)
            free = stamps < pins.oldest
            for departure in self._departures:
                free &= ~torch.isin(keys, departure.keys)
            keys, stamps = keys[free], stamps[free]
            if above is not None and above.has(number):
                # The index below does not hear of what is used above.
                copies = above.find_keys(number, keys) >= 0
                if also_above:
                    last = above.index.stamps_of(number, keys)
                    stamps = torch.where(copies, last, stamps)
                    copies &= last >= pins.oldest
                keys, stamps = keys[~copies], stamps[~copies]
            found.append((keys, stamps))
            seen, many = seen + run, many + len(keys)
            self._hand = (self._hand + run) % buckets
        if not found:
            return torch.empty(0, dtype=torch.int64, device=self._rows.device)
        keys, stamps = torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])
        return keys[torch.argsort(stamps, stable=True)[:wanted]]

    def mark_unsaved(self, keys: Tensor) -> None:
        """Neither the row nor its copy above may go without being written."""
        keys = keys.to(self._rows.device)
        slots = [self._rows.index.find_keys(self._number, keys)]
        if self._rows.above is not None and self._rows.above.has(self._number):
            slots.append(self._rows.above.find_keys(self._number, keys))
        for some in slots:
            self._rows.storage.add_flags(self._family, some[some >= 0], UNSAVED_FLAG)

    def end_departure(self, departure: Departure, pins: Pins) -> None:
        """Have memory forget the rows that were chosen, if no batch has needed or changed them since."""
        if departure not in self._departures:
            return
        self._departures.remove(departure)
        index, above, number = self._rows.index, self._rows.above, self._number
        keys = departure.keys[index.find_keys(number, departure.keys) >= 0]
        leaves = index.stamps_of(number, keys) < pins.oldest
        if above is not None and above.has(number):
            leaves &= above.find_keys(number, keys) < 0
        flags = self._rows.storage.read_flags(self._family, index.find_keys(number, keys))
        self._forget(keys[leaves & ((flags & UNSAVED_FLAG) == 0)])

    def _forget(self, keys: Tensor) -> None:
        if len(keys):
            slots, copies = self._rows.erase(self._number, keys)
            self._came(-len(slots))
            self._give(slots, copies)

    def _give(self, slots: Tensor, copies: Tensor) -> None:
        """Free slots. Where there is no memory for the list of them it raises, and they are freed by a later call."""
        try:
            self._rows.give(self._number, slots, copies)
        except BaseException:
            self._ungiven.append(_Slots(slots, copies))
            self._rows.hold(self._number, len(slots))
            raise

    def _give_what_is_left(self) -> None:
        while self._ungiven:
            self._rows.give(self._number, *self._ungiven[0])
            self._rows.hold(self._number, -len(self._ungiven.pop(0).rows))

    # ---- keys of calls

    def reach(self, keys: Tensor, pins: Pins, bearing: bool) -> None:
        """Bring the rows of distinct keys, all of which memory can hold; with `bearing` make room for the others."""
        index = self._rows.index
        index.stamp_keys(self._number, keys, pins.stamp)
        absent = keys[index.find_keys(self._number, keys) < 0].sort().values.cpu()
        if len(absent):
            trains = torch.full((len(absent),), bearing, device="cpu")
            missing = Missing(absent, trains, torch.zeros_like(absent))
            self.bring(missing, self.lower.read(absent), pins, bearing)

    def erase(self, distinct: Tensor) -> int:
        """Remove rows below; returns how many of the keys had a row there, and none in memory."""
        self.epoch += 1
        reached = self._rows.find_rows(self._number, distinct)
        away = distinct[reached < 0].cpu()

        def count() -> int:
            return int(self.lower.contains(away).sum()) if len(away) else 0

        before = count()
        # If it fails half way, some of these keys have a row in memory alone.
        self.mark_unsaved(distinct[reached >= 0])
        was_in_doubt = self._count.doubt()
        self._erase_below(distinct.cpu(), was_in_doubt, before, count)
        self._count.settle(was_in_doubt, -before)
        return before

    def clear(self) -> None:
        """Remove every row below."""
        self.epoch += 1
        self._departures.clear()
        self._hand = 0
        self._count.doubt()
        self.lower.clear()
        self._count.set(0)

    def measured(self) -> dict[str, int]:
        """What differs from a table without a lower tier in the metrics of the memory that kernels reach."""
        keys, _slots = self._rows.index.entries(self._number)
        flags = self._rows.storage.read_flags(self._family, self._rows.find_rows(self._number, keys))
        oldest = self._rows.oldest_at_work(True)
        return {
            "dirty": int(((flags & UNSAVED_FLAG) != 0).sum()),
            "pinned": 0 if oldest is None else int((self._rows.index.stamps(self._number) >= oldest).sum()),
        }
