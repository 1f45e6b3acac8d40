"""A batch on its way to a device's tables: its rows come up ahead of its lookup, while the device works.

Staging only places. Rows that a storage has are read without the group's lock; those that kernels reach are brought up
on a stream of their own. Births and scores are the lookup's, and so is what a table counts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.table.device.missing import Missing
from shoal.table.device.plan import DevicePlan
from shoal.table.device.residency import DeviceMemory
from shoal.table.device.rows import Pins
from shoal.table.lower.departures import Departure, Departures
from shoal.table.lower.staging import StagedBatch
from shoal.table.lower.tier import Below
from shoal.table.staging import address_of
from shoal.torch_private import version_of

if TYPE_CHECKING:
    from shoal.table.device.group import DeviceGroup


class DeviceStaging(StagedBatch):
    """A staged batch of tables on a device."""

    in_loop = False
    group: "DeviceGroup"

    def __init__(self, group: "DeviceGroup", plan: DevicePlan, values: Tensor, offsets: Tensor) -> None:
        super().__init__(group, values)
        self.plan = plan
        self.waits = plan.deep
        self.values, self.offsets = values.contiguous(), offsets.contiguous()
        self.births: dict[int, int] = {}  # of its keys those that had no row, by table
        self.ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(values.device))
            for tensor in (self.values, self.offsets):
                tensor.record_stream(group.placing_stream)
        self._as_found = version_of(values), version_of(offsets)
        self._offsets_at = address_of(offsets)
        self._missing: dict[int, Missing] = {}
        self._epochs: list[int] = []
        self._is_found = self._is_placed = False
        self.number = group.number_ahead()
        group.staged[self.address] = self

    @property
    def pins(self) -> Pins:
        """Which rows are in use now. REQUIRES: the group's lock is held."""
        return self.group.pins_of(self.number)

    def is_of(self, values: Tensor, offsets: Tensor) -> bool:
        """Whether these are the batch's tensors, and were not written to since."""
        return (
            not values.is_inference()
            and address_of(offsets) == self._offsets_at
            and (version_of(values), version_of(offsets)) == self._as_found
        )

    def is_still_right(self, plan: DevicePlan) -> bool:
        """Whether all its rows are where kernels reach them, or nowhere."""
        return (
            self._is_placed
            and plan is self.plan
            and self._epochs == self._epochs_now()
            and not any(staged.is_spoiled for staged in self.answers.values())
        )

    def _deep(self) -> list[int]:
        tables = {part.table for part in self.plan.parts}
        return sorted(number for number in tables if self.group.tables[number].below is not None)

    def _epochs_now(self) -> list[int]:
        return [self.group.below(number).epoch for number in self._deep()]

    def _lower(self, number: int) -> Below:
        return self.group.below(number).lower

    def _budget(self, number: int) -> int | None:
        return self.group.below(number).budget

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.ready is None else torch.cuda.stream(self.group.placing_stream)

    # ---- from storages

    def find(self, threads: int = 1) -> None:
        """Find what no memory has that kernels reach."""
        if self.plan.deep and self.values.numel() and not self._is_found and not self._is_released:
            self._is_found = True
            try:
                self._find()
            finally:
                if self._is_released:  # meanwhile: what it listens to since must not go on
                    self.release()

    def _find(self) -> None:
        group = self.group
        for number in self._deep():
            self.answers[number] = self._lower(number).listen()
        self._epochs = self._epochs_now()
        with self._on_stream():
            if self.ready is not None:
                torch.cuda.current_stream(self.values.device).wait_event(self.ready)
            with group.reading():
                found = group.missing.launch(self.plan, self.values, self.offsets, self.pins)
            self._missing = dict(group.missing.read(found, self.values))
        for number, missing in self._missing.items():
            self._lower(number).ask(self.answers[number], missing.keys)

    # ---- to where kernels reach them, and up

    def has_room(self) -> bool:
        """False: only the device knows, and waiting for it is for threads."""
        return False

    def place_into_room(self, threads: int) -> bool:
        """Nothing, for the same reason."""
        return False

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put what was read in memory, and bring the batch's rows up. `may_wait`, asked where other batches hold all of
        it, waits for a while and says whether to try again; where not, the lookup will have to do it."""
        self._is_placed = not self._missing or self._put(may_wait)
        if self.plan.tiered:
            self.group.place(self)

    def _put(self, may_wait: Callable[[], bool]) -> bool:
        """Put what was read in memory; says whether it is all there."""
        waiting = list(self._missing)
        while waiting:
            departures = Departures()
            with self._on_stream(), self.group.writing():
                if not self._is_wanted:
                    return False
                waiting = [number for number in waiting if not self._has_put(number)]
                if waiting:
                    departures = self._begin_departures(waiting)
            if waiting and not departures and not may_wait():
                return False
            self._end_departures(departures)
        with self._on_stream(), self.group.writing():
            return all(self._is_known(number) for number in self._missing)

    def _has_put(self, number: int) -> bool:
        below, staged = self.group.below(number), self.answers[number]
        if below.spare() < len(self._missing[number].keys):
            return False
        keys, rows = staged.place()
        absent = below.is_absent(keys)
        if len(keys):
            below.insert(keys[absent], rows[absent], self.pins.stamp)
        return True

    def _is_known(self, number: int) -> bool:
        """Whether each key that was missing is in memory now, and stays, or is known to be nowhere."""
        below, missing = self.group.below(number), self._missing[number]
        below.keep(missing.keys, self.pins)
        absent = below.is_absent(missing.keys)
        self.births[number] = int((absent & missing.trains).sum())
        return bool(self.answers[number].known(missing.keys[absent])[0].all())

    def _add_departure(self, number: int, departures: Departures) -> None:
        below, keys = self.group.below(number), self._missing[number].keys
        below.keep(keys, self.pins)  # what others brought meanwhile stays
        if chosen := below.begin_departure(len(keys) - below.spare(), self.pins):
            departures.add(below, chosen, below.lower.writing, partial(self._end_departure, below, chosen))

    def _end_departure(self, below: DeviceMemory, departure: Departure) -> None:
        below.end_departure(departure, self.pins)
