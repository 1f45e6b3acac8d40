"""Changes that an interrupt must not leave half done. It may come between any two instructions of Python."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shoal.errors import ShoalError
from shoal.table.protocols import Tiered
from shoal.table.refused import is_refused_memory


class Decided:
    """Runs changes of a group's tables that count as made once they have begun. If an interrupt ends one, the next
    holder of the exclusive lock runs it again from its beginning, and no call sees the tables before that. The group's
    lock covers this object.

    An error of the change itself ends it, as it does without interrupts.
    """

    def __init__(self, tables: Sequence[Tiered]) -> None:
        self._tables = tables
        self._work: partial[None] | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether an interrupt left something to do."""
        return self._work is not None

    def do(self, change: Callable[..., None], *arguments: Any) -> None:
        """Make a change. REQUIRES: to make it twice is to make it once, also if the first time ended anywhere."""
        if self._work is not None:  # as a part of another
            change(*arguments)
            return
        failures = self.failures()
        try:
            self._work = partial(change, *arguments)
            change(*arguments)
        except BaseException as error:
            # The caller may change its tensors before that.
            self._work = None if self.is_own(error, failures) else partial(change, *map(_copied, arguments))
            raise
        self._work = None

    def finish(self) -> None:
        """Run what an interrupt left. Call while the exclusive lock is held."""
        if self._work is None:
            return
        failures = self.failures()
        try:
            self._work()
        except BaseException as error:
            if self.is_own(error, failures):
                self._work = None
                error.add_note("It ended what a call that was interrupted had left to do.")
            raise
        self._work = None

    def failures(self) -> int:
        """Returns how many calls of storages raised so far."""
        return sum(table.lowest.failures for table in self._tables if table.lowest is not None)

    def is_own(self, error: BaseException, failures: int) -> bool:
        """Whether an error is of the change itself, which began after so many failures of storages. Anything else is an
        interrupt: the handler of a signal may raise any error."""
        return isinstance(error, Exception) and (
            isinstance(error, ShoalError) or is_refused_memory(error) or self.failures() > failures
        )


def _copied(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument
