"""Training with tables larger than memory, compared with enough memory, and with the disk's own speed.

The work is that of the cpu suite at dim 64. Every step has a batch of its own: a batch that came a second time would
find its rows in memory.
"""

import itertools
import pathlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import shoal
from benchmarks import memory, work
from benchmarks.measure import OURS, Bench, Result
from benchmarks.ours import NAMES
from benchmarks.peers import FIO, fio
from benchmarks.registry import Limit, Registry

registry = Registry()
DIM = 64
DEPTH = 128  # requests at a time on the disk: the store's own
# At these exponents 1.5 % and 1 % of a batch's different keys are not in memory that holds a quarter of the rows.
SKEWED = (1.5, 1.56)


def keys_of_batch(exponent: float, rows: int, bags: int, number: int) -> torch.Tensor:
    """Returns keys of all tables, drawn by Zipf's law."""
    random = np.random.default_rng(9000 + number)
    cumulated = _cumulated(exponent, rows)
    ranks = np.searchsorted(cumulated, random.random((work.TABLES, bags * work.BAG)) * cumulated[-1])
    ids = torch.from_numpy(ranks.clip(max=rows - 1))
    return torch.cat([work.keys_of(ids[table], stream=table) for table in range(work.TABLES)])


_sums: dict[tuple[float, int], np.ndarray] = {}


def _cumulated(exponent: float, rows: int) -> np.ndarray:
    if (exponent, rows) not in _sums:
        _sums[exponent, rows] = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return _sums[exponent, rows]


def batches(exponent: float, rows: int, bags: int, numbers: Iterable[int]) -> list[shoal.KeyedJaggedTensor]:
    lengths = torch.full((work.TABLES * bags,), work.BAG)
    return [
        shoal.KeyedJaggedTensor(NAMES, keys_of_batch(exponent, rows, bags, number), lengths=lengths)
        for number in numbers
    ]


@dataclass(frozen=True)
class Step:
    """The time of a step, and the rows that it found in memory."""

    milliseconds: float
    misses: float  # rows that came from the disk
    hit_rate: float  # of different keys
    different: float


class Subject:
    """Tables of so many rows, in memory or partly on disk, for batches of so many bags."""

    def __init__(self, rows: int, bags: int, memory: float | None, folder: pathlib.Path | None) -> None:
        tiers = None
        if memory is not None:
            # The bytes of a table's rows and index when all of them are in memory.
            whole = rows * (DIM * 4 + 4 + 12 + 17)
            tiers = [shoal.Dram(int(whole * memory)), shoal.Ssd(str(folder), 4 * whole + (64 << 20))]
        tables = [shoal.Table(name, DIM, tiers=tiers, optimizer=shoal.RowwiseAdagrad(lr=0.01)) for name in NAMES]
        self.bags = shoal.EmbeddingBagCollection(tables, seed=0)
        self.gradient = work.gradient(DIM, bags)
        for table, name in enumerate(NAMES):
            handle, first = self.bags.table(name), work.rows(table, 1, DIM)
            # The hot ids last, so that they are in memory at the start.
            for ids in reversed(list(work.chunks(rows, 1 << 14))):
                handle.assign(work.keys_of(ids, stream=table), first.expand(len(ids), -1))

    def train(self, some: list[shoal.KeyedJaggedTensor], depth: int) -> Step:
        """Trains on batches, with `depth` of them ahead."""
        different = sum(len(batch.values().unique()) for batch in some) / len(some)
        before, begin = self._fetched(), time.perf_counter()
        for batch in shoal.prefetch(some, self.bags, depth=depth) if depth else some:
            self.bags(batch).values().backward(self.gradient)
        milliseconds = 1e3 * (time.perf_counter() - begin) / len(some)
        misses = (self._fetched() - before) / len(some)
        return Step(milliseconds, misses, 1 - misses / different, different)

    def _fetched(self) -> int:
        tiers = [stats.tiers for stats in self.bags.stats().values()]
        return sum(each[1].hits for each in tiers if len(each) > 1)


