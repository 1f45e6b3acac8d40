"""How rows come into one table's memory: from below, by birth, or from outside of the process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.config.rows import SCORE
from shoal.errors import OutOfMemoryError
from shoal.index import NO_SLOT
from shoal.ops.birth import birth, native_init
from shoal.records import Rows
from shoal.storage import Answer
from shoal.table.host.arrivals import Arrivals, Arriving
from shoal.table.host.residency import HostMemory


class ArrivingRows(HostMemory):
    """One table's memory, and the rows that come to it. Its group's lock covers every method."""

    def __init__(self, config: Table, seed: int, folder: str = "") -> None:
        # Whether the number of rows was in doubt before keys came, and before keys got rows below.
        self._was_in_doubt = self._was_in_doubt_below = False
        self.init = native_init(config.init, _native.birth_stream(seed, _native.name_hash(config.name)))
        self.missing = self.init if config.missing == "init" else _native.Init(_native.InitKind.zeros)
        super().__init__(config, folder)

    @staticmethod
    def arrivals(keys: Tensor, bearing: int, below: Answer | None) -> tuple[Arrivals, Tensor | None]:
        """The arrivals among keys that are different and not in memory: those below, and the births among the first
        `bearing`. Also which of the keys these are; None is all. `below`: what is there, if the table has something."""
        if below is None:
            return Arrivals(keys), None
        rows, fetched, has = below
        comes = fetched.clone()
        comes[:bearing] = True
        if has < len(keys):
            rows = rows[fetched]
        return Arrivals(keys[comes], rows, fetched[comes]), comes

    def write_arrivals(self, arrivals: Arrivals, slots: Tensor) -> None:
        """Write the rows of keys that came at their slots."""
        self.storage.name(slots, arrivals.keys)
        if arrivals.given is not None:
            self._put(slots, arrivals.given)
            return
        if arrivals.rows is None or arrivals.fetched is None:
            self.write_first(arrivals.keys, slots)
            return
        if not arrivals.births:
            self.storage.unpack(slots, arrivals.rows, self.clock)
            return
        if len(arrivals.rows):
            self.storage.unpack(slots[arrivals.fetched], arrivals.rows, self.clock)
        born = ~arrivals.fetched
        self.write_first(arrivals.keys[born], slots[born])

    def placing(self, keys: Tensor, rows: Tensor, number: int) -> tuple[Any, ...]:
        """Rows that were read ahead, as the core takes them to memory; the caller keeps the tensors until it did.
        `number`: the table's among those of the batch's missing keys."""
        return (
            self.index.native,
            self.storage.native,
            keys.data_ptr(),
            rows.data_ptr(),
            len(keys),
            self.clock,
            number,
        )

    def placed(self, came: int) -> None:
        """Count them: so many were not there before, or memory was refused if that is negative."""
        if came < 0:
            raise OutOfMemoryError(f"[table {self.config.name!r}] there is no memory for rows that were read ahead.")
        self._promotions.add(came)

    def begin_arrival(self, arrivals: Arrivals) -> None:
        """Note that they are about to come in."""
        if arrivals.births and not self._is_being_filled:
            # Before they come: a cursor that sees them looks which of them have a row.
            self.changes.add(arrivals.born)
        self._was_in_doubt = self._count.doubt()

    def call_arrival_off(self) -> None:
        """Note that none of them is in."""
        self._count.settle(self._was_in_doubt)

    def came(self, arrivals: Arrivals) -> None:
        """Count them: they are in."""
        births = arrivals.births
        if arrivals.given is None:
            self._promotions.add(len(arrivals.keys) - births)
        if births and not self._is_being_filled:
            self.counters.add("births", births)
        self._count.settle(self._was_in_doubt, births)

    def begin_births_below(self, keys: Tensor) -> None:
        """These keys are about to get their first rows below memory. `end_births_below` or `call_births_below_off`
        follows."""
        self.changes.add(keys)  # before they come: a cursor that sees them looks which have a row
        self._was_in_doubt_below = self._count.doubt()

    def end_births_below(self, births: int) -> None:
        """Count them: they are there."""
        self.counters.add("births", births)
        self._count.settle(self._was_in_doubt_below, births)

    def call_births_below_off(self, keys: Tensor) -> None:
        """Erase them below; if the storage fails, the number of rows stays in doubt."""
        self.lower.erase(keys)
        self._count.settle(self._was_in_doubt_below)

    def write_first(self, keys: Tensor, slots: Tensor) -> None:
        """Write the first rows of new keys at their slots."""
        birth(self.storage.rows, self.init, self.storage.first_state, float(self.step), self.clock, keys, slots)

    def _with_rows(self, keys: Tensor, write: Callable[[Tensor], None]) -> None:
        """Call `write` with the slots of distinct keys; those without a row are born, and gone again if it raises."""
        self._written = None  # an interrupted call may have left it
        slots = self.index.find(keys)
        new = slots == NO_SLOT
        if not new.any():
            write(slots)
            return
        self.tick()
        self.storage.stamp(slots[~new], self.clock)
        absent = keys[new]
        below = None if self.below is None else self.below.read(absent)
        arrivals, _comes = self.arrivals(absent, len(absent), below)
        try:
            self._written = slots[~new]
            with Arriving([self], [arrivals]) as (new_slots,):
                slots[new] = new_slots
                write(slots)
        finally:
            self._written = None

    def _put(self, slots: Tensor, rows: Rows) -> None:
        columns = dict(rows.state) | dict(rows.facts)
        if rows.scores is not None:
            columns[SCORE.name] = rows.scores
        self.storage.put(
            slots,
            rows.weights.contiguous(),
            {name: column.contiguous() for name, column in columns.items()},
            float(self.step),
            self.clock,
            changed=not self._is_being_filled,
        )

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Rows that are put meanwhile are no births, and no changes. REQUIRES: every cursor has lost its place."""
        self._is_being_filled = True
        try:
            yield
        finally:
            self._is_being_filled = False
