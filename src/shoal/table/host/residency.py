"""Which rows of a table are in host memory, and how they come to leave it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Dram, Table, format_size
from shoal.errors import CapacityError
from shoal.index import NO_SLOT, HostIndex
from shoal.metrics import Counters
from shoal.storage import DramStorage
from shoal.table.changes import Changes
from shoal.table.host.arrivals import Arrivals
from shoal.table.host.room import Room, budget_of
from shoal.table.lower.departures import Departure
from shoal.table.lower.residency import Residency
from shoal.table.lower.row_count import RowCount
from shoal.table.lower.tier import Below

# Compaction looks at this many buckets for each row that was erased or each key of a batch: it ends within the calls
# that made it necessary, and none of them waits for much more than its own work.
_BUCKETS_PER_ERASE = 4
_LEAST_BUCKETS = 1024
# Rows leave memory some at a time, so that they are written in large pieces: this many, or a part of the table.
_LEAVE_TOGETHER = 4096
_LEAVING_PART = 64
_WRITE_BYTES = 8 << 20


@dataclass(eq=False, kw_only=True)
class HostDeparture(Departure):
    """Rows that are leaving host memory: first those that had changed."""

    slots: Tensor  # of `keys`
    forced: bool  # even if staged batches need them
    at_once: bool  # all of it while the group's lock is held


class HostMemory(Residency[HostDeparture]):
    """The keys of one table, and the slots of those whose rows are in memory. Its group's lock covers every method."""

    def __init__(self, config: Table, folder: str = "") -> None:
        self.config = config
        self.counters = Counters()
        self.policy_state: dict[str, Any] = {}  # what its policies remember, of what JSON has
        self._backwards = _native.Backwards()
        self.budget = budget_of(config)
        has_lower = config.tiers and config.tiers[-1] is not config.tier(Dram)
        below = Below(config, folder) if has_lower else None
        super().__init__(
            below, RowCount(0 if below is None else len(below.storage), self.counters), "Dram", self.budget
        )
        # Adds the slots whose rows must stay in memory: the group knows them. First those of batches at work, then
        # those of staged ones.
        self.pin: Callable[[_native.Pins, bool, bool], None] = lambda _pins, _staged, _finding: None
        self.indexes = _native.RwLock()  # the group's: held exclusively while the index changes
        self.clock = 0  # counts batches; what was used longest ago leaves first
        self._left = 0
        self.changes = Changes(self)
        self._is_tracking = False
        self._hold(HostIndex(), DramStorage(config.format))

    @property
    def step(self) -> int:
        """How many backwards were applied, as it was loaded or counted."""
        return self._backwards.step

    @step.setter
    def step(self, step: int) -> None:
        self._backwards.step = step

    def clear(self) -> None:
        """Forget every row."""
        self._count.doubt()
        if self.below is not None:
            self.below.clear()
        self._hold(HostIndex(), DramStorage(self.config.format))
        self._count.set(0)

    def take_over(self, other: "HostMemory") -> None:
        """Take the rows of a table with the same config, which is not used again. REQUIRES: all are in memory."""
        self._count.doubt()
        self._hold(other.index, other.storage)
        self._count.set(len(other))
        self.step = other.step
        self.policy_state = other.policy_state

    def _hold(self, index: HostIndex, storage: DramStorage) -> None:
        if self._is_tracking or self.budget is not None:
            # Where there is a budget, from the first row on: a log may begin when it is full.
            storage.keep_keys(index.native)
        with self.indexes.exclusive():
            self.index = index
            self.storage = storage
            self.room = Room(self.config, self.budget, index, storage)
            self.epoch += 1
        self.changes.lose()
        self._victims = _native.Victims()
        self._departures: list[HostDeparture] = []
        self._written: Tensor | None = None  # slots that a call is about to write while others come
        self._is_being_filled = False  # then rows that come are loaded: nothing counts or lists them
        self._compacting_from = 0
        self._may_compact = False
        self._limbo = _native.Limbo()

    @property
    def bytes(self) -> int:
        """Bytes of rows and index in memory."""
        return self.room.bytes

    def find(self, keys: Tensor) -> Tensor:
        """The slot in memory of every key, or -1."""
        return self.index.find(keys)

    def is_absent(self, keys: Tensor) -> Tensor:
        return self.find(keys) == NO_SLOT

    @property
    def is_full(self) -> bool:
        """Whether rows had to leave memory already."""
        return self._left > 0

    def tick(self) -> None:
        """Count a batch: what it uses is younger than what others used."""
        self.clock = (self.clock + 1) & 0xFFFFFF

    # ---- room

    def make_room(self, arrivals: Arrivals) -> None:
        """Reserve room for keys that come, or raise CapacityError. No row changes; some may leave memory."""
        more = len(arrivals.keys)
        if self.below is not None:
            self.below.require_place(arrivals.births, self.__len__)
            if not self.room.fits(more):
                self._demote_for(more)
        else:
            self.room.require(more)
        self.storage.reserve(more)

    def require_more(self, rows: int) -> None:
        """Raise CapacityError where the table cannot have so many rows more, and OutOfMemoryError where the system has
        no memory for them."""
        if self.below is not None:
            self.below.require_place(rows, self.__len__)
        else:
            self.room.require(rows)
            self.storage.reserve(rows)

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""
        if self.below is not None:
            self.below.require_load(rows)
        else:
            self.room.require_load(rows)

    def _demote_for(self, more: int) -> None:
        """Makes room for so many rows: demotes those used longest ago, and writes the changed ones below first."""
        self._call_interrupted_off()
        # Rows of staged batches leave only if no others can, and some of those that could may have been staged just
        # now; those that another thread is writing are waited for first.
        for forced, may_wait in ((False, False), (False, False), (False, True), (True, True), (True, True)):
            n = more - self.room.spare(more)
            if n and (departure := self.begin_departure(n, forced, at_once=True)):
                self.write_now(departure)
                self.end_departure(departure)
            if may_wait and not self.room.fits(more):
                self._await_departures(self.end_departure)
            if self.room.fits(more):
                return
        held = self.pins(staged=False).count
        raise CapacityError(
            f"[table {self.config.name!r}] its memory of {format_size(self.budget or 0)} has no room for {more} rows "
            f"more: {held} stay until the backwards of the lookups that brought them. Run backwards, or drop outputs "
            f"that are not needed; or set Dram({self.room.bytes_with(held + more)}) or more in Table(tiers=)."
        )

    # ---- rows that leave memory

    def begin_departure(self, n: int, forced: bool = False, at_once: bool = False) -> HostDeparture | None:
        """Choose n rows to leave, and copy those that are to be written; None where so many cannot leave.

        They count as unchanged from here on. `forced`: also rows that staged batches will need. `at_once`: they are
        written and gone before the group's lock is released.
        """
        pins = self.pins(staged=not forced)
        # Some more than are needed, if there are any: the next batches will not have to wait.
        wanted = max(n, min(len(self.index) // _LEAVING_PART, _LEAVE_TOGETHER))
        keys, slots, dirty = self._victims.choose(self.index.native, self.storage.rows, self.clock, pins, wanted)
        if len(keys) < n:
            return None
        if self._is_tracking:  # neither slots nor flags are known below
            self.changes.add(keys[self.storage.is_changed(slots)])
        packed = [self.storage.pack(some) for some in slots[:dirty].split(self._rows_of_a_write)] if dirty else []
        departure = HostDeparture(keys, keys[:dirty], packed, slots=slots, forced=forced, at_once=at_once)
        self._departures.append(departure)  # before they count as unchanged: they stay until they are written
        self.storage.set_dirty(slots[:dirty], False)
        return departure

    @property
    def _rows_of_a_write(self) -> int:
        row_bytes: int = self.storage.packed.bytes
        return max(_WRITE_BYTES // row_bytes, 1)

    def write_below(self, keys: Tensor, rows: Tensor) -> None:
        """Write these rows below. REQUIRES: none of the keys is in memory."""
        piece = self._rows_of_a_write
        for some, packed in zip(keys.split(piece), rows.split(piece), strict=True):
            with self.lower.writing:
                self._write(some, packed)

    def mark_unsaved(self, keys: Tensor) -> None:
        slots = self.index.find(keys)
        self.storage.set_dirty(slots[slots != NO_SLOT], True)

    def _call_interrupted_off(self) -> None:
        """Rows that were to leave at once, and did not before the group's lock was released, stay: an interrupt
        came."""
        for departure in tuple(self._departures):
            if departure.at_once:
                self.stay(departure)

    def end_departure(self, departure: HostDeparture) -> None:
        """Have memory forget the rows that were chosen, if no batch has needed or changed them since."""
        if departure not in self._departures:
            return
        self._departures.remove(departure)
        keys, slots = departure.keys, departure.slots
        with self.indexes.exclusive():  # no thread finds meanwhile
            held = self.pins(staged=not departure.forced, finding=True).has(slots) | self.storage.is_dirty(slots)
            leaves = (self.index.find(keys) == slots) & ~held
            if not bool(leaves.all()):
                keys = keys[leaves]
            self.epoch += departure.forced
            _native.leave(self.index.native, self.storage.native, keys)
        self._left += len(keys)

    def pins(self, staged: bool, finding: bool = False) -> _native.Pins:
        """The slots whose rows must stay in memory. `finding`: also of batches that are being staged now. REQUIRES:
        with `finding`, `indexes` is held exclusively."""
        pins = _native.Pins(self.storage.rows)
        self.pin(pins, staged, finding)
        if self._written is not None:
            pins.add(self._written)
        for departure in self._departures:
            pins.add(departure.slots)
        return pins

    # ---- rows that there are

    def __len__(self) -> int:
        return self._count.now(lambda: len(self.keys()))

    @property
    def rows_counted(self) -> int:
        """Rows at the last count. Rows that are arriving are not in it."""
        return self._count.last

    def keys(self) -> Tensor:
        """Every key, in ascending order."""
        chunks = [entries.keys for entries in self.index.export()]
        if self.below is not None:
            chunks.append(self.below.storage.keys())
            keys: Tensor = torch.unique(torch.cat(chunks))
            return keys
        return torch.cat(chunks).sort().values if chunks else torch.empty(0, dtype=torch.int64, device="cpu")

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""
        return self.find_below(keys, self.find(keys) != NO_SLOT)

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""
        before = None
        if self.changes.has_cursors:
            self.changes.add(keys[self.contains(keys)])
        if self.below is not None:
            keys = torch.unique(keys)
            before = int(self.contains(keys).sum())
            # If it fails half way, some of these keys have a row in memory alone.
            self.mark_unsaved(keys)
        here, was_in_doubt = len(self.index), self._count.doubt()  # in case an interrupt comes
        if before is not None:
            self._erase_below(keys, was_in_doubt, before, lambda: int(self.contains(keys).sum()))
        self._may_compact = True
        with self.indexes.exclusive():
            self.epoch += 1  # before they go: an interrupt may come between
            if newest_lease is None:
                _native.leave(self.index.native, self.storage.native, keys)
            else:
                self._limbo.erase(self.index.native, self.storage.native, keys, newest_lease)
        erased = here - len(self.index) if before is None else before
        self._count.settle(was_in_doubt, -erased)
        if erased:
            self.counters.add("erased", erased)
        return erased

    @property
    def has_limbo(self) -> bool:
        """Whether slots of erased rows wait for leases to end."""
        return self._limbo.any

    def leases_ended(self, oldest_lease: int | None) -> None:
        """Free the slots of erased rows that no live lease can hold; leases are numbered as they begin."""
        self._limbo.free(self.storage.native, oldest_lease)

    def compact(self, work: int) -> None:
        """Move rows out of nearly empty slabs and give these back, looking at about `work` rows' worth of the index.

        Only between leases: a lease holds slots.
        """
        if not self._may_compact:
            return
        self._call_interrupted_off()
        if self._departures:  # rows that are being written must stay where they are
            return
        budget = _BUCKETS_PER_ERASE * work + _LEAST_BUCKETS
        with self.indexes.exclusive():
            index_done = self.index.shrink(budget)
        if not self.storage.sparse:
            self._compacting_from = 0
            self._may_compact = not index_done or self._limbo.any
            return
        end = min(self._compacting_from + budget, self.index.extent)
        entries = self.index.entries(self._compacting_from, end, self.storage.compact_from)
        if len(entries.keys):
            if self._is_tracking:  # they were listed by slot
                self.changes.add(entries.keys[self.storage.is_changed(entries.slots)])
            with self.indexes.exclusive():
                self.epoch += 1
                _native.relocate(self.index.native, self.storage.native, entries.keys, entries.slots)
        self._compacting_from = 0 if end >= self.index.extent else end
        self.storage.release_tail()

    # ---- changes

    def follow_cursors(self) -> None:
        """List changes from now on if a cursor is open, and stop that if none is."""
        if self.changes.has_cursors == self._is_tracking:
            return
        if self._is_tracking:
            if self.budget is None:
                self.storage.forget_keys()
        else:
            self.storage.keep_keys(self.index.native)
            self.changes.flags_are_stale = False
        self._is_tracking = not self._is_tracking

    @property
    def listed(self) -> _native.ChangedRows | None:
        """Where rows that change are listed; None if no cursor is open."""
        if self.changes.has_cursors != self._is_tracking:
            self.follow_cursors()
        return self.changes.listed if self._is_tracking else None

    def seal(self) -> None:
        """Tell the cursors what changed up to now."""
        self.follow_cursors()
        try:
            if self._is_tracking and self.changes.flags_are_stale:
                self.storage.keep_keys(self.index.native)
                self.changes.flags_are_stale = False
            slots = self.find(self.changes.seal(self.storage.changed_keys if self._is_tracking else None))
            self.storage.clear_changed(slots[slots != NO_SLOT])
        except BaseException:
            self.changes.lose()  # cursors may know of rows that are still flagged
            raise