def _spill(bench: Bench, exponent: float) -> Result:
    from benchmarks.scratch import folder

    rows, bags, disk = bench.effort.live_rows, bench.effort.bags, bench.effort.disk
    with folder() as here:
        bench.say("filling tables")
        whole, part = Subject(rows, bags, None, None), Subject(rows, bags, 0.25, here / "rows")
        if FIO.is_installed:
            fio.run(here / "fio", "write", "1M", 8, disk.file_bytes, disk.turn_seconds / 2)
        numbers = itertools.count()
        bench.say("warming up")
        for _ in range(bench.effort.spill.warm_turns):
            some = batches(exponent, rows, bags, itertools.islice(numbers, bench.effort.spill.turn_steps))
            whole.train(some, 0)
            part.train(some, 2)
        rounds: dict[str, list[float]] = {OURS: [], "limit": [], "all in memory": [], "misses by fio": []}
        steps: list[Step] = []
        for number in range(bench.effort.rounds):
            bench.say(f"round {number + 1}")
            some = batches(exponent, rows, bags, itertools.islice(numbers, bench.effort.spill.turn_steps))
            in_memory = whole.train(some, 0).milliseconds
            steps.append(part.train(some, 2))
            rounds[OURS].append(steps[-1].milliseconds)
            rounds["all in memory"].append(in_memory)
            if FIO.is_installed:
                reads = fio.run(here / "fio", "randread", "4k", DEPTH, disk.file_bytes, disk.turn_seconds / 2)
                by_fio = 1e3 * steps[-1].misses / reads["requests"]
                rounds["misses by fio"].append(by_fio)
                rounds["limit"].append(max(in_memory, by_fio))
        middle = sorted(steps, key=lambda one: one.milliseconds)[len(steps) // 2]
        bench.tell(
            f"{middle.hit_rate:.1%} of {middle.different:.0f} different keys in memory, {middle.misses:.0f} "
            "misses a step"
        )
    return Result("ms", {name: values for name, values in rounds.items() if values})


@registry.case(
    "train, memory for a quarter of the rows, zipf 1.05, prefetch",
    compares="a step to the longer of the same step all in memory, and its misses by fio's random reads",
    limits={"limit": Limit(1.3)},
)
def quarter(bench: Bench) -> Result:
    return _spill(bench, work.ZIPF_EXPONENT)


@registry.case(
    "train, memory for a quarter of the rows, zipf {exponent}, prefetch",
    compares="a step of which about one key in a hundred is not in memory, to the same all in memory",
    limits={"all in memory": Limit(1.5)},
    exponent=SKEWED,
)
def skewed(bench: Bench, exponent: float) -> Result:
    return _spill(bench, exponent)


@registry.case(
    "train, everything in memory, an ssd below it, zipf 1.05",
    compares="a step to the same without the ssd",
    limits={"without ssd": Limit(1.03)},
)
def fits(bench: Bench) -> Result:
    from benchmarks.measure import Contender
    from benchmarks.scratch import folder

    rows, bags, count = bench.effort.live_rows, bench.effort.bags, bench.effort.batches
    with folder() as here:
        without, with_ssd = Subject(rows, bags, None, None), Subject(rows, bags, 1.5, here / "rows")
        some = batches(work.ZIPF_EXPONENT, rows, bags, range(count))

        def step(subject: Subject, number: int) -> None:
            subject.bags(some[number % len(some)]).values().backward(subject.gradient)

        return bench.alternate(
            [
                Contender(OURS, lambda number: step(with_ssd, number)),
                Contender("without ssd", lambda number: step(without, number)),
            ],
            warm_steps=2 * count,
        )


@registry.case(
    "memory of a table four times as large, dim 64",
    compares="what was resident at most, less that of a tiny table, to the budget + 24 bytes a row on disk + 32 MiB",
    limits={"allowed": Limit(1.0)},
)
def resident_memory(bench: Bench) -> Result:
    sizes = bench.effort.memory
    asked = ("tiers", "--dim", "64", "--rows", str(sizes.spilled_rows), "--steps", str(sizes.spilled_steps))
    taken: dict[str, Any] = memory.probe(*asked)
    allowed = taken["budget"] + 24 * taken["rows"] + (32 << 20)
    bench.tell(f"budget {taken['budget'] >> 20} MiB, disk index {taken['disk_index'] / taken['rows']:.1f} bytes a row")
    return Result("MiB", {OURS: [taken["taken"] / 2**20], "allowed": [allowed / 2**20]})
