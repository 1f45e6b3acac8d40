"""One table in host memory: an index, a storage, an optimizer's settings and what happened so far."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal import _native, optim
from shoal.config import Dram, Table, format_size
from shoal.errors import CapacityError
from shoal.index import NO_SLOT, HostIndex, insert
from shoal.metrics import Counters
from shoal.ops.birth import birth, native_init
from shoal.storage import DramStorage
from shoal.table.content import TableContent, TableStats

# Compaction looks at this many buckets for each row that was erased or each key of a batch: it ends within the calls
# that made it necessary, and none of them waits for much more than its own work.
_BUCKETS_PER_ERASE = 4
_LEAST_BUCKETS = 1024


class HostTable:
    """Rows of one table in host memory. Its group's lock covers every method."""

    def __init__(self, config: Table, seed: int) -> None:
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
        self.optimizer_hyper: Mapping[str, Any] = {} if config.optimizer is None else config.optimizer.hyper()
        tiers = config.tiers or (Dram(),)
        self.budget = tiers[0].bytes
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self._hold(HostIndex(), DramStorage(self.config.dim, self.config.dtype, self.config.columns))

    def take_over(self, other: "HostTable") -> None:
        """Have the rows of a table with the same config, which is not used again."""
        self._hold(other.index, other.storage)
        self.step = other.step

    def _hold(self, index: HostIndex, storage: DramStorage) -> None:
        self.index = index
        self.storage = storage
        self._compacting_from = 0
        self._may_compact = False
        self._limbo: list[tuple[int, Tensor]] = []
        self._update = _native.UpdateTable(storage.rows, self.rounding_stream)
        self._update_settings: list[Any] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of rows and index."""
        return self.index.bytes + self.storage.bytes

    @property
    def raises(self) -> bool:
        """Whether gradients that are not finite are an error rather than left out."""
        return self.config.optimizer is not None and self.config.optimizer.clip.nonfinite == "raise"

    def find(self, keys: Tensor) -> Tensor:
        """The slot of every key, or -1."""
        return self.index.find(keys)

    def make_room(self, more: int) -> None:
        """Reserve room for `more` new keys, or raise CapacityError; no row changes."""
        if self.budget is not None:
            wanted = self.index.bytes_after(more) + self.storage.bytes_after(more)
            if wanted > self.budget:
                raise CapacityError(
                    f"[table {self.config.name!r}] {len(self.index)} rows and {more} new ones take "
                    f"{format_size(wanted)}; the budget is Dram({format_size(self.budget)!r}). "
                    f"Raise it in Table(tiers=[Dram(...)]), or erase keys that are not needed."
                )
        self.storage.reserve(more)

    def write_first(self, keys: Tensor, slots: Tensor) -> None:
        """Write the first rows of new keys at their slots."""
        birth(self.storage.rows, self.init, self.storage.first_state, float(self.step), keys, slots)

    @contextmanager
    def upserting(self, keys: Tensor) -> Iterator[Tensor]:
        """Slots of distinct keys; those without a row are born, and are gone again if the body raises."""
        slots = self.index.find(keys)
        new = slots == NO_SLOT
        if new.any():
            with births([self], [keys[new]]) as (new_slots,):
                slots[new] = new_slots
                yield slots
        else:
            yield slots

    def upsert(self, keys: Tensor) -> Tensor:
        """Slots of distinct keys; those without a row are born."""
        with self.upserting(keys) as slots:
            return slots

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""
        slots = self.index.erase(keys)
        if len(slots):
            self._may_compact = True
            if newest_lease is None:
                self.storage.give(slots)
            else:
                self.storage.mark_erased(slots)
                self._limbo.append((newest_lease, slots))
            self.counters.add("erased", len(slots))
        return len(slots)

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
        if not self._may_compact:
            return
        budget = _BUCKETS_PER_ERASE * work + _LEAST_BUCKETS
        index_done = self.index.shrink(budget)
        if not self.storage.sparse:
            self._compacting_from = 0
            self._may_compact = not index_done or bool(self._limbo)
            return
        end = min(self._compacting_from + budget, self.index.extent)
        entries = self.index.entries(self._compacting_from, end, self.storage.compact_from)
        if len(entries.keys):
            slots = self.storage.take(len(entries.keys))
            self.storage.move(entries.slots, slots)
            self.index.reassign(entries.keys, slots)
            self.storage.give(entries.slots)
        self._compacting_from = 0 if end >= self.index.extent else end
        self.storage.release_tail()

    def native_update(self, score: float, grad_scale: float) -> _native.UpdateTable:
        """This table's part of the backward that comes next."""
        optimizer = self.config.optimizer
        assert optimizer is not None
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
        self._update.begin(score, self.step, grad_scale)
        return self._update

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now."""
        return TableStats(
            rows=len(self.index),
            bytes=self.bytes,
            index_bytes=self.index.bytes,
            storage_bytes=self.storage.bytes,
            budget_bytes=self.budget,
            step=self.step,
            counters=self.counters.snapshot()
            | {"lookups": self.tally.lookups, "hits": self.tally.hits, "steps": self.backwards},
        )

    # ---- rows by key

    def __len__(self) -> int:
        return len(self.index)

    def keys(self) -> Tensor:
        """Every key, in ascending order."""
        chunks = [entries.keys for entries in self.index.export()]
        return torch.cat(chunks).sort().values if chunks else torch.empty(0, dtype=torch.int64, device="cpu")

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""
        return self.find(keys) != NO_SLOT

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""
        return self.storage.read(self.find(keys), self.missing, keys)

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""
        slots = self.find(keys)
        return {column.name: self.storage.read_state(column, slots) for column in self.config.columns}

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""
        return self.storage.read_scores(self.find(keys))

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        with self.upserting(distinct) as slots:
            self.storage.write(slots[inverse].contiguous(), weights)

    def content(self) -> TableContent:
        """All that the table holds now."""
        keys = self.keys()
        weights = self.lookup(keys).to(getattr(torch, self.config.dtype))
        return TableContent(keys, weights, self.state(keys), self.scores(keys), self.step)


def filled(config: Table, seed: int, content: TableContent) -> HostTable:
    """A table with that content."""
    table = HostTable(config, seed)
    slots = table.upsert(content.keys)
    table.storage.write(slots, content.weights.to(torch.float32))
    for column in config.columns:
        if column.name in content.state:
            table.storage.write_state(column, slots, content.state[column.name])
    table.storage.write_scores(slots, content.scores)
    table.step = content.step
    return table


@contextmanager
def births(tables: Sequence[HostTable], keys: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Rows for keys that are in none of the tables, each once: their slots. If the body raises, no key is in."""
    for table, born in zip(tables, keys, strict=True):
        table.make_room(len(born))
    slots: list[Tensor] = []
    try:
        for table, born in zip(tables, keys, strict=True):
            slots.append(table.storage.take(len(born)))
        insert([table.index for table in tables], keys, slots)
        for table, born, taken in zip(tables, keys, slots, strict=True):
            table.write_first(born, taken)
        yield slots
    except BaseException:
        # Without asking for memory: it may be what is missing.
        for table, born in zip(tables, keys, strict=True):
            table.index.forget(born)
        for table, taken in zip(tables, slots, strict=False):
            table.storage.give(taken)
        raise
    for table, born in zip(tables, keys, strict=True):
        table.counters.add("births", len(born))
