"""Training on batches of more rows than memory holds.

Their forward reads in pieces (table/host/pieces.py) and writes new rows below. Their lease holds keys, not slots. Their
backward updates the rows that are in memory where they are; the others are read in pieces into an area outside of the
table's memory, updated there, and written below. The kernel gets all gradients of the batch each time and skips the
keys of other pieces, so a row's gradients are added up in the order that they always have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.index import NO_SLOT
from shoal.ops.birth import birth
from shoal.ops.pool import bags_of, bind_again
from shoal.ops.update import LeftOut, update
from shoal.storage import DramStorage
from shoal.table.decided import Decided
from shoal.table.host.arrivals import Arrivals, Arriving
from shoal.table.host.pieces import Seen, rows_of_a_piece
from shoal.table.host.plan import POOLINGS, Plan
from shoal.table.lifecycle.admission import Admission, Candidates, admitted

if TYPE_CHECKING:
    from shoal.table.host.forward import Forward
    from shoal.table.host.table import HostTable


class Area:
    """Some whole rows of a table, outside of its memory."""

    def __init__(self, table: "HostTable", rows: int) -> None:
        self.storage = DramStorage(table.config.format)
        self.storage.reserve(rows)
        self._slots = self.storage.take(rows)

    def slots(self, n: int) -> Tensor:
        """The first so many."""
        return self._slots[:n]


@dataclass
class Large:
    """What a batch of more rows than memory holds keeps in place of slots."""

    keys: _native.MissingKeys  # of the tables that train, by their number among these
    tables: Sequence[int]
    to_bear: dict[int, Tensor] = field(default_factory=dict)  # by table, the keys that had no row, in ascending order
    # By table, keys whose gradient goes nowhere: admission gave them no row, or they were erased since the forward.
    dropped: dict[int, list[Tensor]] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)

    def drop(self, number: int, keys: Tensor) -> None:
        """Drop the gradients of some keys of a table."""
        self.dropped.setdefault(number, []).append(keys)

    def keys_of(self, at: int) -> tuple[Tensor, Tensor]:
        """Returns the distinct keys of a table, and of which of them the gradient is not dropped."""
        keys = self.keys.keys(at)
        gone = self.dropped.get(self.tables[at])
        return keys, torch.ones(len(keys), dtype=torch.bool, device="cpu") if not gone else ~torch.isin(
            keys, torch.cat(gone)
        )


def large_batch(plan: Plan, bags: _native.Bags, training: bool) -> Large:
    """The keys of a batch, which has no slots from here on."""
    bags.begin_ahead()
    numbers = plan.trained if training else []
    parts = [[(part.source, part.slot_list) for part in plan.parts if part.trains and part.table == n] for n in numbers]
    return Large(bags.missing(parts, get_num_threads()), numbers)


# ---- births


def find_births(
    tables: "Sequence[HostTable]",
    forward: "Forward",
    large: Large,
    values: Tensor,
    admissions: Mapping[int, Admission],
) -> None:
    """Find which keys are to be born, and that there is a place for them. `values`: the batch's."""
    for at, number in enumerate(large.tables):
        table, keys = tables[number], large.keys.keys(at)
        absent = keys[table.find(keys) == NO_SLOT]
        if table.below is not None and len(absent):
            is_below = [table.below.contains(some) for some in absent.split(rows_of_a_piece(table))]
            absent = absent[~torch.cat(is_below)]
        if admission := admissions.get(number):
            brought = partial(forward.values_of, number, values)
            born = admitted(admission, Candidates(table.config.name, table.step, absent, brought))
            large.drop(number, absent[~born])
            absent = absent[born]
        if len(absent):
            table.require_more(len(absent))
            large.to_bear[number] = absent.sort().values


def bear(tables: "Sequence[HostTable]", large: Large) -> int:
    """Give the keys their first rows, all of them or none; how many that were. Memory gets what it has room for."""
    numbers = list(large.to_bear)
    above: list[Arrivals] = []
    deep: dict[int, Tensor] = {}
    for number, keys in large.to_bear.items():
        room = len(keys) if tables[number].below is None else tables[number].room.spare(len(keys))
        above.append(Arrivals(keys[:room]))
        if room < len(keys):
            deep[number] = keys[room:]
    with Arriving([tables[number] for number in numbers], above):
        begun: list[int] = []
        try:
            for number, keys in deep.items():
                begun.append(number)
                _bear_below(tables[number], keys)
        except BaseException as error:
            for number in begun:
                _call_off(tables[number], deep[number], error)
            raise
        for number, keys in deep.items():
            tables[number].end_births_below(len(keys))
    return sum(map(len, large.to_bear.values()))


