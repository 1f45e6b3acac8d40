"""What a table on a device has below the memory that kernels reach: a storage by key, which the host asks.

Rows are brought before a batch is looked up, and leave when others need their place: the host chooses them, writes what
changed, and then takes them out. Until they are written they stay, so no row is ever in no place.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Table, format_size
from shoal.errors import CapacityError
from shoal.metrics import Counters
from shoal.storage import Answer
from shoal.storage.hbm import CHANGED_FLAG, UNSAVED_FLAG
from shoal.table.changes import Changes
from shoal.table.content import TierStats
from shoal.table.device.missing import Missing
from shoal.table.device.rows import DeviceRows, Pins, last_tier
from shoal.table.lower.demotion import write_now
from shoal.table.lower.tier import Below

# Rows leave some at a time: choosing them stops for the device. At most so many, or this part of the table.
_LEAVE_TOGETHER = 1 << 16
_LEAVING_PART = 16
# They are the oldest among so many times as many, from one place of the index to the next.
_LOOKED_AT = 4
# Keys of a call that go through memory together, as a part of what it holds.
_CHUNK_PART = 4


@dataclass(eq=False)
class Leaving:
    """Rows that are about to leave: they were chosen, and those that had changed are being written."""

    keys: Tensor
    changed: Tensor  # keys, on the host
    rows: Tensor  # theirs
    is_written: bool = False


class _Slots(NamedTuple):
    """Of rows, and of their copies above."""

    rows: Tensor
    copies: Tensor


class DeviceBelow:
    """The storage below one table. The group's lock covers its methods, but for `write_leaving`."""

    def __init__(self, rows: DeviceRows, number: int, changes: Changes, folder: str, counters: Counters) -> None:
        self.config: Table = rows.configs[number]
        self.below = Below(self.config, folder, rows.device)
        self._away = len(self.below.storage)
        # The storage failed, and then did not say what it had done: who asks for the number of rows counts them.
        self._is_miscounted = False
        self._counting = threading.Lock()  # of those who read beside each other
        self._counters = counters
        self.fetched = 0  # positions of batches whose keys were there
        self.epoch = 0  # changes when rows may be gone that batches on their way need
        self._rows = rows
        self._changes = changes
        self._number = number
        self._family = rows.families[number]
        self._hand = 0  # the bucket where the next that leave are looked for
        self._leaving: list[Leaving] = []  # that others are writing: until that is done they count as unchanged
        self._ungiven: list[_Slots] = []  # that there was no memory to list
        self._promotions = self._demotions = 0

    @property
    def away(self) -> int:
        """Rows that are there alone."""
        if self._is_miscounted:
            with self._counting:
                if self._is_miscounted:
                    self._lose(self._away - int(self.is_absent(self.below.storage.keys()).sum()))
        return self._away

    def _lose(self, rows: int) -> None:
        """So many rows went by an erase that failed: now they are counted."""
        self._away -= rows
        self._is_miscounted = False
        self._counters.add("erased", max(rows, 0))

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
        """Keys that go through memory together."""
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
        on_gpu = reached.device.type == "cuda"
        came = rows.pin_memory().to(reached.device, non_blocking=True) if on_gpu else rows
        wanted = keys.to(reached.device)
        try:
            slots = reached.upsert(self._number, wanted, rows=False, stamp=stamp)
            if bool((slots < 0).any()):
                raise CapacityError(
                    f"[table {self.config.name!r}] {int((slots < 0).sum())} rows of its storage found no place in "
                    f"memory. Raise {last_tier(self.config)}(...) in Table(tiers=)."
                )
            reached.storage.unpack(self._family, slots, came)
        except BaseException:  # what has a slot has no row yet
            slots, copies = reached.erase(self._number, wanted)
            reached.returned(self._number, len(slots))
            with suppress(torch.OutOfMemoryError):
                self._give(slots, copies)
            raise
        reached.returned(self._number, len(keys))
        self._away -= len(keys)
        self._promotions += len(keys)

    def require_place(self, births: int) -> None:
        """Every row has a place below from its birth on, so that it can always leave memory."""
        capacity = self.below.capacity
        if capacity is None or not births:
            return
        rows = self._in_memory() + self.away
        if rows + births > capacity:
            raise CapacityError(
                f"[table {self.config.name!r}] its {rows} rows and {births} new ones are more than the {capacity} that "
                f"its lowest tier takes. Raise Ssd(size=), of which rows fill half, or erase keys that are not needed."
            )

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""
        capacity = self.below.capacity
        if capacity is not None and rows > capacity:
            raise CapacityError(
                f"[table {self.config.name!r}] {rows} rows are more than the {capacity} that its lowest tier takes. "
                f"Raise Ssd(size=), of which rows fill half. Nothing was loaded."
            )

    def _in_memory(self) -> int:
        return int(self._rows.ledger.keys[self._number])

    def spare(self) -> int:
        """Rows that memory has room for."""
        return self._most - self._rows.held_slots(self._number) - self._in_memory()

    def is_absent(self, keys: Tensor) -> Tensor:
        """Whether each key of the host is out of kernels' reach; on the host."""
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
        capacity = self.below.capacity
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
        self._await_others(at_work)
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

    def _await_others(self, pins: Pins) -> None:
        """Let the rows go that another thread is writing."""
        for leaving in tuple(self._leaving):
            with self.below.writing:  # it has it until they are written
                if leaving.is_written:
                    self.end_leaving(leaving, pins)

    def _has_made_room(self, more: int, pins: Pins) -> bool:
        """Let rows leave, if enough can; what had changed is written below first."""
        self._give_what_is_left()
        lacking = more - self.spare()
        if lacking <= 0:
            return True
        for also_above in (False, True):
            leaving = self.begin_leaving(lacking, pins, also_above)
            if leaving is not None:
                write_now(self, leaving, self.below.writing)
                self._leaving.remove(leaving)
                self._forget(leaving.keys)
                return True
        return False

    def begin_leaving(self, n: int, pins: Pins, also_above: bool = False) -> Leaving | None:
        """Choose n rows to leave, and take what is to be written of them; None where so many cannot. They count as
        unchanged from here on. `also_above`: those with a copy in device memory too, which were used last."""
        wanted = max(n, min(self._in_memory() // _LEAVING_PART, _LEAVE_TOGETHER))
        keys = self._oldest(wanted, pins, also_above)
        if len(keys) < n:
            return None
        storage, slots = self._rows.storage, self._rows.find_rows(self._number, keys)
        flags = storage.read_flags(self._family, slots)
        if self._changes.are_read:  # the storage has no place for flags
            self._changes.add(keys[(flags & CHANGED_FLAG) != 0].cpu())
        changed = (flags & UNSAVED_FLAG) != 0
        rows = storage.pack(self._family, slots[changed])
        leaving = Leaving(keys, keys[changed].cpu(), rows.cpu())
        self._leaving.append(leaving)  # before they count as unchanged
        storage.set_flags(self._family, slots[changed], flags[changed] & ~UNSAVED_FLAG)
        return leaving

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
            for leaving in self._leaving:
                free &= ~torch.isin(keys, leaving.keys)
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

    def write_leaving(self, leaving: Leaving) -> None:
        """Write below what had changed. The group's lock need not be held, if `below.writing` is."""
        if len(leaving.changed):
            self.below.spoil(leaving.changed)
            self.below.write(leaving.changed, leaving.rows)
            self._demotions += len(leaving.changed)
        leaving.is_written = True

    def stay(self, leaving: Leaving) -> None:
        """They could not be written: they are as they were."""
        if leaving in self._leaving:  # and all rows were not replaced meanwhile
            self._mark_unsaved(leaving.changed.to(self._rows.device))
            self._leaving.remove(leaving)  # behind it, should an interrupt come between them

    def _mark_unsaved(self, keys: Tensor) -> None:
        """The storage may not have these rows: neither the row nor its copy above may go without being written."""
        slots = [self._rows.index.find_keys(self._number, keys)]
        if self._rows.above is not None and self._rows.above.has(self._number):
            slots.append(self._rows.above.find_keys(self._number, keys))
        for some in slots:
            self._rows.storage.add_flags(self._family, some[some >= 0], UNSAVED_FLAG)

    def end_leaving(self, leaving: Leaving, pins: Pins) -> None:
        """What was chosen leaves, if nobody needed or changed it since."""
        if leaving not in self._leaving:
            return
        self._leaving.remove(leaving)
        index, above, number = self._rows.index, self._rows.above, self._number
        keys = leaving.keys[index.find_keys(number, leaving.keys) >= 0]
        leaves = index.stamps_of(number, keys) < pins.oldest
        if above is not None and above.has(number):
            leaves &= above.find_keys(number, keys) < 0
        flags = self._rows.storage.read_flags(self._family, index.find_keys(number, keys))
        self._forget(keys[leaves & ((flags & UNSAVED_FLAG) == 0)])

    def _forget(self, keys: Tensor) -> None:
        if len(keys):
            slots, copies = self._rows.erase(self._number, keys)
            self._away += len(slots)
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
            self.bring(missing, self.below.read(absent), pins, bearing)

    def read(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of keys that have no slot and are below: where they stand, and their packed rows; both on the host."""
        at = torch.nonzero(slots < 0)[:, 0]
        if not len(at):
            return None
        distinct, inverse = torch.unique(keys[at].cpu(), return_inverse=True)
        rows, found, _has = self.below.read(distinct)
        has = found[inverse]
        return at.cpu()[has], rows[inverse[has]]

    def lost(self, keys: Tensor) -> Tensor:
        """Of keys of the host whose rows could not be read, those that have no other row and still cannot be."""
        self._mark_unsaved(keys.to(self._rows.device))
        return self.below.unreadable(keys[self.is_absent(keys)])

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row below."""
        return self.below.contains(keys.cpu()).to(keys.device)

    def erase(self, distinct: Tensor) -> int:
        """Remove rows below; returns how many of the keys had one there, and none in memory."""
        self.epoch += 1
        reached = self._rows.find_rows(self._number, distinct)
        keys = distinct.cpu()
        alone = distinct[reached < 0].cpu()
        before = int(self.below.contains(alone).sum()) if len(alone) else 0
        # Should it fail half way, what is in memory is all that there is of some.
        self._mark_unsaved(distinct[reached >= 0])
        try:
            self.below.erase(keys)
        except BaseException:
            is_known, self._is_miscounted = not self._is_miscounted, True
            with suppress(Exception):
                gone = before - (int(self.below.contains(alone).sum()) if len(alone) else 0)
                if is_known:
                    self._lose(gone)
            raise
        self._away -= before
        return before

    def clear(self) -> None:
        """Remove every row below."""
        self.epoch += 1
        self._leaving.clear()
        self._hand = 0
        self._is_miscounted = True
        self.below.clear()
        self._away, self._is_miscounted = 0, False

    def stats(self, last: TierStats) -> tuple[TierStats, TierStats]:
        """The last tier that kernels reach, of which `last` knows what they counted, and the storage."""
        keys, _slots = self._rows.index.entries(self._number)
        flags = self._rows.storage.read_flags(self._family, self._rows.find_rows(self._number, keys))
        oldest = self._rows.oldest_at_work(True)
        reached = replace(
            last,
            hits=last.hits - self.fetched,
            misses=last.misses + self.fetched,
            promotions=self._promotions,
            demotions=self._demotions,
            dirty=int(((flags & UNSAVED_FLAG) != 0).sum()),
            pinned=0 if oldest is None else int((self._rows.index.stamps(self._number) >= oldest).sum()),
        )
        return reached, self.below.stats()
