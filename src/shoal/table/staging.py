"""Rows of batches that come: brought into memory ahead of their lookup.

Staging only places. It reads from below without the group's lock and takes that only to put rows in and to let others
leave; births, scores and counts are the lookup's. What is staged and then not looked up changes nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.ops.pool import bags_of, remembers
from shoal.table.below import Below, Staged, may_read_ahead
from shoal.table.leaving import Departures
from shoal.table.plan import Plan

if TYPE_CHECKING:
    from shoal.table.host_group import HostGroup


# The pool's threads are the loop's.
_THREADS = 1


def address_of(values: Tensor) -> tuple[int, int]:
    """What tells a batch from others for as long as somebody keeps its values."""
    return values.data_ptr(), values.numel()


class HostStaging:
    """One batch on its way. `answers` says what the storages below said of its keys, by table."""

    waits = True

    def __init__(self, group: "HostGroup", names: list[str], values: Tensor, offsets: Tensor) -> None:
        self.group = group
        self.address = address_of(values)
        self.answers: dict[int, Staged] = {}
        self._values = values  # kept: no other batch may have its place
        self.is_found = self._is_released = False
        group._in_own_process()
        group.indexes.lock_shared()
        try:
            self.plan = group._plan(names)
            self.bags = bags_of(values, offsets, None, len(names), self.plan.copies)
            self.bags.forget_slots()
            # From here on a row that it finds stays, or the epoch is another; and of one that it does not find it hears
            # when it is written, even before it asks for it.
            self._epochs = self._epochs_now()
            for number in {part.table for part in self.plan.parts if group.tables[part.table].below is not None}:
                self.answers[number] = group.below(number).listen()
            group.staged[self.address] = self
        finally:
            group.indexes.unlock()
        try:
            self._find()
        except BaseException:
            self.release()
            raise

    def _find(self) -> None:
        self.bags.remember()  # a loop may change them on the way
        lacking = self.plan.lookup.find(self.bags, self.group.indexes)
        parts: dict[int, list[tuple[int, int]]] = {}
        for part, lacks in zip(self.plan.parts, lacking, strict=True):
            if lacks and self.group.tables[part.table].below is not None:
                parts.setdefault(part.table, []).append((part.source, part.copy))
        self._lacking = list(parts)
        self._missing = self.bags.missing(list(parts.values()), _THREADS)
        for number in set(self.answers).difference(self._lacking):
            self.group.below(number).unstage(self.answers.pop(number))
        for at, number in enumerate(self._lacking):
            self.group.below(number).ask(self.answers[number], self._missing.keys(at))
        self.is_found = True

    def _epochs_now(self) -> list[int]:
        return [self.group.tables[part.table].epoch for part in self.plan.parts]

    def is_still_right(self, plan: Plan, values: Tensor, offsets: Tensor) -> bool:
        """Whether the slots that were found are those of a lookup with that plan and these tensors. Keys that had none
        may have one by now."""
        return plan is self.plan and self._epochs_now() == self._epochs and remembers(self.bags, values, offsets)

    def find(self) -> None:
        """Nothing: it did when it began."""

    def may_read(self, is_first: bool) -> bool:
        """Whether what it reads may be in memory, too."""
        group = self.group
        asked = [
            (group.below(number), staged, group.tables[number].budget) for number, staged in tuple(self.answers.items())
        ]
        return may_read_ahead(asked, is_first)

    def read(self) -> None:
        """Read what is below, all tables at a time: a disk is slow with few requests in hand."""
        belows = [self.group.below(number) for number in self.answers]
        keys = [staged.keys for staged in self.answers.values()]
        answers = Below.read_together(belows, keys) or self.group.readers.map(Below.read, belows, keys)
        for staged, answer in zip(self.answers.values(), answers, strict=True):
            staged.set(*answer)

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put what was read in memory. `may_wait`, asked where other batches hold all of it, waits for a while and says
        whether to try again; where not, the lookup will have to do it."""
        waiting = list(self.answers)
        while waiting:
            with self.group.writing():
                if self.group.staged.get(self.address) is not self:
                    return  # looked up already, or dropped
                placed = self._place(waiting)
                waiting = [number for number in waiting if number not in placed]
                leaving = self._begin_leaving(waiting)
            if waiting and not leaving and not may_wait():
                return
            self._let_leave(leaving)

    def _place(self, numbers: Sequence[int]) -> list[int]:
        """Put rows of tables in memory that has room, also for what will be born; returns which these are."""
        placed = []
        for number in numbers:
            table, staged = self.group.tables[number], self.answers[number]
            if table.spare(len(staged.keys)) == len(staged.keys):
                keys, rows = staged.place()
                table.place(keys, rows, self.bags, self._missing, self._lacking.index(number))
                placed.append(number)
        return placed

    def _hold(self, number: int) -> None:
        """Know the slots of the keys that were missing, as they are now: so their rows stay."""
        at = self._lacking.index(number)
        self.bags.fill(self._missing, at, self.group.tables[number].find(self._missing.keys(at)))

    def _begin_leaving(self, numbers: Sequence[int]) -> Departures:
        leaving = Departures()
        try:
            for number in numbers:
                self._hold(number)  # what others brought meanwhile stays
                table, wanted = self.group.tables[number], len(self.answers[number].keys)
                if chosen := table.begin_leaving(wanted - table.spare(wanted)):
                    leaving.add(table, chosen, self.group.below(number).writing, partial(table.end_leaving, chosen))
        except BaseException:
            leaving.call_off()
            raise
        return leaving

    def _let_leave(self, leaving: Departures) -> None:
        """Write what leaves, without the group's lock; then it may."""
        failed = leaving.write()
        if leaving:
            with self.group.writing():
                leaving.end()
        if failed is not None:
            raise failed

    def put_back(self) -> None:
        """A lookup that took it will come again. Its owner may have released it meanwhile, and may do so now."""
        self.group.staged[self.address] = self
        if self._is_released:
            self.release()

    def release(self) -> None:
        """It is not needed any more: its rows may leave."""
        self._is_released = True
        if self.group.staged.get(self.address) is self:
            self.group.staged.pop(self.address, None)
        for number, staged in tuple(self.answers.items()):  # its own thread may still be adding to them
            self.group.below(number).unstage(staged)
