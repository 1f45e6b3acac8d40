"""A batch on its way to a device's tables: its rows come up ahead of its lookup, while the device works.

Staging only places. Rows that a storage has are read without the group's lock; those that kernels reach are brought up
on a stream of their own. Births and scores are the lookup's, and so is what a table counts.
"""

from collections.abc import Callable, Sequence
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
from shoal.table.lower.read import Asked, may_read_ahead, read_below
from shoal.table.lower.staged import Staged
from shoal.table.staging import address_of
from shoal.torch_private import version_of

if TYPE_CHECKING:
    from shoal.table.device.group import DeviceGroup


class DeviceStaging:
    """One batch. `answers`: what the storages below said of its keys, by table."""

    in_loop = False

    def __init__(self, group: "DeviceGroup", plan: DevicePlan, values: Tensor, offsets: Tensor) -> None:
        self.group = group
        self.plan = plan
        self.waits = plan.deep
        self.values, self.offsets = values.contiguous(), offsets.contiguous()
        self.answers: dict[int, Staged] = {}
        self.births: dict[int, int] = {}  # of its keys those that had no row, by table
        self.ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(values.device))
            for tensor in (self.values, self.offsets):
                tensor.record_stream(group.placing_stream)
        self.address = address_of(values)
        self._as_found = version_of(values), version_of(offsets)
        self._offsets_at = address_of(offsets)
        self._missing: dict[int, Missing] = {}
        self._epochs: list[int] = []
        self._is_found = self._is_placed = self._is_released = False
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
            self.answers[number] = group.below(number).lower.listen()
        self._epochs = self._epochs_now()
        with self._on_stream():
            if self.ready is not None:
                torch.cuda.current_stream(self.values.device).wait_event(self.ready)
            with group.reading():
                found = group.missing.launch(self.plan, self.values, self.offsets, self.pins)
            self._missing = dict(group.missing.read(found, self.values))
        for number, missing in self._missing.items():
            group.below(number).lower.ask(self.answers[number], missing.keys)

    def may_read(self, is_first: bool) -> bool:
        """Whether what it reads may be in memory, too."""
        belows = [(self.group.below(number), self.answers[number]) for number in self._missing]
        return may_read_ahead([(below.lower, staged, below.budget) for below, staged in belows], is_first)

    def expect(self) -> None:
        """What it reads is coming to memory."""
        for number in self._missing:
            self.answers[number].expect(self.group.below(number).lower.row_bytes)

    def read(self) -> None:
        """Read it."""
        self.find()
        asked = [number for number in self._missing if len(self.answers[number].keys)]
        for number in asked:
            self.answers[number].is_unread = False
        answers = read_below(
            [Asked(self.group.below(number).lower, self.answers[number].keys) for number in asked],
            self.group.io_threads,
        )
        for number, answer in zip(asked, answers, strict=True):
            self.answers[number].set(answer)

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
            leaving = Departures()
            with self._on_stream(), self.group.writing():
                if self.group.staged.get(self.address) is not self:
                    return False  # looked up already, or dropped
                waiting = [number for number in waiting if not self._has_put(number)]
                if waiting:
                    leaving = self._begin_leaving(waiting)
            if waiting and not leaving and not may_wait():
                return False
            self._let_leave(leaving)
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

    def _begin_leaving(self, numbers: Sequence[int]) -> Departures:
        leaving = Departures()
        try:
            for number in numbers:
                below = self.group.below(number)
                below.keep(self._missing[number].keys, self.pins)  # what others brought meanwhile stays
                lacking = len(self._missing[number].keys) - below.spare()
                if chosen := below.begin_departure(lacking, self.pins):
                    leaving.add(below, chosen, below.lower.writing, partial(self._end_leaving, below, chosen))
        except BaseException:
            leaving.call_off()
            raise
        return leaving

    def _end_leaving(self, below: DeviceMemory, leaving: Departure) -> None:
        below.end_departure(leaving, self.pins)

    def _let_leave(self, leaving: Departures) -> None:
        """Write what leaves, without the group's lock; then it may."""
        failed = leaving.write()
        if leaving:
            with self._on_stream(), self.group.writing():
                leaving.end()
        if failed is not None:
            raise failed

    def release(self) -> None:
        """It is not needed any more: its rows may leave."""
        self._is_released = True
        if self.group.staged.get(self.address) is self:
            self.group.staged.pop(self.address, None)
        for number, staged in tuple(self.answers.items()):  # its own thread may still be adding to them
            self.group.below(number).lower.unstage(staged)
