"""The numbers of batches, and the stamps that their keys get."""

import itertools
from collections.abc import Iterable

NO_BATCH = 2**31 - 1  # a stamp that no batch has
# Stamps begin anew from here on, at the next call that has the exclusive lock: until then there are as many again.
_MOST = 2**30


class Stamps:
    """Batches are numbered without end; stamps are 31 bits of device memory, and begin anew now and then.

    An object that keeps a batch keeps its number, and asks for the stamp when kernels are launched. The group's lock
    covers all but `number`.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # As they began: the first number with its stamp, and the stamps of batches before it that were kept.
        self._first, self._first_stamp = 0, 0
        self._kept: dict[int, int] = {}

    def number(self) -> int:
        """For the next batch. Asks for no lock."""
        return next(self._numbers)

    def of(self, number: int) -> int:
        """The stamp of a batch's keys."""
        # A batch that was not kept when stamps began anew had stamped nothing: it is as good as the first.
        return self._kept.get(number, self._first_stamp + max(number - self._first, 0))

    def are_used_up(self, number: int) -> bool:
        """Whether it is time to begin anew, once that batch is there."""
        return self.of(number) >= _MOST

    def begin_anew(self, kept: Iterable[int]) -> list[int]:
        """Begin anew, above the stamps of the batches that are kept. Returns what these had, in ascending order:
        the first becomes 1, the second 2, and a stamp between two of them what the one before it becomes."""
        had = {number: self.of(number) for number in kept}
        before = sorted(set(had.values()))
        self._kept = {number: before.index(stamp) + 1 for number, stamp in had.items()}
        self._first, self._first_stamp = self.number(), len(before) + 1
        return before