def _bear_below(table: "HostTable", keys: Tensor) -> None:
    size = rows_of_a_piece(table)
    area = Area(table, min(size, len(keys)))
    table.begin_births_below(keys)
    for some in keys.split(size):
        slots = area.slots(len(some))
        birth(area.storage.rows, table.init, area.storage.first_state, float(table.step), 0, some, slots)
        table.write_below(some, area.storage.pack(slots))


def _call_off(table: "HostTable", keys: Tensor, error: BaseException) -> None:
    try:
        table.call_births_below_off(keys)
    except Exception as other:
        error.add_note(
            f"[table {table.config.name!r}] The {len(keys)} first rows that the lookup was writing could not be erased "
            f"again ({other}): those that were written stay, as they were born."
        )


# ---- scores


def touch(tables: "Sequence[HostTable]", batch: "Forward", large: Large) -> None:
    """Raise the scores of a batch's rows, wherever they are: twice is once."""
    for at, number in enumerate(large.tables):
        table, score = tables[number], batch.scores[number]
        keys, lives = large.keys_of(at)
        slots = table.find(keys).masked_fill_(~lives, NO_SLOT)
        batch.bags.fill(large.keys, at, slots)
        for part in batch.plan.parts:
            if part.trains and part.table == number:
                batch.bags.touch(table.storage.rows, part.source, part.slot_list, score, table.listed)
        batch.bags.fill(large.keys, at, slots.fill_(NO_SLOT))
        if table.below is None:
            continue
        for some in keys[lives & (table.find(keys) == NO_SLOT)].split(rows_of_a_piece(table)):
            rows, found, _has = table.below.read(some)
            if not bool(found.any()):
                continue
            some, rows = some[found], rows[found]
            packed = table.storage.packed
            older = packed.scores(rows) < score
            if bool(older.any()):
                some, rows = some[older], rows[older]
                packed.set_scores(rows, score)
                table.changes.add(some)
                table.write_below(some, rows)


# ---- backward


@dataclass
class _Piece:
    """Keys of one table whose rows are below."""

    table: int
    at: int  # among those that train
    keys: Tensor
    which: Tensor  # their numbers among the batch's


@dataclass
class _Updated:
    """A piece that was updated, or is about to be; `bags` knows."""

    number: int
    bags: _native.Bags
    keys: Tensor
    slots: Tensor  # of the area


