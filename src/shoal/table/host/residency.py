"""Which rows a table has, which of them are in host memory, and how they come to leave it."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Dram, Table, format_size
from shoal.errors import CapacityError, ConfigError
from shoal.index import NO_SLOT, HostIndex
from shoal.metrics import Counters
from shoal.storage import DramStorage
from shoal.table.changes import Changes
from shoal.table.host.arrivals import Arrivals
from shoal.table.lower.demotion import write_now
from shoal.table.lower.tier import Below

# Compaction looks at this many buckets for each row that was erased or each key of a batch: it ends within the calls
# that made it necessary, and none of them waits for much more than its own work.
_BUCKETS_PER_ERASE = 4
_LEAST_BUCKETS = 1024
# What a table without Dram among its tiers has of memory to work in.
_WORKING_BYTES = 64 << 20
# A full bucket at the end of an index passes keys on to some behind it.
_SPILL_BYTES = 512
# Rows leave memory some at a time, so that they are written in large pieces: this many, or a part of the table.
_LEAVE_TOGETHER = 4096
_LEAVING_PART = 64
_WRITE_BYTES = 8 << 20


@dataclass(eq=False)
class Leaving:
    """Rows that are about to leave memory: they were chosen, and those that had changed are being written."""

    keys: Tensor
    slots: Tensor
    dirty: int  # the first so many
    packed: Sequence[Tensor]  # their rows, in pieces
    forced: bool  # even if batches on their way need them
    at_once: bool  # all of it while the group is held
    is_written: bool = False


def _bytes_for(config: Table, rows: int) -> int:
    """Bytes of memory that so many rows take with their index, if there is a budget."""
    storage, index = DramStorage(config.dim, config.dtype, config.columns), HostIndex()
    storage.keep_keys(index.native)
    return index.bytes_after(rows) + storage.bytes_after(rows)


def _require_a_row(config: Table, budget: int | None) -> None:
    """Raise ConfigError where memory is too small for any table."""
    if budget is not None and budget < (needed := _bytes_for(config, 1) + _SPILL_BYTES):
        raise ConfigError(
            f"[Table {config.name!r}] tiers: wanted memory for a row and the index, which take {needed} bytes; got "
            f"Dram({budget}). Raise it: the rows of a batch have to fit."
        )


class HostMemory:
    """The keys of one table, and the slots of those whose rows are in memory. Its group's lock covers every method."""

    def __init__(self, config: Table, folder: str = "") -> None:
        self.config = config
        self.counters = Counters()
        self._backwards = _native.Backwards()
        dram = config.tier(Dram)
        _require_a_row(config, None if dram is None else dram.bytes)
        self.below = Below(config, folder) if config.tiers and config.tiers[-1] is not dram else None
        self.budget: int | None = None if dram is None else dram.bytes
        if dram is None and self.below is not None:
            self.budget = _WORKING_BYTES
        # Whose rows must stay in memory: the group knows. First those of batches at work, then those of staged ones.
        self.pin: Callable[[_native.Pins, bool, bool], None] = lambda _pins, _staged, _finding: None
        self.indexes = _native.RwLock()  # the group's: held alone while the index changes
        self.clock = 0  # counts batches; what was used longest ago leaves first
        self.epoch = 0  # changes when a key that had a slot has another one, or none
        self._demotions = self._left = 0
        self.changes = Changes(self)
        self._is_tracking = False
        self._hold(HostIndex(), DramStorage(config.dim, config.dtype, config.columns))
        self._rows = 0 if self.below is None else len(self.below.storage)
        # A storage failed, and then did not say what it had done, or an interrupt came: who asks for the number of rows
        # counts them.
        self._is_miscounted = False
        self._counting = threading.Lock()  # of those who read beside each other

    @property
    def step(self) -> int:
        """How many backwards were applied, as it was loaded or counted."""
        return self._backwards.step

    @step.setter
    def step(self, step: int) -> None:
        self._backwards.step = step

    def clear(self) -> None:
        """Forget every row."""
        self._is_miscounted = True
        if self.below is not None:
            self.below.clear()
        self._hold(HostIndex(), DramStorage(self.config.dim, self.config.dtype, self.config.columns))
        self._rows, self._is_miscounted = 0, False

    def take_over(self, other: "HostMemory") -> None:
        """Have the rows of a table with the same config, which is not used again. REQUIRES: all are in memory."""
        self._is_miscounted = True
        self._hold(other.index, other.storage)
        self._rows, self._is_miscounted = len(other), False
        self.step = other.step

    def _hold(self, index: HostIndex, storage: DramStorage) -> None:
        if self._is_tracking or self.budget is not None:
            # Where there is a budget, from the first row on: a log may begin when it is full.
            storage.keep_keys(index.native)
        with self.indexes.alone():
            self.index = index
            self.storage = storage
            self.epoch += 1
        self.changes.lose()
        self._victims = _native.Victims()
        self._leaving: list[Leaving] = []
        self._written: Tensor | None = None  # slots that a call is about to write while others come
        self._is_being_filled = False  # then keys that come are not births
        self._compacting_from = 0
        self._may_compact = False
        self._limbo = _native.Limbo()

    @property
    def bytes(self) -> int:
        """Bytes of rows and index in memory."""
        return self.index.bytes + self.storage.bytes

    def find(self, keys: Tensor) -> Tensor:
        """The slot in memory of every key, or -1."""
        return self.index.find(keys)

    @property
    def is_full(self) -> bool:
        """Whether rows had to leave memory already."""
        return self._left > 0

    def tick(self) -> None:
        """A batch begins: what it uses is younger than what others used."""
        self.clock = (self.clock + 1) & 0xFFFFFF

    # ---- room

    def make_room(self, arrivals: Arrivals) -> None:
        """Reserve room for keys that come, or raise CapacityError. No row changes; some may leave memory."""
        more = len(arrivals.keys)
        if self.below is not None:
            self._require_place(arrivals.births)
            if not self._fits(more):
                self._demote_for(more)
        else:
            self._require_memory(more)
        self.storage.reserve(more)

    def require_more(self, rows: int) -> None:
        """Raise CapacityError where the table cannot have so many rows more, and OutOfMemoryError where the system has
        no memory for them."""
        if self.below is not None:
            self._require_place(rows)
        else:
            self._require_memory(rows)
            self.storage.reserve(rows)

    def _require_memory(self, more: int) -> None:
        if self.budget is not None and not self._fits(more):
            raise CapacityError(
                f"[table {self.config.name!r}] {len(self.index)} rows and {more} new ones take "
                f"{format_size(self._bytes_after(more))}; the budget is Dram({format_size(self.budget)!r}). "
                f"Raise it in Table(tiers=[Dram(...)]), or erase keys that are not needed."
            )

    def _bytes_after(self, more: int) -> int:
        return self.index.bytes_after(more) + self.storage.bytes_after(more)

    def _fits(self, more: int) -> bool:
        if self.budget is None:
            return True
        after = self._bytes_after(more)
        # Free slots and entries take nothing more.
        return after + _SPILL_BYTES <= self.budget or after <= self.bytes

    def spare(self, wanted: int) -> int:
        """How many of so many more rows the budget of memory has room for."""
        if self._fits(wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _require_place(self, births: int) -> None:
        """Every row has a place below from its birth on, so that it can always leave memory."""
        assert self.below is not None
        capacity = self.below.capacity
        if capacity is not None and births and len(self) + births > capacity:
            raise CapacityError(
                f"[table {self.config.name!r}] its {len(self)} rows and {births} new ones are more than the "
                f"{capacity} that its lowest tier takes. Raise Ssd(size=), of which rows fill half, or erase keys that "
                f"are not needed."
            )

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""
        if self.below is not None:
            if self.below.capacity is not None and rows > self.below.capacity:
                raise CapacityError(
                    f"[table {self.config.name!r}] {rows} rows are more than the {self.below.capacity} that its lowest "
                    f"tier takes. Raise Ssd(size=), of which rows fill half. Nothing was loaded."
                )
        elif self.budget is not None:
            needed = _bytes_for(self.config, rows)
            if needed > self.budget:
                raise CapacityError(
                    f"[table {self.config.name!r}] {rows} rows take {format_size(needed)}; the budget is "
                    f"Dram({format_size(self.budget)!r}). Raise it in Table(tiers=[Dram(...)]). Nothing was loaded."
                )

    def never_holds(self, rows: int) -> bool:
        """Whether so many rows, without their index, are more than memory has bytes. Needs no lock."""
        return self.budget is not None and rows * self.storage.packed.bytes > self.budget

    def can_hold(self, more: int, held: int) -> bool:
        """Whether so many rows more fit, where all but so many leave."""
        lacking = more - self.spare(more)
        return lacking <= 0 or lacking <= len(self.index) - held

    def _demote_for(self, more: int) -> None:
        """Makes room for so many rows: demotes those used longest ago, and writes the changed ones below first."""
        assert self.below is not None
        self._call_interrupted_off()
        # Rows of batches that come leave only if no others can, and some of those that could may have been staged just
        # now; those that another thread is writing are waited for first.
        for forced, may_wait in ((False, False), (False, False), (False, True), (True, True), (True, True)):
            n = more - self.spare(more)
            if n and (leaving := self.begin_leaving(n, forced, at_once=True)):
                write_now(self, leaving, self.below.writing)
                self.end_leaving(leaving)
            if may_wait and not self._fits(more):
                self._await_others()
            if self._fits(more):
                return
        held = self.pins(staged=False).count
        needed = _bytes_for(self.config, held + more) + _SPILL_BYTES
        raise CapacityError(
            f"[table {self.config.name!r}] its memory of {format_size(self.budget or 0)} has no room for {more} rows "
            f"more: {held} stay until the backwards of the lookups that brought them. Run backwards, or drop outputs "
            f"that are not needed; or set Dram({needed}) or more in Table(tiers=)."
        )

    def _await_others(self) -> None:
        """Let the rows go that another thread is writing."""
        assert self.below is not None
        for leaving in tuple(self._leaving):
            with self.below.writing:  # it has it until they are written
                if leaving.is_written:
                    self.end_leaving(leaving)

    # ---- rows that leave memory

    def begin_leaving(self, n: int, forced: bool = False, at_once: bool = False) -> Leaving | None:
        """Choose n rows to leave, and take what is to be written of them; None where so many cannot.

        They count as clean from here on. `forced`: also rows that batches on their way will need. `at_once`: they are
        written and gone before the group is let go.
        """
        pins = self.pins(staged=not forced)
        # Some more than are needed, if there are any: the next batches will not have to wait.
        wanted = max(n, min(len(self.index) // _LEAVING_PART, _LEAVE_TOGETHER))
        keys, slots, dirty = self._victims.choose(self.index.native, self.storage.rows, self.clock, pins, wanted)
        if len(keys) < n:
            return None
        if self._is_tracking:  # neither slots nor flags are known below
            self.changes.add(keys[self.storage.is_changed(slots)])
        piece = max(_WRITE_BYTES // self.storage.packed.bytes, 1)
        packed = [self.storage.pack(some) for some in slots[:dirty].split(piece)] if dirty else []
        leaving = Leaving(keys, slots, dirty, packed, forced, at_once)
        self._leaving.append(leaving)  # before they count as clean: from here on they stay until they are written
        self.storage.set_dirty(slots[:dirty], False)
        return leaving

    def write_leaving(self, leaving: Leaving) -> None:
        """Write below what had changed. The table's lock need not be held, if `below.writing` is."""
        assert self.below is not None
        done = 0
        for rows in leaving.packed:
            keys = leaving.keys[done : done + len(rows)]
            self.below.spoil(keys)
            self.below.write(keys, rows)
            self._demotions += len(rows)
            done += len(rows)
        leaving.is_written = True

    def write_below(self, keys: Tensor, rows: Tensor) -> None:
        """Have these rows below. REQUIRES: none of the keys is in memory."""
        assert self.below is not None
        piece = max(_WRITE_BYTES // self.storage.packed.bytes, 1)
        for some, packed in zip(keys.split(piece), rows.split(piece), strict=True):
            with self.below.writing:
                self.below.spoil(some)
                self.below.write(some, packed)
            self._demotions += len(some)

    def stay(self, leaving: Leaving) -> None:
        """They could not be written: they are as they were."""
        if leaving not in self._leaving:  # all rows were replaced meanwhile
            return
        slots = self.index.find(leaving.keys[: leaving.dirty])  # they may have been moved meanwhile
        self.storage.set_dirty(slots[slots != NO_SLOT], True)
        self._leaving.remove(leaving)  # behind it, should an interrupt come between them

    def _call_interrupted_off(self) -> None:
        """Rows that were to leave at once, and did not before the group was let go, stay: an interrupt came."""
        for leaving in tuple(self._leaving):
            if leaving.at_once:
                self.stay(leaving)

    def end_leaving(self, leaving: Leaving) -> None:
        """What was chosen leaves memory, if nobody needed or changed it since."""
        if leaving not in self._leaving:
            return
        self._leaving.remove(leaving)
        keys, slots = leaving.keys, leaving.slots
        with self.indexes.alone():  # nobody finds meanwhile
            held = self.pins(staged=not leaving.forced, finding=True).has(slots) | self.storage.is_dirty(slots)
            leaves = (self.index.find(keys) == slots) & ~held
            if not bool(leaves.all()):
                keys = keys[leaves]
            self.epoch += leaving.forced
            _native.leave(self.index.native, self.storage.native, keys)
        self._left += len(keys)

    def pins(self, staged: bool, finding: bool = False) -> _native.Pins:
        """The slots whose rows must stay in memory. `finding`: also of batches that are being staged now. REQUIRES: the
        indexes are held then."""
        pins = _native.Pins(self.storage.rows)
        self.pin(pins, staged, finding)
        if self._written is not None:
            pins.add(self._written)
        for leaving in self._leaving:
            pins.add(leaving.slots)
        return pins

    # ---- rows that there are

    def __len__(self) -> int:
        if self._is_miscounted:
            with self._counting:
                if self._is_miscounted:
                    self._lose(self._rows - len(self.keys()))
        return self._rows

    @property
    def rows_counted(self) -> int:
        """How many there were when they were last counted; while some come, before these."""
        return self._rows

    def _lose(self, rows: int) -> None:
        """So many rows went by an erase that failed: now they are counted."""
        self._rows -= rows
        self._is_miscounted = False
        self.counters.add("erased", max(rows, 0))

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
        found = self.find(keys) != NO_SLOT
        if self.below is not None and not bool(found.all()):
            found[~found] = self.below.contains(keys[~found])
        return found

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""
        erased = None
        if self.changes.are_read:
            self.changes.add(keys[self.contains(keys)])
        if self.below is not None:
            keys = torch.unique(keys)
            erased = int(self.contains(keys).sum())
            # Should it fail half way, what is in memory is all that there is of some.
            slots = self.index.find(keys)
            self.storage.set_dirty(slots[slots != NO_SLOT], True)
        here, was_miscounted = len(self.index), self._is_miscounted
        self._is_miscounted = True  # should an interrupt come
        if self.below is not None:
            try:
                self.below.erase(keys)
            except BaseException:
                with suppress(Exception):
                    gone = (erased or 0) - int(self.contains(keys).sum())
                    if not was_miscounted:
                        self._lose(gone)
                raise
        self._may_compact = True
        with self.indexes.alone():
            self.epoch += 1  # before they go: an interrupt may come between
            if newest_lease is None:
                _native.leave(self.index.native, self.storage.native, keys)
            else:
                self._limbo.erase(self.index.native, self.storage.native, keys, newest_lease)
        erased = here - len(self.index) if erased is None else erased
        self._rows -= erased
        self._is_miscounted = was_miscounted
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
        if self._leaving:  # what is being written must be where it was
            return
        budget = _BUCKETS_PER_ERASE * work + _LEAST_BUCKETS
        with self.indexes.alone():
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
            with self.indexes.alone():
                self.epoch += 1
                _native.relocate(self.index.native, self.storage.native, entries.keys, entries.slots)
        self._compacting_from = 0 if end >= self.index.extent else end
        self.storage.release_tail()

    # ---- readers of changes

    def follow_cursors(self) -> None:
        """List changes, if anybody reads them."""
        if self.changes.are_read == self._is_tracking:
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
        """Where rows that change are listed, if anybody reads them."""
        if self.changes.are_read != self._is_tracking:
            self.follow_cursors()
        return self.changes.listed if self._is_tracking else None

    def seal(self) -> None:
        """Tell the readers of changes what changed up to now."""
        self.follow_cursors()
        try:
            if self._is_tracking and self.changes.flags_are_stale:
                self.storage.keep_keys(self.index.native)
                self.changes.flags_are_stale = False
            slots = self.find(self.changes.seal(self.storage.changed_keys if self._is_tracking else None))
            self.storage.clear_changed(slots[slots != NO_SLOT])
        except BaseException:
            self.changes.lose()  # some may be told of and flagged still
            raise
