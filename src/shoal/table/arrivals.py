"""Keys that come into the memory of tables, all of them or none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.records import Rows

if TYPE_CHECKING:
    from shoal.table.host import HostTable


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


@contextmanager
def arriving(tables: Sequence["HostTable"], arrivals: Sequence[Arrivals]) -> Iterator[list[Tensor]]:
    """Slots and rows for keys that come into memory. If the body raises, none of them is in.

    An interrupt may come between any two lines: so keys get their slots, and lose them, by one call of the core, and
    a table does not trust its number of rows until they are counted.
    """
    for table, arrival in zip(tables, arrivals, strict=True):
        table.make_room(arrival)
    keys = [arrival.keys for arrival in arrivals]
    slots = [torch.empty(len(come), dtype=torch.int32, device="cpu") for come in keys]
    for table, arrival in zip(tables, arrivals, strict=True):
        table.begin_arrival(arrival)
    try:
        if any(len(come) for come in keys):
            natives = [(table.index.native, table.storage.native) for table in tables]
            with tables[0].indexes.alone():  # one for all tables of a group
                _native.arrive(natives, keys, slots, get_num_threads())
        for table, arrival, taken in zip(tables, arrivals, slots, strict=True):
            table.write_arrivals(arrival, taken)
        yield slots
    except BaseException:
        # Without asking for memory: it may be what is missing.
        for table, come in zip(tables, keys, strict=True):
            with table.indexes.alone():
                _native.leave(table.index.native, table.storage.native, come)
                table.epoch += 1  # a batch may have been staged meanwhile
            table.call_arrival_off()
        raise
    for table, arrival in zip(tables, arrivals, strict=True):
        table.came(arrival)
