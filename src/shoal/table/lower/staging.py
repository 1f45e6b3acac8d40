"""A staged batch: the part that both backends share. How keys are found, and where their rows go, is each backend's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.table.lower.departures import Departures
from shoal.table.lower.read import Asked, may_read_ahead, read_below
from shoal.table.lower.staged import Staged
from shoal.table.lower.tier import Below
from shoal.table.staging import address_of

if TYPE_CHECKING:
    from shoal.table.group import Group


class StagedBatch(ABC):
    """One batch. `answers`: what the lower tiers said of its keys, by table."""

    def __init__(self, group: "Group", values: Tensor) -> None:
        self.group = group
        self.address = address_of(values)
        self.answers: dict[int, Staged] = {}
        self._is_released = False

    @abstractmethod
    def find(self, threads: int = 1) -> None:
        """Find which keys are below, on so many threads."""

    @abstractmethod
    def _lower(self, number: int) -> Below:
        """The lower tier of a table."""

    @abstractmethod
    def _budget(self, number: int) -> int | None:
        """The bytes of memory that a table may have."""

    @abstractmethod
    def _add_departure(self, number: int, departures: Departures) -> None:
        """Choose rows of a table that may leave, so that its keys have room. REQUIRES: the group's exclusive lock."""

    def _on_stream(self) -> AbstractContextManager[object]:
        """The stream on which rows move, where there are streams."""
        return nullcontext()

    @property
    def _is_wanted(self) -> bool:
        """Whether it is neither looked up already, nor dropped."""
        return self.group.staged.get(self.address) is self

    def may_read(self, is_first: bool) -> bool:
        """Whether there is memory to read its rows now."""
        asked = [(self._lower(number), staged, self._budget(number)) for number, staged in tuple(self.answers.items())]
        return may_read_ahead(asked, is_first)

    def expect(self) -> None:
        """Count its rows as being read."""
        for number, staged in tuple(self.answers.items()):
            staged.expect(self._lower(number).row_bytes)

    def read(self) -> None:
        """Read what is below, all tables at a time: a disk is slow with few requests in hand."""
        self.find()
        asked = [(number, staged) for number, staged in tuple(self.answers.items()) if len(staged.keys)]
        for _number, staged in asked:
            staged.is_unread = False
        answers = read_below(
            [Asked(self._lower(number), staged.keys) for number, staged in asked], self.group.io_threads
        )
        for (_number, staged), answer in zip(asked, answers, strict=True):
            staged.set(answer)

    def _begin_departures(self, numbers: Sequence[int]) -> Departures:
        """Choose what leaves the memory of tables. REQUIRES: the group's exclusive lock."""
        departures = Departures()
        try:
            for number in numbers:
                self._add_departure(number, departures)
        except BaseException:
            departures.call_off()
            raise
        return departures

    def _end_departures(self, departures: Departures) -> None:
        """Write the rows without the group's lock; then they leave."""
        failed = departures.write()
        if departures:
            with self._on_stream(), self.group.writing():
                departures.end()
        if failed is not None:
            raise failed

    def release(self) -> None:
        """End the staging: its rows may leave."""
        self._is_released = True
        if self._is_wanted:
            self.group.staged.pop(self.address, None)
        for number, staged in tuple(self.answers.items()):  # its own thread may still be adding to them
            self._lower(number).unstage(staged)
