"""One table in device memory, as its handle sees it. Its methods may wait for the device."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.config import Column
from shoal.errors import CapacityError
from shoal.metrics import Counters
from shoal.storage.hbm import CHANGED_AND_DIRTY_FLAGS, ERASED_FLAG
from shoal.table.content import TableContent, TableStats, TierStats
from shoal.table.device_rows import DeviceRows, budgets, last_tier


class DeviceTable:
    """Rows of one table in device memory. Its group's lock covers every method."""

    def __init__(self, rows: DeviceRows, number: int) -> None:
        self.config = rows.configs[number]
        self.counters = Counters()
        self.backwards = 0
        self.optimizer_hyper: Mapping[str, Any] = {}
        if self.config.optimizer is not None:
            self.optimizer_hyper = self.config.optimizer.hyper()
        self._rows = rows
        self._number = number
        self._family = rows.families[number]
        # Slots of erased rows, and of their copies above, with the newest lease that may hold them.
        self._limbo: list[tuple[int, Tensor, Tensor]] = []

    @property
    def step(self) -> int:
        """How many backwards were applied."""
        return int(self._rows.steps[self._number])

    @property
    def raises(self) -> bool:
        """Whether gradients that are not finite are an error rather than left out."""
        return self.config.optimizer is not None and self.config.optimizer.clip.nonfinite == "raise"

    def __len__(self) -> int:
        return int(self._rows.ledger.keys[self._number])

    def keys(self) -> Tensor:
        """Every key, in ascending order."""
        return self._rows.index.entries(self._number)[0].sort().values

    def _find(self, keys: Tensor) -> Tensor:
        return self._rows.find_rows(self._number, keys)

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""
        return self._find(keys) >= 0

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""
        slots = self._find(keys)
        weights = self._rows.storage.read(self._family, slots)
        dtype = getattr(torch, self.config.dtype)
        if self.config.missing == "zero":
            unborn = torch.zeros_like(weights)
        else:
            unborn = self._rows.first_rows(self._number, keys).to(dtype).to(torch.float32)
        return torch.where((slots >= 0)[:, None], weights, unborn)

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""
        slots = self._find(keys)
        return {column.name: self._read_state(column, slots) for column in self.config.columns}

    def _read_state(self, column: Column, slots: Tensor) -> Tensor:
        held = self._rows.storage.read_state(self._family, column, slots)
        return torch.where((slots >= 0)[:, None], held, torch.full_like(held, column.initial))

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""
        slots = self._find(keys)
        held = self._rows.storage.read_scores(self._family, slots)
        return torch.where(slots >= 0, held, torch.full_like(held, torch.nan))

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        self._upsert(distinct)
        slots = self._find(distinct)
        last = torch.zeros_like(distinct).scatter_reduce_(
            0, inverse, torch.arange(len(keys), device=keys.device), "amax", include_self=False
        )
        self._rows.storage.write(self._family, slots, weights[last])
        self._rows.storage.add_flags(self._family, slots, CHANGED_AND_DIRTY_FLAGS)

    def _upsert(self, distinct: Tensor) -> Tensor:
        """The slots of keys, which are born where they have none; of tables with tiers, those below."""
        held = self._find(distinct) >= 0
        self._rows.require_room(self._number, len(self) + int((~held).sum()))
        slots = self._rows.upsert(self._number, distinct)
        if bool((slots < 0).any()):
            raise CapacityError(
                f"[table {self.config.name!r}] {int((slots < 0).sum())} keys found no room. Raise "
                f"{last_tier(self.config)}(...) in Table(tiers=)."
            )
        return slots

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""
        slots, copies = self._rows.erase(self._number, torch.unique(keys))
        if len(slots):
            self.counters.add("erased", len(slots))
            if newest_lease is not None:
                self._rows.storage.add_flags(self._family, torch.cat([slots, copies]), ERASED_FLAG)
            elif self._freed(slots, copies):
                return len(slots)
            self._limbo.append((newest_lease or 0, slots, copies))
            self._rows.hold(self._number, len(slots))
        return len(slots)

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
        self._rows.clear(self._number)
        for _lease, slots, copies in self._limbo:
            self._rows.give(self._number, slots, copies[:0])  # all slots above are free by now
            self._rows.hold(self._number, -len(slots))
        self._limbo.clear()

    def content(self) -> TableContent:
        """All that the table holds now."""
        keys = self.keys()
        weights = self.lookup(keys).to(getattr(torch, self.config.dtype))
        return TableContent(keys, weights, self.state(keys), self.scores(keys), self.step)

    def fill(self, content: TableContent) -> None:
        """Have this content instead. REQUIRES: it fits the config, and there is room."""
        device = self._rows.device
        self.clear()
        slots = self._upsert(content.keys.to(device))
        storage = self._rows.storage
        storage.write(self._family, slots, content.weights.to(device).to(torch.float32))
        for column in self.config.columns:
            if column.name in content.state:
                storage.write_state(self._family, column, slots, content.state[column.name].to(device))
        storage.write_scores(self._family, slots, content.scores.to(device))
        self._rows.steps[self._number] = content.step

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now. Slabs are shared by tables of one layout: bytes are its own rows'."""
        counted = self._rows.counted(self._number)
        tiers = self._tiers(counted)
        index_bytes = sum(tier.index_bytes for tier in tiers)
        size = sum(tier.bytes for tier in tiers)
        return TableStats(
            rows=len(self),
            bytes=size,
            index_bytes=index_bytes,
            storage_bytes=size - index_bytes,
            budget_bytes=tiers[-1].budget_bytes,
            step=self.step,
            counters=self.counters.snapshot() | counted | {"steps": self.step},
            tiers=tiers,
        )

    def _tiers(self, counted: Mapping[str, int]) -> tuple[TierStats, ...]:
        rows, above, row_bytes = len(self), self._rows.above, self._rows.layout(self._number).row_bytes
        index_bytes = self._rows.index.bytes(self._number)
        last = TierStats(
            name=last_tier(self.config),
            rows=rows,
            bytes=index_bytes + rows * row_bytes,
            budget_bytes=budgets(self.config)[-1],
            index_bytes=index_bytes,
            hits=counted["hits"],
            misses=counted["lookups"] - counted["hits"],
            capacity=self._rows.capacity(self._number),
        )
        if above is None or not above.has(self._number):
            return (last,)
        copies, dirty, pinned = above.held(self._number, self._rows.oldest_at_work())
        promoted, demoted = above.counted(self._number)
        not_above = self._rows.not_above(self._number)
        first = TierStats(
            name="Hbm",
            rows=copies,
            bytes=above.bytes(self._number),
            budget_bytes=budgets(self.config)[0],
            index_bytes=above.index.bytes(self._number),
            hits=counted["lookups"] - not_above,
            misses=not_above,
            promotions=promoted,
            demotions=demoted,
            dirty=dirty,
            pinned=pinned,
            capacity=above.most[self._number],
        )
        last = replace(
            last,
            hits=not_above - last.misses,
            read_bytes=promoted * row_bytes,
            written_bytes=demoted * row_bytes,
        )
        return first, last
