"""One table in host memory: an index, a storage, an optimizer's settings and what happened so far."""

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _native, optim
from shoal.config import Dram, Table, format_size, get_num_threads
from shoal.errors import CapacityError, OutOfMemoryError
from shoal.index import NO_SLOT, HostIndex
from shoal.metrics import Counters
from shoal.ops.birth import birth, native_init
from shoal.records import Rows, join
from shoal.storage import DramStorage
from shoal.table.arrivals import Arrivals, alone_in, arriving
from shoal.table.below import Below, Staged
from shoal.table.changes import Changes
from shoal.table.content import TableContent, TableStats, TierStats
from shoal.table.leaving import write_now

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
# Keys of a call that go through memory together, as a part of what it holds.
_CHUNK_PART = 4


@dataclass(eq=False)
class Leaving:
    """Rows that are about to leave memory: they were chosen, and those that had changed are being written."""

    keys: Tensor
    slots: Tensor
    dirty: int  # the first so many
    packed: Sequence[Tensor]  # their rows, in pieces
    forced: bool  # even if batches on their way need them
    is_written: bool = False


class HostTable:
    """Rows of one table in host memory, and below it. Its group's lock covers every method."""

    def __init__(self, config: Table, seed: int, folder: str = "") -> None:
        self.config = config
        self.step = 0
        self.counters = Counters()
        # What every batch counts is counted where it is cheap: keys in the core, backwards under the group's lock.
        self.tally = _native.Tally()
        self.backwards = 0
        name = _native.name_hash(config.name)
        stream = _native.birth_stream(seed, name)
        self.rounding_stream = _native.rounding_stream(seed, name)
        self.init = native_init(config.init, stream)
        self.missing = self.init if config.missing == "init" else _native.Init(_native.InitKind.zeros)
        self.optimizer_hyper: MutableMapping[str, Any] = {} if config.optimizer is None else config.optimizer.hyper()
        dram = config.tier(Dram)
        self.below = Below(config, folder) if config.tiers and config.tiers[-1] is not dram else None
        self.budget: int | None = None if dram is None else dram.bytes
        if dram is None and self.below is not None:
            self.budget = _WORKING_BYTES
        # Whose rows must stay in memory: the group knows. First those of batches at work, then those of staged ones.
        self.pin: Callable[[_native.Pins, bool, bool], None] = lambda _pins, _staged, _finding: None
        self.indexes = _native.RwLock()  # the group's: held alone while the index changes
        self.clock = 0  # counts batches; what was used longest ago leaves first
        self.epoch = 0  # changes when a key that had a slot has another one, or none
        self.fetched = 0  # positions of batches whose keys were below memory
        self._promotions = self._demotions = self._left = 0
        self._is_being_filled = False  # then keys that come are not births
        self.changes = Changes()
        self._is_tracking = False
        self._hold(HostIndex(), DramStorage(config.dim, config.dtype, config.columns))
        self._rows = 0 if self.below is None else len(self.below.storage)
        # A storage failed, and then did not say what it had done: who asks for the number of rows counts them.
        self._is_miscounted = False
        self._counting = threading.Lock()  # of those who read beside each other

    def clear(self) -> None:
        """Forget every row."""
        if self.below is not None:
            self._is_miscounted = True
            self.below.clear()
        self._rows, self._is_miscounted = 0, False
        self._hold(HostIndex(), DramStorage(self.config.dim, self.config.dtype, self.config.columns))

    def take_over(self, other: "HostTable") -> None:
        """Have the rows of a table with the same config, which is not used again. REQUIRES: all are in memory."""
        self._hold(other.index, other.storage)
        self._rows = len(other)
        self.step = other.step

    def _hold(self, index: HostIndex, storage: DramStorage) -> None:
        if self._is_tracking or self.budget is not None:
            # Where there is a budget, from the first row on: a log may begin when it is full.
            storage.keep_keys(index.native)
        with alone_in(self.indexes):
            self.index = index
            self.storage = storage
            self.epoch += 1
        self.changes.lose()
        self._victims = _native.Victims()
        self._leaving: list[Leaving] = []
        self._compacting_from = 0
        self._may_compact = False
        self._limbo: list[tuple[int, Tensor]] = []
        self._update = _native.UpdateTable(storage.rows, self.rounding_stream)
        self._update.track(self.changes.listed if self._is_tracking else None)
        self._update_settings: list[Any] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of rows and index in memory."""
        return self.index.bytes + self.storage.bytes

    @property
    def raises(self) -> bool:
        """Whether gradients that are not finite are an error rather than left out."""
        return self.config.optimizer is not None and self.config.optimizer.clip.nonfinite == "raise"

    def find(self, keys: Tensor) -> Tensor:
        """The slot in memory of every key, or -1."""
        return self.index.find(keys)

    @property
    def is_full(self) -> bool:
        """Whether rows had to leave memory already."""
        return self._left > 0

    # ---- room

    def make_room(self, arrivals: Arrivals) -> None:
        """Reserve room for keys that come, or raise CapacityError. No row changes; some may leave memory."""
        more = len(arrivals.keys)
        if self.below is not None:
            self._require_place(arrivals.births)
            if not self._fits(more):
                self._evict_for(more)
        elif self.budget is not None and not self._fits(more):
            raise CapacityError(
                f"[table {self.config.name!r}] {len(self.index)} rows and {more} new ones take "
                f"{format_size(self._bytes_after(more))}; the budget is Dram({format_size(self.budget)!r}). "
                f"Raise it in Table(tiers=[Dram(...)]), or erase keys that are not needed."
            )
        self.storage.reserve(more)

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

    def _evict_for(self, more: int) -> None:
        """Let rows leave memory for others, those used longest ago; what had changed is written below first."""
        assert self.below is not None
        # Rows of batches that come leave only if no others can, and some of those that could may have been staged just
        # now; those that are being written already are waited for.
        for forced in (False, False, False, True, True):
            n = more - self.spare(more)
            if n and (leaving := self.begin_leaving(n, forced)):
                write_now(self, leaving, self.below.writing)
                self.end_leaving(leaving)
            if forced and not self._fits(more):
                self._await_others()
            if self._fits(more):
                return
        raise CapacityError(
            f"[table {self.config.name!r}] its memory of {format_size(self.budget or 0)} has room for "
            f"{self.spare(more)} of the {more} rows that a batch brings, beside {len(self.index)} that batches at work "
            f"need. Raise Dram(...) in Table(tiers=), use smaller batches, or run backwards before further forwards."
        )

    def _await_others(self) -> None:
        """Let the rows go that another thread is writing."""
        assert self.below is not None
        for leaving in tuple(self._leaving):
            with self.below.writing:  # it has it until they are written
                if leaving.is_written:
                    self.end_leaving(leaving)

    def begin_leaving(self, n: int, forced: bool = False) -> Leaving | None:
        """Choose n rows to leave, and take what is to be written of them; None where so many cannot.

        They count as clean from here on. `forced`: also rows that batches on their way will need.
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
        leaving = Leaving(keys, slots, dirty, packed, forced)
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
            done += len(rows)
        leaving.is_written = True

    def stay(self, leaving: Leaving) -> None:
        """They could not be written: they are as they were."""
        if leaving not in self._leaving:  # all rows were replaced meanwhile
            return
        self._leaving.remove(leaving)
        slots = self.index.find(leaving.keys[: leaving.dirty])  # they may have been moved meanwhile
        self.storage.set_dirty(slots[slots != NO_SLOT], True)

    def end_leaving(self, leaving: Leaving) -> None:
        """What was chosen leaves memory, if nobody needed or changed it since."""
        if leaving not in self._leaving:
            return
        self._leaving.remove(leaving)
        self._demotions += leaving.dirty
        keys, slots = leaving.keys, leaving.slots
        with alone_in(self.indexes):  # nobody finds meanwhile
            held = self.pins(staged=not leaving.forced, finding=True).has(slots) | self.storage.is_dirty(slots)
            leaves = (self.index.find(keys) == slots) & ~held
            if not bool(leaves.all()):
                keys, slots = keys[leaves], slots[leaves]
            self.index.forget(keys)
            self.epoch += leaving.forced
        self.storage.give(slots)
        self._left += len(keys)

    def pins(self, staged: bool, finding: bool = False) -> _native.Pins:
        """The slots whose rows must stay in memory. `finding`: also of batches that are being staged now. REQUIRES: the
        indexes are held then."""
        pins = _native.Pins(self.storage.rows)
        self.pin(pins, staged, finding)
        for leaving in self._leaving:
            pins.add(leaving.slots)
        return pins

    # ---- rows that come

    def fetch(self, keys: Tensor, bearing: int, staged: Staged | None = None) -> tuple[Arrivals, Tensor | None]:
        """What comes into memory of keys that are different and not in it: those below, and the births among the first
        `bearing`. Also which of the keys these are; None is all. Nothing changes."""
        if self.below is None:
            return Arrivals(keys), None
        rows, fetched = self.below.read_known(keys, staged)
        comes = fetched.clone()
        comes[:bearing] = True
        if not bool(fetched.all()):
            rows = rows[fetched]
        return Arrivals(keys[comes], rows, fetched[comes]), comes

    def write_arrivals(self, arrivals: Arrivals, slots: Tensor) -> None:
        """Write the rows of keys that came at their slots."""
        self.storage.name(slots, arrivals.keys)
        if arrivals.given is not None:
            self._put(slots, arrivals.given)
            return
        if arrivals.rows is None or arrivals.fetched is None:
            self.write_first(arrivals.keys, slots)
            return
        if not arrivals.births:
            self.storage.unpack(slots, arrivals.rows, self.clock)
            return
        if len(arrivals.rows):
            self.storage.unpack(slots[arrivals.fetched], arrivals.rows, self.clock)
        born = ~arrivals.fetched
        self.write_first(arrivals.keys[born], slots[born])

    def place(self, keys: Tensor, rows: Tensor, bags: _native.Bags, missing: _native.MissingKeys, table: int) -> None:
        """Rows that were read ahead come into memory, where they are not there yet. REQUIRES: it has room."""
        self._promotions += _native.place(
            self.index.native, self.storage.native, self.indexes, keys, rows, self.clock, bags, missing, table
        )

    def came(self, arrivals: Arrivals) -> None:
        """Count them: they are in."""
        births = arrivals.births
        if arrivals.given is None:
            self._promotions += len(arrivals.keys) - births
        if births:
            self._rows += births
            if not self._is_being_filled:
                self.counters.add("births", births)
                self.changes.add(arrivals.born)

    def tick(self) -> None:
        """A batch begins: what it uses is younger than what others used."""
        self.clock = (self.clock + 1) & 0xFFFFFF

    def write_first(self, keys: Tensor, slots: Tensor) -> None:
        """Write the first rows of new keys at their slots."""
        birth(self.storage.rows, self.init, self.storage.first_state, float(self.step), self.clock, keys, slots)

    @contextmanager
    def upserting(self, keys: Tensor) -> Iterator[Tensor]:
        """Slots of distinct keys; those without a row are born, and are gone again if the body raises."""
        slots = self.index.find(keys)
        new = slots == NO_SLOT
        if not new.any():
            yield slots
            return
        self.tick()
        self.storage.stamp(slots[~new], self.clock)
        absent = keys[new]
        arrivals, _comes = self.fetch(absent, len(absent))
        before = self.pin

        def pin(pins: _native.Pins, staged: bool, finding: bool) -> None:
            before(pins, staged, finding)
            pins.add(slots)

        self.pin = pin
        try:
            with arriving([self], [arrivals]) as (new_slots,):
                slots[new] = new_slots
                yield slots
        finally:
            self.pin = before

    def upsert(self, keys: Tensor) -> Tensor:
        """Slots of distinct keys; those without a row are born. REQUIRES: memory holds them all."""
        with self.upserting(keys) as slots:
            return slots

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
            try:
                self.below.erase(keys)
            except BaseException:
                is_known, self._is_miscounted = not self._is_miscounted, True
                with suppress(Exception):
                    gone = erased - int(self.contains(keys).sum())
                    if is_known:
                        self._lose(gone)
                raise
        with alone_in(self.indexes):
            slots = self.index.erase(keys)
        erased = len(slots) if erased is None else erased
        self._rows -= erased
        if len(slots):
            self.epoch += 1
            self._may_compact = True
            if newest_lease is None:
                self.storage.give(slots)
            else:
                self.storage.mark_erased(slots)
                self._limbo.append((newest_lease, slots))
        if erased:
            self.counters.add("erased", erased)
        return erased

    @property
    def has_limbo(self) -> bool:
        """Whether slots of erased rows wait for leases to end."""
        return bool(self._limbo)

    def leases_ended(self, oldest_lease: int | None) -> None:
        """Free the slots of erased rows that no live lease can hold; leases are numbered as they begin."""
        while self._limbo and (oldest_lease is None or self._limbo[0][0] < oldest_lease):
            self.storage.give(self._limbo.pop(0)[1])

    def compact(self, work: int) -> None:
        """Move rows out of nearly empty slabs and give these back, looking at about `work` rows' worth of the index.

        Only between leases: a lease holds slots.
        """
        if not self._may_compact or self._leaving:  # what is being written must be where it was
            return
        budget = _BUCKETS_PER_ERASE * work + _LEAST_BUCKETS
        with alone_in(self.indexes):
            index_done = self.index.shrink(budget)
        if not self.storage.sparse:
            self._compacting_from = 0
            self._may_compact = not index_done or bool(self._limbo)
            return
        end = min(self._compacting_from + budget, self.index.extent)
        entries = self.index.entries(self._compacting_from, end, self.storage.compact_from)
        if len(entries.keys):
            if self._is_tracking:  # they were listed by slot
                self.changes.add(entries.keys[self.storage.is_changed(entries.slots)])
            slots = self.storage.take(len(entries.keys))
            self.storage.move(entries.slots, slots)
            with alone_in(self.indexes):
                self.index.reassign(entries.keys, slots)
                self.epoch += 1
            self.storage.give(entries.slots)
        self._compacting_from = 0 if end >= self.index.extent else end
        self.storage.release_tail()

    def native_update(self, score: float, grad_scale: float) -> _native.UpdateTable:
        """This table's part of the backward that comes next."""
        optimizer = self.config.optimizer
        assert optimizer is not None
        self.follow_readers()
        settings = list(self.optimizer_hyper.values())
        if settings != self._update_settings or optimizer.counts_steps:
            step = optim.step(optimizer, self.optimizer_hyper, self.step + 1)
            self._update.set(
                step.kind,
                step.reduce,
                float(step.lr),
                step.settings,
                float(step.weight_decay),
                float(step.shrink),
                optimizer.clip.value or 0.0,
                optimizer.clip.norm or 0.0,
                optimizer.max_norm or 0.0,
            )
            self._update_settings = settings
        self._update.begin(score, self.clock, self.step, grad_scale)
        return self._update

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now."""
        return TableStats(
            rows=len(self),  # first: it may have to count
            bytes=self.bytes,
            index_bytes=self.index.bytes,
            storage_bytes=self.storage.bytes,
            budget_bytes=self.budget,
            step=self.step,
            counters=self.counters.snapshot()
            | {
                "lookups": self.tally.lookups,
                "hits": self.tally.hits + self.fetched,
                "steps": self.backwards,
            },
            tiers=self._tier_stats(),
        )

    def _tier_stats(self) -> tuple[TierStats, ...]:
        dirty, pinned = 0, self.pins(staged=True).count
        if self.below is not None:
            for entries in self.index.export():
                dirty += int(self.storage.is_dirty(entries.slots).sum())
        memory = TierStats(
            name="Dram",
            rows=len(self.index),
            bytes=self.bytes,
            budget_bytes=self.budget,
            index_bytes=self.index.bytes,
            hits=self.tally.hits,
            misses=self.tally.lookups - self.tally.hits,
            promotions=self._promotions,
            demotions=self._demotions,
            dirty=dirty,
            pinned=pinned,
        )
        return (memory,) if self.below is None else (memory, self.below.stats())

    # ---- rows by key

    def __len__(self) -> int:
        if self._is_miscounted:
            with self._counting:
                if self._is_miscounted:
                    self._lose(self._rows - len(self.keys()))
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

    def _absent(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of keys that are not in memory and are below: where they stand, and their rows."""
        if self.below is None or not bool((slots == NO_SLOT).any()):
            return None
        at = torch.nonzero(slots == NO_SLOT)[:, 0]
        distinct, inverse = torch.unique(keys[at], return_inverse=True)
        rows, found = self.below.read(distinct)
        has = found[inverse]
        return at[has], rows[inverse[has]]

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""
        slots = self.find(keys)
        out = self.storage.read(slots, self.missing, keys)
        if absent := self._absent(keys, slots):
            out[absent[0]] = self.storage.packed.weights(absent[1])
        return out

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""
        slots = self.find(keys)
        state = {column.name: self.storage.read_state(column, slots) for column in self.config.columns}
        if state and (absent := self._absent(keys, slots)):
            for column in self.config.columns:
                state[column.name][absent[0]] = self.storage.packed.state(column, absent[1])
        return state

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""
        slots = self.find(keys)
        scores = self.storage.read_scores(slots)
        if absent := self._absent(keys, slots):
            scores[absent[0]] = self.storage.packed.scores(absent[1])
        return scores

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        self.changes.add(distinct)
        if self.below is None:
            with self.upserting(distinct) as slots:
                self.storage.write(slots[inverse].contiguous(), weights)
            return
        self._require_place(len(distinct) - int(self.contains(distinct).sum()))
        last = torch.zeros(len(distinct), dtype=torch.int64, device="cpu")
        last.scatter_reduce_(0, inverse, torch.arange(len(keys), device="cpu"), "amax", include_self=False)
        for some in torch.arange(len(distinct), device="cpu").split(self._chunk()):
            with self.upserting(distinct[some]) as slots:
                self.storage.write(slots, weights[last[some]])

    def _chunk(self) -> int:
        """Keys that go through memory together."""
        if self.below is None or self.budget is None:
            return 1 << 62
        return max(self.spare(self.budget // self.config.row_bytes), len(self.index), _CHUNK_PART) // _CHUNK_PART

    def content(self) -> TableContent:
        """All that the table holds now."""
        keys = self.keys()
        slots = self.find(keys)
        weights = self.storage.read(slots, self.missing, keys).to(getattr(torch, self.config.dtype))
        state = {column.name: self.storage.read_state(column, slots) for column in self.config.columns}
        scores = self.storage.read_scores(slots)
        if absent := self._absent(keys, slots):
            at, rows = absent
            weights[at] = self.storage.packed.weights(rows).to(weights.dtype)
            scores[at] = self.storage.packed.scores(rows)
            for column in self.config.columns:
                state[column.name][at] = self.storage.packed.state(column, rows)
        return TableContent(keys, weights, state, scores, self.step)

    def fill(self, content: TableContent) -> None:
        """Have that content. REQUIRES: the table is empty."""
        with self.filling():
            self.put(Rows(content.keys, content.weights, content.state, content.scores))
            self.step = content.step

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Rows that are put meanwhile are no births and no changes. REQUIRES: whoever reads changes lost its place."""
        self._is_being_filled = True
        try:
            yield
        finally:
            self._is_being_filled = False

    # ---- rows that leave the process, and come to it

    def follow_readers(self) -> None:
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
        self._update.track(self.changes.listed if self._is_tracking else None)

    @property
    def listed(self) -> _native.ChangedRows | None:
        """Where rows that change are listed, if anybody reads them."""
        self.follow_readers()
        return self.changes.listed if self._is_tracking else None

    def seal(self) -> None:
        """Tell the readers of changes what changed up to now."""
        self.follow_readers()
        try:
            if self._is_tracking and self.changes.flags_are_stale:
                self.storage.keep_keys(self.index.native)
                self.changes.flags_are_stale = False
            slots = self.find(self.changes.seal(self.storage.changed_keys if self._is_tracking else None))
            self.storage.clear_changed(slots[slots != NO_SLOT])
        except BaseException:
            self.changes.lose()  # some may be told of and flagged still
            raise

    def rows(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Whole rows of distinct keys that have one, from whichever tier; and which these are."""
        slots = self.find(keys)
        found = slots != NO_SLOT
        if bool(found.all()):
            return Rows(keys, *self.storage.export(slots)), found
        here = Rows(keys[found], *self.storage.export(slots[found]))
        absent = self._absent(keys, slots)
        if absent is None:
            return here, found
        at, packed = absent
        layout = self.storage.packed
        state = {column.name: layout.state(column, packed) for column in self.config.columns}
        below = Rows(keys[at], layout.weights(packed).to(here.weights.dtype), state, layout.scores(packed))
        # In the order in which they were asked for.
        order = torch.cat([torch.nonzero(found)[:, 0], at]).argsort()
        found[at] = True
        return join([here, below]).some(order), found

    def by_bucket(self, rows_each: int) -> Iterator[Rows]:
        """All rows, in the order of their keys' buckets, in pieces."""
        chunks = [entries.keys for entries in self.index.export()]
        keys = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *chunks])
        if self.below is not None:
            keys = torch.unique(torch.cat([keys, self.below.storage.keys()]))
        order = torch.empty_like(keys)
        _native.order_by_bucket(keys, self.config.buckets, order)
        for some in order.split(rows_each):
            yield self.rows(keys[some])[0]

    def expect(self, rows: int) -> None:
        """Make room in the index for so many rows that will come, where memory has it."""
        if self.below is None and self._fits(rows):
            with alone_in(self.indexes), suppress(OutOfMemoryError):
                _native.reserve([self.index.native], [rows], get_num_threads())

    def put(self, rows: Rows) -> None:
        """Have whole rows of distinct keys, in place of those that they had."""
        if not self._is_being_filled:
            self.changes.add(rows.keys)
        for begin in range(0, len(rows.keys), piece := min(self._chunk(), len(rows.keys)) or 1):
            some = rows.some(slice(begin, begin + piece))
            slots, found = self.index.find_and_count(some.keys)
            if found == len(slots):
                self._put(slots, some)
                continue
            if found:  # first those: they may leave for the others
                here = slots != NO_SLOT
                self._put(slots[here], some.some(here))
                some = some.some(~here)
            if len(some.keys):
                self.tick()
                below = None if self.below is None else self.below.contains(some.keys)
                with arriving([self], [Arrivals(some.keys, fetched=below, given=some)]):
                    pass

    def _put(self, slots: Tensor, rows: Rows) -> None:
        self.storage.put(
            slots,
            rows.weights.contiguous(),
            {name: column.contiguous() for name, column in rows.state.items()},
            rows.scores,
            float(self.step),
            self.clock,
            changed=not self._is_being_filled,
        )

    def require_place_for(self, content: TableContent) -> None:
        """Raise CapacityError where the content is more than the table can have."""
        if self.below is not None and self.below.capacity is not None and len(content.keys) > self.below.capacity:
            raise CapacityError(
                f"[table {self.config.name!r}] {len(content.keys)} rows are more than the {self.below.capacity} that "
                f"its lowest tier takes. Raise Ssd(size=), of which rows fill half. Nothing was loaded."
            )


def filled(config: Table, seed: int, content: TableContent) -> HostTable:
    """A table with that content, all of it in memory."""
    table = HostTable(config, seed)
    table.fill(content)
    return table
