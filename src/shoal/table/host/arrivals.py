"""Keys that come into the memory of tables, all of them or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.records import Rows

if TYPE_CHECKING:
    from shoal.table.host.arriving import ArrivingRows


@dataclass(frozen=True)
class Arrivals:
    """Keys that come into a table's memory, from below or as births. REQUIRES: they are different, and not in it."""

    keys: Tensor
    rows: Tensor | None = None  # of those that come from below
    fetched: Tensor | None = None  # which these are
    given: Rows | None = None  # the rows of all of them, from outside; `fetched` are those that had one below

    @property
    def births(self) -> int:
        """How many have no row yet."""
        if self.given is not None:
            return len(self.keys) - (0 if self.fetched is None else int(self.fetched.sum()))
        return len(self.keys) - (0 if self.rows is None else len(self.rows))

    @property
    def born(self) -> Tensor:
        """The keys that have no row yet."""
        return self.keys if self.fetched is None else self.keys[~self.fetched]


class Arriving:
    """Slots and rows for keys that come into memory, in the body of `with`. If that raises, none of them is in.

    An interrupt may come between any two lines. So keys get their slots, and lose them, by one call of the core; a
    table's number of rows is in doubt until they are counted; and it is no generator, whose rest would run when the
    traceback is dropped, long after the group's lock was released.
    """

    def __init__(self, tables: Sequence["ArrivingRows"], arrivals: Sequence[Arrivals]) -> None:
        self._tables = tables
        self._arrivals = arrivals

    def __enter__(self) -> list[Tensor]:
        for table, arrival in zip(self._tables, self._arrivals, strict=True):
            table.make_room(arrival)
        keys = [arrival.keys for arrival in self._arrivals]
        slots = [torch.empty(len(come), dtype=torch.int32, device="cpu") for come in keys]
        for table, arrival in zip(self._tables, self._arrivals, strict=True):
            table.begin_arrival(arrival)
        try:
            if any(len(come) for come in keys):
                natives = [(table.index.native, table.storage.native) for table in self._tables]
                with self._tables[0].indexes.exclusive():  # one for all tables of a group
                    _native.arrive(natives, keys, slots, get_num_threads())
            for table, arrival, taken in zip(self._tables, self._arrivals, slots, strict=True):
                table.write_arrivals(arrival, taken)
        except BaseException:
            self._call_off()
            raise
        return slots

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is not None:
            self._call_off()
            return
        for table, arrival in zip(self._tables, self._arrivals, strict=True):
            table.came(arrival)

    def _call_off(self) -> None:
        """None of them is in. Without asking for memory: it may be what is missing."""
        for table, arrival in zip(self._tables, self._arrivals, strict=True):
            with table.indexes.exclusive():
                _native.leave(table.index.native, table.storage.native, arrival.keys)
                table.epoch += 1  # a batch may have been staged meanwhile
            table.call_arrival_off()
