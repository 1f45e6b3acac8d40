"""Measures: contenders alternate within one run, and a turn that other processes disturbed is taken again."""

import gc
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from benchmarks.effort import FULL, Effort

T = TypeVar("T")
OURS = "shoal"


@dataclass(frozen=True)
class Contender:
    """`step(i)` does the work on the i-th batch; `work` is how much of the result's unit one step is worth."""

    name: str
    step: Callable[[int], object]
    work: float = 1.0
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # entered for every turn, untimed


class Load(NamedTuple):
    wall: float
    busy: float  # seconds of CPU that all processes used, and seconds that the hypervisor took away
    own: float


def read_load() -> Load:
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft_irq, stolen = map(int, file.readline().split()[1:9])
    busy = (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return Load(time.monotonic(), busy, own.ru_utime + own.ru_stime)


def foreign_cores(before: Load, after: Load) -> float:
    """Returns the cores that other processes kept busy in between."""
    wall = after.wall - before.wall
    return ((after.busy - before.busy) - (after.own - before.own)) / wall if wall > 0 else 0.0


@dataclass
class QuietGate:
    """Takes a turn again while others load the machine. It looks at their load only, never at the time measured."""

    patience: float = 900.0  # seconds of waiting in all, after which disturbed turns are kept and counted
    most_foreign: float = 0.15  # cores
    tries: int = 8
    load: Callable[[], Load] = read_load
    sleep: Callable[[float], None] = time.sleep
    redone: int = 0
    disturbed: int = 0
    waited: float = field(default=0.0)

    def run(self, turn: Callable[[], T]) -> T:
        for attempt in range(1, self.tries + 1):
            before = self.load()
            taken = turn()
            if foreign_cores(before, self.load()) <= self.most_foreign:
                return taken
            if attempt == self.tries or self.waited >= self.patience:
                break
            self.redone += 1
            self._wait_for_quiet()
        self.disturbed += 1
        return taken

    def _wait_for_quiet(self) -> None:
        quiet = 0
        while quiet < 2 and self.waited < self.patience:
            before = self.load()
            self.sleep(0.25)
            self.waited += 0.25
            quiet = quiet + 1 if foreign_cores(before, self.load()) <= self.most_foreign else 0


@dataclass(frozen=True)
class Quantiles:
    p20: float
    p50: float
    p80: float


def quantiles(values: Sequence[float]) -> Quantiles:
    """Returns the quantiles, by linear interpolation between the sorted values."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low, high = math.floor(position), math.ceil(position)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return Quantiles(at(0.2), at(0.5), at(0.8))


@dataclass(frozen=True)
class Result:
    """The measurements of a case: a value a round for each contender; the i-th values of all belong together."""

    unit: str
    rounds: Mapping[str, Sequence[float]]
    higher_is_better: bool = False
    redone: int = 0
    disturbed: int = 0

    def of(self, contender: str) -> Quantiles:
        return quantiles(self.rounds[contender])

    def ratio(self, peer: str) -> float:
        """Returns the median of the rounds' ratios of ours to the peer's: a drift changes both sides of a round."""
        return statistics.median(o / p for o, p in zip(self.rounds[OURS], self.rounds[peer], strict=True))

    @property
    def peers(self) -> list[str]:
        return [name for name in self.rounds if name != OURS]


class Bench:
    """The argument of a case: how long to measure, the gate, and the objects that the cases of one stage share."""

    def __init__(self, effort: Effort = FULL, gate: QuietGate | None = None) -> None:
        self.effort = effort
        self.gate = gate or QuietGate()
        self.say: Callable[[str], object] = lambda _what: None  # called with the progress
        self.tell: Callable[[str], object] = lambda _what: None  # called with remarks on a case's numbers
        self._kept: dict[str, Any] = {}
        self._stage: str | None = None

    def enter(self, stage: str) -> None:
        """Drops the objects of another stage's cases, so that memory holds the contenders of one stage only."""
        if stage != self._stage:
            self.clear()
            self._stage = stage

    def keep(self, name: str, build: Callable[[], T]) -> T:
        if name not in self._kept:
            self.say(f"building {name}")
            self._kept[name] = build()
        kept: T = self._kept[name]
        return kept

    def clear(self) -> None:
        """Drops all kept objects."""
        self._kept.clear()
        gc.collect()

    def alternate(
        self,
        contenders: Iterable[Contender],
        *,
        unit: str = "ms",
        scale: float = 1e3,
        rate: bool = False,
        warm_steps: int = 0,
    ) -> Result:
        """Measures rounds in which every contender takes a turn, after `warm_steps` each. A value is the mean of a
        turn's steps, so that it includes deferred work; `rate` gives `work` per second / scale instead of
        seconds x scale / work."""
        ready = list(contenders)
        position = {one.name: 0 for one in ready}
        rounds: dict[str, list[float]] = {one.name: [] for one in ready}
        redone, disturbed = self.gate.redone, self.gate.disturbed

        def turn(one: Contender) -> float:
            with one.around():
                one.step(position[one.name])  # untimed: the previous contender's lines leave the caches
                position[one.name] += 1
                steps, start = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - start) < self.effort.turn_seconds or steps == 0:
                    one.step(position[one.name])
                    position[one.name] += 1
                    steps += 1
            return elapsed / steps

        gc.collect()
        gc.disable()
        try:
            for one in ready if warm_steps else ():
                self.say(f"warming {one.name}")
                with one.around():
                    for step in range(warm_steps):
                        one.step(step)
            for round_number in range(self.effort.rounds):
                shift = round_number % len(ready)  # so that no contender always follows the same one
                for one in ready[shift:] + ready[:shift]:
                    self.say(f"round {round_number + 1} of {self.effort.rounds}: {one.name}")
                    seconds = self.gate.run(lambda one=one: turn(one))
                    rounds[one.name].append(one.work / seconds / scale if rate else seconds * scale / one.work)
        finally:
            gc.enable()
        return Result(unit, rounds, rate, self.gate.redone - redone, self.gate.disturbed - disturbed)
