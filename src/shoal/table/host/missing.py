"""The keys of a batch that host memory lacks: read as missing, brought from below, or born."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.index import NO_SLOT
from shoal.storage import Answer
from shoal.table.host.arrivals import Arrivals, Arriving
from shoal.table.host.forward import Forward
from shoal.table.host.in_use import InUse
from shoal.table.host.table import HostTable
from shoal.table.lifecycle.admission import Admission, Candidates, admitted
from shoal.table.lower.read import Asked, read_below
from shoal.table.lower.staged import Staged
from shoal.table.lower.threads import IoThreads


class Missing:
    """Those keys of one batch, by table. Of each table first the keys that may be born, then the others."""

    def __init__(self, tables: Sequence[HostTable], forward: Forward, lacking: Sequence[int]) -> None:
        """`lacking`: how many keys each part of the plan lacks."""
        self._forward = forward
        bearing: dict[int, list[tuple[int, int]]] = {}
        others: dict[int, list[tuple[int, int]]] = {}
        for part, lacks in zip(forward.plan.parts, lacking, strict=True):
            if lacks and part.trains and forward.training:
                bearing.setdefault(part.table, []).append((part.source, part.slot_list))
            elif lacks and tables[part.table].below is not None:
                others.setdefault(part.table, []).append((part.source, part.slot_list))
        self.numbers = list(bearing | others)
        self.tables = [tables[number] for number in self.numbers]
        parts = [bearing.get(number, []) + others.get(number, []) for number in self.numbers]
        self._keys = forward.bags.missing(parts, get_num_threads())
        # So many of a table's keys are born if they are not below.
        self._bearing = [
            self._keys.count_after(at, len(bearing.get(number, []))) for at, number in enumerate(self.numbers)
        ]

    # ---- whether memory has room for them

    def fit(self, in_use: InUse) -> bool:
        """Whether memory can have all rows of the batch, once all rows that no batch needs have left it."""
        at_most = self._forward.keys + in_use.most_keys()
        for number, table, count in zip(self.numbers, self.tables, self._keys.counts, strict=True):
            if table.below is None or table.room.can_hold(count, at_most):
                continue
            pins = _native.Pins(table.storage.rows)
            in_use.pin(number, pins, False, False)
            self._forward.pin(number, pins)
            if not table.room.can_hold(count, pins.count):
                return False
        return True

    # ---- what becomes of them

    def ask(self, asked: dict[int, Staged], io_threads: IoThreads) -> None:
        """Add to `asked` what is below, by table. The caller releases each."""
        questions = []
        for at, (number, table) in enumerate(zip(self.numbers, self.tables, strict=True)):
            assert table.below is not None  # without births only such tables lack keys
            asked[number] = table.below.stage(self._keys.keys(at), ahead=False)
            questions.append(Asked(table.below, asked[number].keys))
        for number, answer in zip(self.numbers, read_below(questions, io_threads), strict=True):
            asked[number].set(answer)

    def read_as_missing(self) -> None:
        """Finish the output: none of them has a row."""
        for at, count in enumerate(self._keys.counts):
            self._forward.bags.fill(self._keys, at, _no_slots(count))
        self._forward.bags.finish(get_num_threads())

    def bring(
        self,
        answers: Mapping[int, Staged],
        values: Tensor,
        admissions: Mapping[int, Admission],
        in_use: InUse,
        io_threads: IoThreads,
    ) -> list[tuple[int, Arrivals]]:
        """Give them rows from below and births, all of them or none, and finish the output; returns what came, by the
        tables' numbers.

        `answers`: what is known of what is below; `values`: the batch's.
        """
        coming = self._coming(self._read_below(answers, io_threads), values, admissions)
        bags = self._forward.bags
        try:
            in_use.arriving = self._forward
            with Arriving(self.tables, [come for come, _which in coming]) as slots:
                for at, (taken, (_come, which)) in enumerate(zip(slots, coming, strict=True)):
                    if which is not None:
                        taken = _no_slots(len(which)).masked_scatter_(which, taken)
                    bags.fill(self._keys, at, taken)
                bags.finish(get_num_threads())
        finally:
            in_use.arriving = None
        for at, (table, (come, which)) in enumerate(zip(self.tables, coming, strict=True)):
            if which is not None and come.fetched is not None:
                table.tally.add(fetched=self._keys.positions(at, which.masked_scatter(which, come.fetched)))
        return [(number, come) for number, (come, _which) in zip(self.numbers, coming, strict=True)]

    def _read_below(self, answers: Mapping[int, Staged], io_threads: IoThreads) -> dict[int, Answer]:
        """What is below of each table that has something there, by its place among these tables."""
        questions = {
            at: Asked(table.below, self._keys.keys(at), answers.get(number))
            for at, (number, table) in enumerate(zip(self.numbers, self.tables, strict=True))
            if table.below is not None
        }
        return dict(zip(questions, read_below(list(questions.values()), io_threads), strict=True))

    def _coming(
        self, below: Mapping[int, Answer], values: Tensor, admissions: Mapping[int, Admission]
    ) -> list[tuple[Arrivals, Tensor | None]]:
        """What comes into memory of each table's keys, and which of the keys these are; None is all."""
        coming: list[tuple[Arrivals, Tensor | None]] = []
        for at, (number, table) in enumerate(zip(self.numbers, self.tables, strict=True)):
            keys, bearing, answer = self._keys.keys(at), self._bearing[at], below.get(at)
            if admission := admissions.get(number):
                coming.append(self._admitted(number, keys, bearing, answer, values, admission))
            else:
                coming.append(table.arrivals(keys, bearing, answer))
        return coming

    def _admitted(
        self, number: int, keys: Tensor, bearing: int, below: Answer | None, values: Tensor, admission: Admission
    ) -> tuple[Arrivals, Tensor]:
        """The same of one table with a policy: rows that are below come, and births that the policy admits."""
        forward, table = self._forward, self.tables[self.numbers.index(number)]
        found = torch.zeros(len(keys), dtype=torch.bool, device="cpu") if below is None else below.found
        may = ~found
        may[bearing:] = False
        brought = partial(forward.values_of, number, values)
        candidates = Candidates(table.config.name, table.step, keys[may], brought)
        born = may.masked_scatter(may, admitted(admission, candidates))
        if refused := int(may.sum()) - int(born.sum()):
            forward.refused[number] = refused
        comes = found | born
        if below is None:
            return Arrivals(keys[comes]), comes
        return Arrivals(keys[comes], below.rows[found], found[comes]), comes


def _no_slots(count: int) -> Tensor:
    return torch.full((count,), NO_SLOT, dtype=torch.int32, device="cpu")
