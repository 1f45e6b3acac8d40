"""One table in host memory: its rows by key, an optimizer's settings and what happened so far."""

from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.errors import OutOfMemoryError
from shoal.index import NO_SLOT, HostIndex
from shoal.metrics import Metrics
from shoal.records import Rows, join
from shoal.storage import DramStorage
from shoal.table.content import TableContent
from shoal.table.host.arrivals import Arrivals, Arriving
from shoal.table.host.arriving import ArrivingRows
from shoal.table.host.settings import Settings
from shoal.table.lower.tier import Below
from shoal.table.stats import TableStats, table_stats

# Keys of a call that go through memory together, as a part of what it holds.
_CHUNK_PART = 4


class HostTable(ArrivingRows):
    """Rows of one table in host memory, and below it. Its group's lock covers every method."""

    def __init__(self, config: Table, seed: int, folder: str = "") -> None:
        # What every batch counts is counted in the core, where it is cheap, and changes with the rows.
        self.tally = _native.Tally()
        self.rounding_stream = _native.rounding_stream(seed, _native.name_hash(config.name))
        self.optimizer_hyper: MutableMapping[str, Any] = {} if config.optimizer is None else config.optimizer.hyper()
        super().__init__(config, seed, folder)
        self.counted = Metrics(self)
        self.counted.gauges(HostTable._counted)
        self.metrics.gauges(HostTable._measured)

    def _hold(self, index: HostIndex, storage: DramStorage) -> None:
        super()._hold(index, storage)
        self._update = _native.UpdateTable(storage.rows, self.rounding_stream, self._backwards)
        self._settings = Settings(self.config.optimizer, self._update)

    @property
    def fetched(self) -> int:
        """Positions of batches whose keys were below memory."""
        return self.tally.fetched

    # ---- training, and what happened so far

    def native_update(self, score: float, grad_scale: float) -> _native.UpdateTable:
        """This table's part of the backward that comes next."""
        self._settings.refresh(self.optimizer_hyper, self.step + 1)
        self._update.begin(score, self.clock, grad_scale, self.listed)
        return self._update

    def drop_gradients(self, rows: int) -> None:
        """Count gradients that went nowhere, since their keys have no row."""
        self._backwards.dropped += rows

    def update_in_memory(self, score: float, grad_scale: float, pieces: _native.Backwards) -> _native.UpdateTable:
        """The same for a backward that comes in pieces: its last one, of the rows in memory, which counts it. `pieces`:
        what those before left out."""
        update = self._made_update(self.storage.rows, self._backwards)
        update.count_pieces(pieces)
        update.begin(score, self.clock, grad_scale, self.listed)
        return update

    def update_outside_memory(
        self, rows: _native.Rows, score: float, grad_scale: float, pieces: _native.Backwards
    ) -> _native.UpdateTable:
        """The pieces before the last one, of rows outside of memory."""
        pieces.step = self.step
        update = self._made_update(rows, pieces)
        update.begin(score, self.clock, grad_scale, None)
        return update

    def _made_update(self, rows: _native.Rows, counts: _native.Backwards) -> _native.UpdateTable:
        update = _native.UpdateTable(rows, self.rounding_stream, counts)
        Settings(self.config.optimizer, update).refresh(self.optimizer_hyper, self.step + 1)
        return update

    # ---- statistics

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now."""
        lower = None if self.below is None else self.below.metrics
        return table_stats(len(self), self.step, self.budget, self.counted, [self.metrics], lower)

    def _counted(self) -> dict[str, int]:
        return self.counters.snapshot() | {
            "lookups": self.tally.lookups,
            "hits": self.tally.hits + self.fetched,
            "steps": self._backwards.applied,
            "dropped_gradients": self._backwards.dropped,
            "skipped_rows": self._backwards.skipped,
        }

    def _measured(self) -> dict[str, int]:
        """What the tier in memory has and did."""
        entries = self.index.export() if self.below is not None else []
        return {
            "rows": len(self.index),
            "bytes": self.bytes,
            "index_bytes": self.index.bytes,
            "hits": self.tally.hits,
            "misses": self.tally.lookups - self.tally.hits,
            "dirty": sum(int(self.storage.is_dirty(some.slots).sum()) for some in entries),
            "pinned": self.pins(staged=True).count,
        }

    # ---- rows by key

    @property
    def lowest(self) -> Below | None:
        """What the table has below its memory, if anything."""
        return self.below

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""
        slots = self.find(keys)
        out = self.storage.read(slots, self.missing, keys)
        if absent := self.read_absent(keys, slots == NO_SLOT):
            out[absent[0]] = self.storage.packed.weights(absent[1])
        return out

    def weights_from(self, keys: Tensor, to_bear: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of distinct keys, which of them are in memory, and which below. `to_bear`, in order: of those
        without a row these read as they will be born."""
        slots = self.find(keys)
        out = self.storage.read(slots, self.missing, keys)
        is_here = slots != NO_SLOT
        is_below = torch.zeros_like(is_here)
        if self.below is not None and not bool(is_here.all()):
            absent = torch.nonzero(~is_here)[:, 0]
            rows, found, has = self.below.read(keys[absent])
            if has:
                at = absent[found]
                out[at] = self.storage.packed.weights(rows if has == len(rows) else rows[found])
                is_below[at] = True
        if to_bear is not None and self.config.missing != "init":
            born = ~(is_here | is_below) & torch.isin(keys, to_bear)
            out[born] = self.storage.read(slots[born], self.init, keys[born])
        return out, is_here, is_below

    def places_of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Which of distinct keys are in memory, and which below."""
        is_here = self.find(keys) != NO_SLOT
        is_below = torch.zeros_like(is_here)
        if self.below is not None:
            is_below[~is_here] = self.below.contains(keys[~is_here])
        return is_here, is_below

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""
        slots = self.find(keys)
        state = {column.name: self.storage.read_column(column, slots) for column in self.config.columns}
        if state and (absent := self.read_absent(keys, slots == NO_SLOT)):
            for column in self.config.columns:
                state[column.name][absent[0]] = self.storage.packed.column(column, absent[1])
        return state

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""
        slots = self.find(keys)
        scores = self.storage.read_scores(slots)
        if absent := self.read_absent(keys, slots == NO_SLOT):
            scores[absent[0]] = self.storage.packed.scores(absent[1])
        return scores

    def facts(self, keys: Tensor) -> dict[str, Tensor]:
        """The columns of the policies, without the score; a key without a row reads as one is born."""
        slots = self.find(keys)
        facts = {column.name: self.storage.read_column(column, slots) for column in self.storage.format.other_facts}
        if facts and (absent := self.read_absent(keys, slots == NO_SLOT)):
            for column in self.storage.format.other_facts:
                facts[column.name][absent[0]] = self.storage.packed.column(column, absent[1])
        return facts

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        if self.below is None:

            def write(slots: Tensor) -> None:
                self.changes.add(distinct)
                self.storage.write(slots[inverse].contiguous(), weights)

            self._with_rows(distinct, write)
            return
        self.below.require_place(len(distinct) - int(self.contains(distinct).sum()), self.__len__)
        last = torch.zeros(len(distinct), dtype=torch.int64, device="cpu")
        last.scatter_reduce_(0, inverse, torch.arange(len(keys), device="cpu"), "amax", include_self=False)
        for some in torch.arange(len(distinct), device="cpu").split(self._chunk()):

            def write_some(slots: Tensor, some: Tensor = some) -> None:
                self.changes.add(distinct[some])
                self.storage.write(slots, weights[last[some]])

            self._with_rows(distinct[some], write_some)

    def _chunk(self) -> int:
        """Keys that go through memory together."""
        if self.below is None or self.budget is None:
            return 1 << 62
        return max(self.room.spare(self.budget // self.config.row_bytes), len(self.index), _CHUNK_PART) // _CHUNK_PART

    def content(self) -> TableContent:
        """All that the table holds now."""
        keys = self.keys()
        slots = self.find(keys)
        weights = self.storage.read(slots, self.missing, keys).to(getattr(torch, self.config.dtype))
        state = {column.name: self.storage.read_column(column, slots) for column in self.config.columns}
        scores = self.storage.read_scores(slots)
        facts = {column.name: self.storage.read_column(column, slots) for column in self.storage.format.other_facts}
        if absent := self.read_absent(keys, slots == NO_SLOT):
            at, rows = absent
            weights[at] = self.storage.packed.weights(rows).to(weights.dtype)
            scores[at] = self.storage.packed.scores(rows)
            for columns in (state, facts):
                for name, values in columns.items():
                    values[at] = self.storage.packed.column(self.storage.format.column(name), rows)
        return TableContent(keys, weights, state, scores, self.step, facts, dict(self.policy_state))

    def fill(self, content: TableContent) -> None:
        """Have that content. REQUIRES: the table is empty."""
        with self.filling():
            self.put(Rows(content.keys, content.weights, content.state, content.scores, content.facts))
            self.step = content.step
            self.policy_state = deepcopy(dict(content.policy_state))

    # ---- rows that leave the process, and come to it

    def rows(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Whole rows of distinct keys that have one, from whichever tier; and which these are."""
        slots = self.find(keys)
        found = slots != NO_SLOT
        if bool(found.all()):
            return Rows(keys, *self.storage.export(slots)), found
        here = Rows(keys[found], *self.storage.export(slots[found]))
        absent = self.read_absent(keys, ~found)
        if absent is None:
            return here, found
        at, packed = absent
        layout, format = self.storage.packed, self.storage.format
        state = {column.name: layout.column(column, packed) for column in format.state}
        facts = {column.name: layout.column(column, packed) for column in format.other_facts}
        below = Rows(keys[at], layout.weights(packed).to(here.weights.dtype), state, layout.scores(packed), facts)
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
        if self.below is None and self.room.fits(rows):
            with self.indexes.exclusive(), suppress(OutOfMemoryError):
                self.index.reserve(rows)

    def put(self, rows: Rows) -> None:
        """Have whole rows of distinct keys, in place of those that they had."""
        for begin in range(0, len(rows.keys), piece := min(self._chunk(), len(rows.keys)) or 1):
            some = rows.some(slice(begin, begin + piece))
            slots, found = self.index.find_and_count(some.keys)
            if found == len(slots):
                self._replace(slots, some)
                continue
            if found:  # first those: they may leave for the others
                here = slots != NO_SLOT
                self._replace(slots[here], some.some(here))
                some = some.some(~here)
            if len(some.keys):
                self.tick()
                below = None if self.below is None else self.below.contains(some.keys)
                with Arriving([self], [Arrivals(some.keys, fetched=below, given=some)]):
                    if not self._is_being_filled:
                        self.changes.add(some.keys)

    def _replace(self, slots: Tensor, rows: Rows) -> None:
        if not self._is_being_filled:
            self.changes.add(rows.keys)
        self._put(slots, rows)


def filled(config: Table, seed: int, content: TableContent) -> HostTable:
    """A table with that content, all of it in memory."""
    table = HostTable(config, seed)
    table.fill(content)
    return table
