"""Rows on their way out of memory: chosen under their group's lock, written below, and gone if nobody wanted them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Leaves(Protocol):
    """A table whose rows can leave. What left is the table's own to describe; it says whether it `is_written`."""

    def write_leaving(self, leaving: Any) -> None:
        """Write below what had changed. The group's lock need not be held."""

    def stay(self, leaving: Any) -> None:
        """They could not be written: they are as they were."""


def write_now(table: Leaves, leaving: Any, writing: threading.Lock) -> None:
    """Write what leaves while the group's lock is held; if that fails, it stays."""
    try:
        with writing:
            table.write_leaving(leaving)
    except BaseException:
        table.stay(leaving)
        raise


@dataclass(frozen=True)
class _Departure:
    table: Leaves
    leaving: Any
    writing: threading.Lock
    end: Callable[[], None]


class Departures:
    """Rows of several tables that are written without the group's lock. From `add` on nobody else writes to these."""

    def __init__(self) -> None:
        self._each: list[_Departure] = []

    def __len__(self) -> int:
        return len(self._each)

    def add(self, table: Leaves, leaving: Any, writing: threading.Lock, end: Callable[[], None]) -> None:
        """These leave too. `end`: called under the group's lock once they are written."""
        writing.acquire()
        self._each.append(_Departure(table, leaving, writing, end))

    def call_off(self) -> None:
        """They stay. Call under the group's lock, instead of `write`."""
        for one in self._each:
            one.writing.release()
            one.table.stay(one.leaving)

    def write(self) -> BaseException | None:
        """Write all that can be, without the group's lock; returns what went wrong first."""
        failed: list[BaseException] = []
        for one in self._each:
            try:
                one.table.write_leaving(one.leaving)
            except BaseException as error:
                failed.append(error)
            finally:
                one.writing.release()
        return failed[0] if failed else None

    def end(self) -> None:
        """What was written is gone, the rest stays. Call under the group's lock."""
        for one in self._each:
            if one.leaving.is_written:
                one.end()
            else:
                one.table.stay(one.leaving)
