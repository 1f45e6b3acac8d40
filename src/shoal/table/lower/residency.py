"""Which rows of a table are in memory, and which are in its lower tier alone: the part that both backends share. Which
rows leave memory, how they are packed, and how memory forgets them is each backend's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shoal.metrics import Metrics
from shoal.table.lower.departures import Departure
from shoal.table.lower.row_count import RowCount
from shoal.table.lower.tier import Below

DepartureT = TypeVar("DepartureT", bound=Departure)


class Residency(ABC, Generic[DepartureT]):
    """The rows of one table, in memory and below. The group's lock covers every method but `write`."""

    def __init__(self, below: Below | None, count: RowCount, tier: str, budget: int | None) -> None:
        self.below = below
        self.epoch = 0  # changes when keys that staged batches have found may have lost their slots
        self._count = count
        self.metrics = Metrics(self, name=tier, budget_bytes=budget)  # of the tier in memory
        self._promotions, self._demotions = map(self.metrics.counter, ("promotions", "demotions"))
        # Rows that are being written: until that is done they stay in memory, and count as unchanged.
        self._departures: list[DepartureT] = []

    @property
    def lower(self) -> Below:
        """The lower tier. REQUIRES: the table has one."""
        assert self.below is not None
        return self.below

    @abstractmethod
    def is_absent(self, keys: Tensor) -> Tensor:
        """Whether each key of the host has no row in memory; on the host."""

    @abstractmethod
    def mark_unsaved(self, keys: Tensor) -> None:
        """Note that the lower tier may not have the rows of these keys as memory has them: they are written before they
        leave. Keys that are not in memory are left out."""

    # ---- rows that leave memory

    def write(self, departure: DepartureT) -> None:
        """Write below the rows that had changed. The group's lock need not be held, if `lower.writing` is."""
        done = 0
        for rows in departure.packed:
            keys = departure.changed[done : done + len(rows)]
            self._write(keys, rows)
            done += len(rows)
        departure.is_written = True

    def _write(self, keys: Tensor, rows: Tensor) -> None:
        self.lower.spoil(keys)
        self.lower.write(keys, rows)
        self._demotions.add(len(rows))

    def write_now(self, departure: DepartureT) -> None:
        """The same while the group's lock is held; if it fails, the rows stay."""
        try:
            with self.lower.writing:
                self.write(departure)
        except BaseException:
            self.stay(departure)
            raise

    def stay(self, departure: DepartureT) -> None:
        """Keep the rows in memory, as they were before they were chosen."""
        if departure in self._departures:  # all rows may have been replaced meanwhile
            self.mark_unsaved(departure.changed)
            self._departures.remove(departure)  # last: an interrupt may come between these two

    def _await_departures(self, end: Callable[[DepartureT], None]) -> None:
        """Wait for the rows that another thread is writing, and `end` their departure."""
        for departure in tuple(self._departures):
            with self.lower.writing:  # the other thread has this until they are written
                if departure.is_written:
                    end(departure)

    # ---- rows below

    def read_absent(self, keys: Tensor, is_absent: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of keys that are not in memory and have a row below: their positions, and their packed rows. None where no
        key is absent."""
        at = torch.nonzero(is_absent)[:, 0] if self.below is not None else keys[:0]
        if not len(at):
            return None
        distinct, inverse = torch.unique(keys[at].cpu(), return_inverse=True)
        rows, found, _has = self.lower.read(distinct)
        has = found[inverse]
        return at.cpu()[has].to(keys.device), rows[inverse[has]].to(keys.device)

    def find_below(self, keys: Tensor, found: Tensor) -> Tensor:
        """Whether each key has a row, given for each whether memory `found` one."""
        if self.below is not None and not bool(found.all()):
            found[~found] = self.below.contains(keys[~found].cpu()).to(found.device)
        return found

    def lost(self, keys: Tensor) -> Tensor:
        """Of distinct keys of the host whose rows below could not be read, those that have no other row and still
        cannot be read."""
        self.mark_unsaved(keys)
        return self.lower.unreadable(keys[self.is_absent(keys)])

    def _erase_below(self, keys: Tensor, was_in_doubt: bool, before: int, count: Callable[[], int]) -> None:
        """Erase the rows of distinct keys of the host below. If that fails, the rows that are gone are counted: there
        were `before`, and `count` counts them again."""
        try:
            self.lower.erase(keys)
        except BaseException:
            with suppress(Exception):  # if the storage does not answer, the number stays in doubt
                self._count.failed(was_in_doubt, before - count())
            raise
