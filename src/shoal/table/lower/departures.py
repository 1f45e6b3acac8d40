"""Rows on their way out of memory: chosen under their group's lock, written to the lower tier, and then forgotten by
memory, unless a batch has used or changed them since."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(eq=False)
class Departure:
    """Rows of one table that are leaving memory. Those that had changed are being written."""

    keys: Tensor
    changed: Tensor  # keys, on the host, of the rows that are written
    packed: Sequence[Tensor]  # these rows, in pieces, in the order of `changed`
    is_written: bool = False


class Departing(Protocol):
    """A table whose rows can leave memory."""

    def write(self, departure: Any) -> None:
        """Write the changed rows below. The group's lock need not be held."""

    def stay(self, departure: Any) -> None:
        """Keep the rows in memory, as they were: they could not be written, or need not leave any more."""


@dataclass(frozen=True)
class _One:
    table: Departing
    departure: Departure
    writing: threading.Lock
    end: Callable[[], None]


class Departures:
    """Departures of several tables, whose rows are written without the group's lock. From `add` to `write` or
    `call_off` no other thread writes to these tables' lower tiers."""

    def __init__(self) -> None:
        self._each: list[_One] = []

    def __len__(self) -> int:
        return len(self._each)

    def add(self, table: Departing, departure: Departure, writing: threading.Lock, end: Callable[[], None]) -> None:
        """Add one table's. `end` is called under the group's lock once the rows are written."""
        writing.acquire()
        self._each.append(_One(table, departure, writing, end))

    def call_off(self) -> None:
        """All rows stay. Call under the group's lock, instead of `write`."""
        for one in self._each:
            one.writing.release()
            one.table.stay(one.departure)

    def write(self) -> BaseException | None:
        """Write all rows that can be written, without the group's lock; returns the first error."""
        failed: list[BaseException] = []
        for one in self._each:
            try:
                one.table.write(one.departure)
            except BaseException as error:
                failed.append(error)
            finally:
                one.writing.release()
        return failed[0] if failed else None

    def end(self) -> None:
        """Rows that were written leave, the others stay. Call under the group's lock."""
        for one in self._each:
            if one.departure.is_written:
                one.end()
            else:
                one.table.stay(one.departure)
