"""Rows of batches that come: brought into memory ahead of their lookup.

Staging only places. It reads from below without the group's lock and takes that only to put rows in and to let others
leave; births, scores and counts are the lookup's. What is staged and then not looked up changes nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.config import get_num_threads
from shoal.index import NO_SLOT
from shoal.ops.pool import bags_of
from shoal.table.arrivals import Arrivals, arriving
from shoal.table.below import Staged

if TYPE_CHECKING:
    from shoal.table.host_group import HostGroup


def address_of(values: Tensor) -> tuple[int, int]:
    """What tells a batch from others for as long as somebody keeps its values."""
    return values.data_ptr(), values.numel()


class HostStaging:
    """One batch on its way. `answers` says what the storages below said of its keys, by table."""

    def __init__(self, group: "HostGroup", names: list[str], values: Tensor, offsets: Tensor) -> None:
        self.group = group
        self.address = address_of(values)
        self.answers: dict[int, Staged] = {}
        # Kept: no other batch may have their place.
        self._values, self._offsets = values, offsets
        with group.reading():
            self.plan = group._plan(names)
            self.bags = bags_of(values, offsets, None, len(names), self.plan.copies)
            lacking = self.plan.lookup.find(self.bags, list(range(len(self.plan.parts))), get_num_threads())
            parts: dict[int, list[tuple[int, int]]] = {}
            for part, lacks in zip(self.plan.parts, lacking, strict=True):
                if lacks and group.tables[part.table].below is not None:
                    parts.setdefault(part.table, []).append((part.source, part.copy))
            missing = self.bags.missing(list(parts.values()), get_num_threads())
            for at, number in enumerate(parts):
                below = group.tables[number].below
                assert below is not None
                self.answers[number] = below.stage(below.without_coming(missing.keys(at)))
            group.staged[self.address] = self

    def read(self) -> None:
        """Read what is below."""
        for number, staged in self.answers.items():
            below = self.group.tables[number].below
            assert below is not None
            staged.set(*below.read(staged.keys))

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put what was read in memory. `may_wait`, asked where other batches hold all of it, waits for a while and says
        whether to try again; where not, the lookup will have to do it."""
        for number, staged in self.answers.items():
            while not self._place(number, staged):
                if not may_wait():
                    break

    def _place(self, number: int, staged: Staged) -> bool:
        table = self.group.tables[number]
        assert table.below is not None
        while True:
            with self.group.writing():
                if self.group.staged.get(self.address) is not self:
                    return True  # looked up already, or dropped
                self._find(number)  # what others brought meanwhile stays
                # Also for what will be born: the lookup will find room.
                wanted = len(staged.keys)
                spare = table.spare(wanted)
                if spare >= wanted:
                    keys, rows = staged.place()
                    absent = table.find(keys) == NO_SLOT
                    come = Arrivals(keys[absent], rows[absent], absent[absent])
                    with arriving([table], [come]):
                        self._find(number)
                    return True
                leaving = table.begin_leaving(wanted - spare, staged=True)
                if leaving is None:
                    return False
                table.below.writing.acquire()
            try:
                try:
                    table.write_leaving(leaving)
                finally:
                    table.below.writing.release()
            except BaseException:
                with self.group.writing():
                    table.stay(leaving)
                raise
            with self.group.writing():
                table.end_leaving(leaving, alone=False)

    def _find(self, number: int) -> None:
        """The slots of one table's keys, as they are now: they hold the rows in memory."""
        parts = [at for at, part in enumerate(self.plan.parts) if part.table == number]
        self.plan.lookup.find(self.bags, parts, get_num_threads())

    def release(self) -> None:
        """It is not needed any more: its rows may leave."""
        if self.group.staged.get(self.address) is self:
            del self.group.staged[self.address]
        for number, staged in self.answers.items():
            below = self.group.tables[number].below
            assert below is not None
            below.unstage(staged)
