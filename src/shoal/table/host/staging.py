"""Rows of batches that come: brought into memory ahead of their lookup.

Staging only places. It reads from below without the group's lock and takes that only to put rows in and to let others
leave; births and scores are the lookup's, and so is what a table counts. What is staged and then not looked up changes
no row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from shoal import _native
from shoal.ops.pool import bags_of, has_bags_of
from shoal.table.host.plan import Plan
from shoal.table.lower.departures import Departures
from shoal.table.lower.staging import StagedBatch
from shoal.table.lower.tier import Below

if TYPE_CHECKING:
    from shoal.table.host.group import HostGroup


# Staging works on its own thread alone: the pool's threads are the training loop's.
_THREADS = 1


class HostStaging(StagedBatch):
    """A staged batch of tables in host memory."""

    waits = in_loop = True
    group: "HostGroup"

    def __init__(self, group: "HostGroup", names: list[str], values: Tensor, offsets: Tensor) -> None:
        super().__init__(group, values)
        self.is_found = self._is_begun = False
        self._names = names
        self._values, self._offsets = values, offsets  # kept: no other batch may have their place
        group.process.require(group.name)
        self.bags = bags_of(values, offsets, None, len(names), self._plan_now().slot_lists)
        self.bags.begin_ahead()

    def _plan_now(self) -> Plan:
        with self.group.indexes.shared():
            plan: Plan = self.group._plan(self._names)
        return plan

    def _lower(self, number: int) -> Below:
        return self.group.below(number)

    def _budget(self, number: int) -> int | None:
        return self.group.tables[number].budget

    def find(self, threads: int = 1) -> None:
        """Find which of its keys are not in memory."""
        if self._is_begun or self._is_released:
            return
        self._is_begun = True
        group = self.group
        try:
            with group.indexes.shared():
                self.plan = group._plan(self._names)
                # From here on a row that it finds stays, or the epoch is another; and of one that it does not find it
                # hears when it is written, even before it asks for it.
                self._epochs = self._epochs_now()
                for number in self.plan.deep:
                    self.answers[number] = group.below(number).listen()
                group.staged[self.address] = self
            self._find(threads)
        except BaseException:
            self.release()
            raise
        if self._is_released:  # meanwhile: what it listens to since must not go on
            self.release()

    def _find(self, threads: int) -> None:
        self._missing = self.plan.lookup.find(self.bags, self.group.indexes, self.plan.deep_parts, threads)
        asks = [(self.group.below(number), self.answers[number]) for number in self.plan.deep]
        Below.ask_together(asks, self._missing)
        for number, count in zip(self.plan.deep, self._missing.counts, strict=True):
            # Of a batch that memory cannot hold its lookup reads the rows, in pieces.
            if not count or self.group.tables[number].room.never_holds(count):
                self.group.below(number).unstage(self.answers.pop(number))
        self.is_found = True

    def _epochs_now(self) -> list[int]:
        return [self.group.tables[part.table].epoch for part in self.plan.parts]

    def is_still_right(self, plan: Plan, values: Tensor, offsets: Tensor) -> bool:
        """Whether the slots that were found are those of a lookup with that plan and these tensors. Keys that had none
        may have one by now."""
        return plan is self.plan and self._epochs_now() == self._epochs and has_bags_of(self.bags, values, offsets)

    def has_room(self) -> bool:
        """Whether what was asked for fits into memory now."""
        with self.group.reading():
            return all(self._fits(number) for number in tuple(self.answers))

    def place_into_room(self, threads: int) -> bool:
        """Put what was read in memory, but for tables out of which others would have to leave; whether that is all."""
        with self.group.writing():
            return not self._is_wanted or self._place(list(self.answers), threads) == []

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put what was read in memory. `may_wait`, asked where other batches hold all of it, waits for a while and says
        whether to try again; where not, the lookup will have to do it."""
        waiting = list(self.answers)
        while waiting:
            with self.group.writing():
                if not self._is_wanted:
                    return
                waiting = self._place(waiting, _THREADS)
                departures = self._begin_departures(waiting)
            if waiting and not departures and not may_wait():
                return
            self._end_departures(departures)

    def _fits(self, number: int) -> bool:
        """Whether a table's memory has room for what was asked for, also for what will be born."""
        wanted = len(self.answers[number].keys)
        return self.group.tables[number].room.spare(wanted) == wanted

    def _place(self, numbers: Sequence[int], threads: int) -> list[int]:
        """Put rows of tables in memory where they fit; returns which do not."""
        fitting = [number for number in numbers if self._fits(number)]
        tables = [self.group.tables[number] for number in fitting]
        rows = [self.answers[number].place() for number in fitting]  # kept until they are in
        placing = [
            table.placing(*some, self.plan.deep.index(number))
            for number, table, some in zip(fitting, tables, rows, strict=True)
        ]
        came = _native.place(placing, self.group.indexes, self._missing, self.bags, threads)
        for table, many in zip(tables, came, strict=True):
            table.placed(many)
        return [number for number in numbers if number not in fitting]

    def _hold(self, number: int) -> None:
        """Know the slots of the keys that were missing, as they are now: so their rows stay."""
        at = self.plan.deep.index(number)
        self.bags.fill(self._missing, at, self.group.tables[number].find(self._missing.keys(at)))

    def _add_departure(self, number: int, departures: Departures) -> None:
        self._hold(number)  # what others brought meanwhile stays
        table, wanted = self.group.tables[number], len(self.answers[number].keys)
        if chosen := table.begin_departure(wanted - table.room.spare(wanted)):
            departures.add(table, chosen, table.lower.writing, partial(table.end_departure, chosen))

    def put_back(self) -> None:
        """A lookup that took it will come again. Its owner may have released it meanwhile, and may do so now."""
        self.group.staged[self.address] = self
        if self._is_released:
            self.release()
