"""Keys that come into the memory of tables, all of them or none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal import _native
from shoal.index import insert
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
def alone_in(indexes: _native.RwLock) -> Iterator[None]:
    """While indexes change, nobody stages."""
    indexes.lock()
    try:
        yield
    finally:
        indexes.unlock()


@contextmanager
def arriving(tables: Sequence["HostTable"], arrivals: Sequence[Arrivals]) -> Iterator[list[Tensor]]:
    """Slots and rows for keys that come into memory. If the body raises, none of them is in."""
    for table, arrival in zip(tables, arrivals, strict=True):
        table.make_room(arrival)
    keys = [arrival.keys for arrival in arrivals]
    slots: list[Tensor] = []
    try:
        for table, come in zip(tables, keys, strict=True):
            slots.append(table.storage.take(len(come)))
        if any(len(come) for come in keys):
            with alone_in(tables[0].indexes):  # one for all tables of a group
                insert([table.index for table in tables], keys, slots)
        for table, arrival, taken in zip(tables, arrivals, slots, strict=True):
            table.write_arrivals(arrival, taken)
        yield slots
    except BaseException:
        # Without asking for memory: it may be what is missing.
        for table, come in zip(tables, keys, strict=True):
            with alone_in(table.indexes):
                table.index.forget(come)
                table.epoch += 1  # a batch may have been staged meanwhile
        for table, taken in zip(tables, slots, strict=False):
            table.storage.give(taken)
        raise
    for table, arrival in zip(tables, arrivals, strict=True):
        table.came(arrival)