class LargeUpdate:
    """The update of a batch's rows. `run` goes on where an interrupt ended it.

    Before a row changes all rows are read, but for those of the first piece, which are read right before: a storage
    that has lost some, or is away, ends it with nothing changed. From the first write on it comes to its end: where a
    storage fails then, the rows in memory take the step and the step counts, as if all had, and the error has a note of
    what did not.
    """

    def __init__(
        self,
        tables: "Sequence[HostTable]",
        batch: "Forward",
        large: Large,
        factor: float,
        decided: Decided,
    ) -> None:
        self._batch, self._plan = batch, batch.plan
        self._tables = [tables[number] for number in large.tables]
        self._large = large
        self._decided = decided
        self._slots: list[Tensor] = []
        self._pieces: list[_Piece] = []
        self._counted: list[_native.Backwards] = []
        self._of_pieces: list[_native.UpdateTable] = []
        self._of_memory: list[_native.UpdateTable] = []
        self._areas: list[Area | None] = []
        self._features = []
        for at, (number, table) in enumerate(zip(large.tables, self._tables, strict=True)):
            keys, lives = large.keys_of(at)
            slots = table.find(keys)
            below = lives & (slots == NO_SLOT)
            self._slots.append(slots.masked_fill_(~lives, NO_SLOT))
            counted = _native.Backwards()
            counted.dropped = len(keys) - int(lives.sum())
            self._counted.append(counted)
            score = batch.scores[number]
            memory = table.update_in_memory(score, 1.0 / factor, counted)
            self._of_memory.append(memory)
            self._features.append(self._features_of(number))
            numbers = torch.nonzero(below)[:, 0]
            if table.below is None or not len(numbers):
                if len(numbers):
                    counted.dropped += len(numbers)
                self._areas.append(None)
                self._of_pieces.append(memory)
                continue
            size = rows_of_a_piece(table)
            area = Area(table, min(size, len(numbers)))
            self._areas.append(area)
            self._of_pieces.append(table.update_outside_memory(area.storage.rows, score, 1.0 / factor, counted))
            self._pieces += [_Piece(number, at, keys[some], some) for some in numbers.split(size)]
        self._is_read = self._has_begun = False
        self._done = 0
        self._updated: _Updated | None = None
        self.left_out: list[LeftOut] = []

    def _features_of(self, number: int) -> tuple[list[int], list[_native.UpdateFeature]]:
        """The features that feed a table, and their numbers among those that train."""
        parts = [self._plan.parts[at] for at in self._plan.training_parts]
        mine = [at for at, part in enumerate(parts) if part.table == number]
        pooling = POOLINGS[self._tables[self._large.tables.index(number)].config.pooling]
        return mine, [
            _native.UpdateFeature(0, parts[at].source, parts[at].slot_list, pooling, parts[at].column) for at in mine
        ]

    def run(self, values: Tensor, offsets: Tensor, weights: Tensor | None, *grads: Tensor) -> None:
        """Update all rows. The tensors are the batch's, and the gradients of its features that train, or of all."""
        if self._batch.applied:
            return
        failures = self._decided.failures()
        try:
            self._read_all()
            for number in range(self._done, len(self._pieces)):
                self._update(number, values, offsets, weights, grads)
                self._done = number + 1
        except Exception as error:
            if not self._has_begun or not self._decided.is_own(error, failures):
                raise
            self._end(values, offsets, weights, grads)
            error.add_note(self._told())
            raise
        try:
            self._end(values, offsets, weights, grads)
        except Exception as error:
            if self._has_begun and self._decided.is_own(error, failures):
                self._batch.bags.applied = True  # or rows below would take the step twice
                error.add_note(
                    "It came in the middle of a backward of more rows than memory holds: those below took the step, "
                    "those in memory did not, and it does not count. The backward cannot be run again."
                )
            raise

    def _read_all(self) -> None:
        """See that the rows of all pieces but the first can be read."""
        if self._is_read:
            return
        for piece in self._pieces[1:]:
            self._below(piece).read(piece.keys)
        self._is_read = True

    def _below(self, piece: _Piece) -> Any:
        below = self._tables[piece.at].below
        assert below is not None
        return below

    def _update(
        self, number: int, values: Tensor, offsets: Tensor, weights: Tensor | None, grads: Sequence[Tensor]
    ) -> None:
        piece, table = self._pieces[number], self._tables[self._pieces[number].at]
        area = self._areas[piece.at]
        assert area is not None
        updated = self._updated
        if updated is None or updated.number != number or not updated.bags.applied:
            rows, found, has = self._below(piece).read(piece.keys)
            keys, which = piece.keys, piece.which
            if has < len(keys):
                keys, which, rows = keys[found], which[found], rows[found]
            slots = area.slots(len(keys))
            area.storage.unpack(slots, rows, 0)
            bags = bags_of(values, offsets, weights, len(self._plan.names), self._plan.slot_lists)
            bags.begin_ahead()
            all_slots = torch.full((self._large.keys.counts[piece.at],), NO_SLOT, dtype=torch.int32, device="cpu")
            all_slots[which] = slots
            bags.fill(self._large.keys, piece.at, all_slots)
            updated = self._updated = _Updated(number, bags, keys, slots)
            mine, features = self._features[piece.at]
            update(
                [self._of_pieces[piece.at]], features, grads if len(grads) == 1 else [grads[at] for at in mine], bags
            )
        changed = area.storage.is_changed(updated.slots)
        self._has_begun = True
        if bool(changed.any()):
            keys = updated.keys[changed]
            table.changes.add(keys)
            table.write_below(keys, area.storage.pack(updated.slots[changed]))

    def _end(self, values: Tensor, offsets: Tensor, weights: Tensor | None, grads: Sequence[Tensor]) -> None:
        """Update the rows in memory; with them the step counts, and the batch's backward is done."""
        bags = self._batch.bags
        bind_again(bags, values, offsets, weights)
        for at, slots in enumerate(self._slots):
            bags.fill(self._large.keys, at, slots)
        self.left_out = update(self._of_memory, self._plan.update_features, grads, bags)

    def _told(self) -> str:
        """What a failure in the middle leaves."""
        told = []
        for at, table in enumerate(self._tables):
            rest = [piece.keys for piece in self._pieces[self._done :] if piece.at == at]
            if rest:
                keys = torch.cat(rest)
                some = ", ".join(map(str, keys[:10].tolist()))
                told.append(
                    f"{len(keys)} of the {self._large.keys.counts[at]} keys of table {table.config.name!r} "
                    f"({some}{', ...' if len(keys) > 10 else ''}) did not take the step, or may not have"
                )
        return (
            f"It came in the middle of a backward of more rows than memory holds: {'; '.join(told)}. All others took "
            f"it, and the step counts; the backward cannot be run again."
        )
