"""One table on a device, as its handle sees it. Its methods may wait for the device."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Column
from shoal.errors import CapacityError
from shoal.metrics import Counters, Metrics
from shoal.records import Rows
from shoal.storage.hbm import CHANGED_FLAG, CHANGED_FLAGS, ERASED_FLAG
from shoal.table.changes import Changes
from shoal.table.content import TableContent
from shoal.table.device.residency import DeviceMemory
from shoal.table.device.room import last_tier
from shoal.table.device.rows import DeviceRows
from shoal.table.device.tiers import memory_tiers
from shoal.table.lower.tier import Below
from shoal.table.stats import TableStats, table_stats


class DeviceTable:
    """Rows of one table on a device, and below it. Its group's lock covers every method."""

    def __init__(self, rows: DeviceRows, number: int, folder: str = "") -> None:
        self.config = rows.configs[number]
        self.counters = Counters()
        self.backwards = 0
        self.policy_state: dict[str, Any] = {}  # what its policies remember, of what JSON has
        self.optimizer_hyper: MutableMapping[str, Any] = {}
        if self.config.optimizer is not None:
            self.optimizer_hyper = self.config.optimizer.hyper()
        self._rows = rows
        self._number = number
        self._family = rows.families[number]
        self._packed = rows.storage.families[self._family].packed
        self.changes = Changes(self)
        self.below = None
        if number in rows.deep:
            self.below = DeviceMemory(rows, number, self.changes, folder, self.counters)
        self.counted = Metrics(self)
        self.counted.gauges(DeviceTable._counted)
        self._memory = memory_tiers(rows, number, self.below)
        # Slots of erased rows, and of their copies above, with the newest lease that may hold them.
        self._limbo: list[tuple[int, Tensor, Tensor]] = []

    @property
    def step(self) -> int:
        """How many backwards were applied."""
        return int(self._rows.steps[self._number])

    @step.setter
    def step(self, step: int) -> None:
        self._rows.steps[self._number] = step

    def __len__(self) -> int:
        return int(self._rows.ledger.keys[self._number]) + (0 if self.below is None else self.below.away)

    def keys(self) -> Tensor:
        """Every key, in ascending order."""
        keys = self._rows.index.entries(self._number)[0]
        if self.below is None:
            return keys.sort().values
        everywhere: Tensor = torch.unique(torch.cat([keys, self.below.lower.storage.keys().to(keys.device)]))
        return everywhere

    @property
    def lowest(self) -> Below | None:
        """What the table has below its memory, if anything."""
        return None if self.below is None else self.below.lower

    def lost(self, keys: Tensor) -> Tensor:
        """Of keys whose rows below could not be read, those that have no other row and still cannot be."""
        assert self.below is not None
        return self.below.lost(keys)

    def _find(self, keys: Tensor) -> Tensor:
        return self._rows.find_rows(self._number, keys)

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""
        found = self._find(keys) >= 0
        return found if self.below is None else self.below.find_below(keys, found)

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""
        slots = self._find(keys)
        weights = self._rows.storage.read(self._family, slots)
        absent = self._absent(keys, slots)
        dtype = getattr(torch, self.config.dtype)
        if self.config.missing == "zero":
            unborn = torch.zeros_like(weights)
        else:
            unborn = self._rows.first_rows(self._number, keys).to(dtype).to(torch.float32)
        out = torch.where((slots >= 0)[:, None], weights, unborn)
        if absent is not None:
            out[absent[0]] = self._packed.weights(absent[1])
        return out

    def _absent(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of keys that have no slot and are below: their positions, and their rows."""
        return None if self.below is None else self.below.read_absent(keys, slots < 0)

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""
        slots = self._find(keys)
        state = {column.name: self._read_state(column, slots) for column in self.config.columns}
        if state and (absent := self._absent(keys, slots)):
            for column in self.config.columns:
                state[column.name][absent[0]] = self._packed.column(column, absent[1])
        return state

    def _read_state(self, column: Column, slots: Tensor) -> Tensor:
        held = self._rows.storage.read_state(self._family, column, slots)
        return torch.where((slots >= 0)[:, None], held, torch.full_like(held, column.initial))

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""
        slots = self._find(keys)
        held = self._rows.storage.read_scores(self._family, slots)
        scores = torch.where(slots >= 0, held, torch.full_like(held, torch.nan))
        if absent := self._absent(keys, slots):
            scores[absent[0]] = self._packed.scores(absent[1])
        return scores

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        last = torch.zeros_like(distinct).scatter_reduce_(
            0, inverse, torch.arange(len(keys), device=keys.device), "amax", include_self=False
        )
        if self.below is not None:
            self.below.require_place(len(distinct) - int(self.contains(distinct).sum()))
        for some in self._chunks(len(distinct)):
            self._upsert(distinct[some])
            slots = self._find(distinct[some])
            self._rows.storage.write(self._family, slots, weights[last[some]])
            self._rows.storage.add_flags(self._family, slots, CHANGED_FLAGS)

    def _chunks(self, n: int) -> Iterator[Tensor]:
        """Of so many keys those that go through memory together."""
        size = n or 1 if self.below is None else self.below.chunk
        yield from torch.arange(n, device=self._rows.device).split(size)

    def _upsert(self, distinct: Tensor) -> Tensor:
        """The slots of keys, which are born where they have none; of tables with tiers, those below."""
        stamp = 0
        if self.below is None:
            held = self._find(distinct) >= 0
            self._rows.require_room(self._number, len(self) + int((~held).sum()))
        else:
            pins = self._rows.pin()
            self.below.reach(distinct, pins, bearing=True)
            stamp = pins.stamp
        slots = self._rows.upsert(self._number, distinct, stamp=stamp)
        if bool((slots < 0).any()):
            raise CapacityError(
                f"[table {self.config.name!r}] {int((slots < 0).sum())} keys found no room. Raise "
                f"{last_tier(self.config)}(...) in Table(tiers=)."
            )
        return slots

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""
        distinct = torch.unique(keys)
        if self.changes.has_cursors:
            self.changes.add(distinct[self.contains(distinct)].cpu())
        erased = 0 if self.below is None else self.below.erase(distinct)
        slots, copies = self._rows.erase(self._number, distinct)
        erased += len(slots)
        if erased:
            self.counters.add("erased", erased)
        if len(slots):
            if newest_lease is not None:
                self._rows.storage.add_flags(self._family, torch.cat([slots, copies]), ERASED_FLAG)
            elif self._freed(slots, copies):
                return erased
            self._limbo.append((newest_lease or 0, slots, copies))
            self._rows.hold(self._number, len(slots))
        return erased

    @property
    def has_limbo(self) -> bool:
        """Whether slots of erased rows wait for leases to end."""
        return bool(self._limbo)

    def leases_ended(self, oldest_lease: int | None) -> None:
        """Free the slots of erased rows that no live lease can hold; leases are numbered as they begin."""
        while self._limbo and (oldest_lease is None or self._limbo[0][0] < oldest_lease):
            _lease, slots, copies = self._limbo[0]
            if not self._freed(slots, copies):
                return
            self._limbo.pop(0)
            self._rows.hold(self._number, -len(slots))

    def _freed(self, slots: Tensor, copies: Tensor) -> bool:
        """Free slots; where there is no memory for the list of them, that is for a later call."""
        try:
            self._rows.give(self._number, slots, copies)
        except torch.OutOfMemoryError:
            return False
        return True

    def compact(self, work: int) -> None:
        """Nothing: new rows take the slots of erased ones, and slabs are kept."""

    def clear(self) -> None:
        """Forget every row."""
        self.changes.lose()
        if self.below is not None:
            self.below.clear()
        self._rows.clear(self._number)
        for _lease, slots, copies in self._limbo:
            self._rows.give(self._number, slots, copies[:0])  # all slots above are free by now
            self._rows.hold(self._number, -len(slots))
        self._limbo.clear()

    def content(self) -> TableContent:
        """All that the table holds now."""
        keys = self.keys()
        weights = self.lookup(keys).to(getattr(torch, self.config.dtype))
        return TableContent(
            keys, weights, self.state(keys), self.scores(keys), self.step, policy_state=dict(self.policy_state)
        )

    def fill(self, content: TableContent) -> None:
        """Set rows and step to that content. REQUIRES: the table is empty."""
        with self.filling():
            self.put(Rows(content.keys, content.weights, content.state, content.scores))
            self.step = content.step
            self.policy_state = deepcopy(dict(content.policy_state))

    # ---- rows that leave the process, and come to it

    @property
    def rows_counted(self) -> int:
        """How many it has."""
        return len(self)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Rows that are put meanwhile are no births, and no changes. REQUIRES: every cursor has lost its place."""
        births = self._rows.births_of(self._number)
        try:
            yield
        finally:
            self._rows.returned(self._number, self._rows.births_of(self._number) - births)

    def follow_cursors(self) -> None:
        """Nothing: flags are kept whether anybody reads them or not."""

    def seal(self) -> None:
        """Tell the cursors what changed up to now."""
        if not self.changes.has_cursors:
            return
        keys, _slots = self._rows.index.entries(self._number)
        slots = self._find(keys)
        flags = self._rows.storage.read_flags(self._family, slots)
        changed = (flags & CHANGED_FLAG) != 0
        self.changes.add(keys[changed].cpu())
        self.changes.seal()
        self._rows.storage.set_flags(self._family, slots[changed], flags[changed] & ~CHANGED_FLAG)

    def rows(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Whole rows, on the host, of distinct keys of the host that have one; and which these are."""
        wanted = keys.to(self._rows.device)
        has = self.contains(wanted)
        if not bool(has.all()):
            wanted = wanted[has]
        weights = self.lookup(wanted).to(getattr(torch, self.config.dtype)).cpu()
        state = {name: column.cpu() for name, column in self.state(wanted).items()}
        return Rows(wanted.cpu(), weights, state, self.scores(wanted).cpu()), has.cpu()

    def by_bucket(self, rows_each: int) -> Iterator[Rows]:
        """All rows, in the order of their keys' buckets, in pieces on the host."""
        keys = self.keys().cpu()
        order = torch.empty_like(keys)
        _native.order_by_bucket(keys, self.config.buckets, order)
        for some in order.split(rows_each):
            yield self.rows(keys[some])[0]

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""
        if self.below is not None:
            self.below.lower.require_load(rows)
        else:
            self._rows.require_room(self._number, rows, held=False)  # what leases hold is cleared first

    def require_more(self, rows: int) -> None:
        """Raise CapacityError where the table cannot have so many rows more."""
        if self.below is not None:
            self.below.require_place(rows)
        else:
            self._rows.require_room(self._number, len(self) + rows)

    def expect(self, rows: int) -> None:
        """Nothing: room is made for each piece."""

    def put(self, rows: Rows) -> None:
        """Have whole rows of distinct keys, in place of those that they had."""
        device, storage = self._rows.device, self._rows.storage
        if self.below is not None:
            keys = rows.keys.to(device)
            self.below.require_place(len(keys) - int(self.contains(keys).sum()))
        for chunk in self._chunks(len(rows.keys)):
            some = rows.some(chunk.to(rows.keys.device))
            keys = some.keys.to(device)
            self._upsert(keys)
            slots = self._find(keys)
            storage.write(self._family, slots, some.weights.to(device).to(torch.float32))
            for column in self.config.columns:
                given = some.state.get(column.name)
                if given is None:
                    given = torch.full((len(keys), column.width), column.initial)
                storage.write_state(self._family, column, slots, given.to(device))
            scores = torch.full((len(keys),), float(self.step), dtype=torch.float64)
            storage.write_scores(self._family, slots, (scores if some.scores is None else some.scores).to(device))
            storage.add_flags(self._family, slots, CHANGED_FLAGS)

    # ---- statistics

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now. Slabs are shared by tables of one layout: bytes are its own rows'."""
        budget, lower = self._rows.budget(self._number), None if self.lowest is None else self.lowest.metrics
        return table_stats(len(self), self.step, budget, self.counted, self._memory, lower)

    def _counted(self) -> dict[str, int]:
        return self.counters.snapshot() | self._rows.counted(self._number) | {"steps": self.step}
