"""How many rows there are, although storages fail and interrupts come."""

import threading
from collections.abc import Callable

from shoal.metrics import Counters


class RowCount:
    """A number of rows of one table. While rows come or go it is in doubt, and stays in doubt where an interrupt or a
    storage that failed ends that early; then the next one to ask for the number counts the rows."""

    def __init__(self, rows: int, counters: Counters) -> None:
        self._counters = counters
        self._last = rows
        self._is_in_doubt = False
        self._counting = threading.Lock()  # of threads that ask at the same time

    @property
    def last(self) -> int:
        """The number when it was last certain. It costs nothing, and leaves out rows that are on their way."""
        return self._last

    def now(self, count: Callable[[], int]) -> int:
        """The number of now. `count` counts the rows; it is called if the number is in doubt."""
        if self._is_in_doubt:
            with self._counting:
                if self._is_in_doubt:
                    self._erased(self._last - count())
        return self._last

    def doubt(self) -> bool:
        """Rows are about to come or go. Returns what `settle` or `failed` takes: whether it was in doubt before."""
        was, self._is_in_doubt = self._is_in_doubt, True
        return was

    def settle(self, was_in_doubt: bool, more: int = 0) -> None:
        """So many rows have come; if it is less than 0, gone."""
        self._last += more
        self._is_in_doubt = was_in_doubt

    def failed(self, was_in_doubt: bool, gone: int) -> None:
        """An erase failed, after so many rows were gone."""
        if not was_in_doubt:
            self._erased(gone)

    def set(self, rows: int) -> None:
        """All rows were replaced by so many."""
        self._last, self._is_in_doubt = rows, False

    def _erased(self, rows: int) -> None:
        self._last -= rows
        self._is_in_doubt = False
        self._counters.add("erased", max(rows, 0))
