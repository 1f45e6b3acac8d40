"""The cases. A case is a function that returns a Result; it is registered with its comparison and its limits."""

import fnmatch
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Bench, Result
from benchmarks.peers import FBGEMM, FIO, PANDAS, ROCKSDB, Peer
from benchmarks.roof import PLAIN_C


@dataclass(frozen=True)
class Limit:
    """A bound on ours / peer. For times and bytes the ratio must be at most `ratio`, for rates at least."""

    ratio: float
    aim: float | None = None

    def widened(self, factor: float) -> "Limit":
        return Limit(self.ratio * factor, None if self.aim is None else self.aim * factor)


Limits = Mapping[str, Limit]  # by the peer's name


@dataclass(frozen=True)
class Case:
    name: str
    compares: str
    limits: Limits
    stage: str  # cases of one stage run one after the other and share what Bench.keep holds
    run: Callable[[Bench], Result]


class Registry:
    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def add(self, other: "Registry") -> None:
        """Adds the cases of another registry."""
        self._cases |= other._cases

    def case(
        self,
        name: str,
        *,
        compares: str,
        limits: Limits | Callable[..., Limits],
        stage: str = "{name}",
        **over: Iterable[Any],
    ) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
        """Registers a function for every combination of `over`, whose values it takes as keyword arguments.

        `name` and `stage` are format strings over those values; `limits` may be a function of them.
        """

        def register(function: Callable[..., Result]) -> Callable[..., Result]:
            for values in itertools.product(*over.values()):
                chosen = dict(zip(over, values, strict=True))
                full_name = name.format(**chosen)
                if full_name in self._cases:
                    raise ValueError(f"benchmarks: two cases are called '{full_name}'; a name is a row of the CSV")
                self._cases[full_name] = Case(
                    name=full_name,
                    compares=compares.format(**chosen),
                    limits=limits(**chosen) if callable(limits) else limits,
                    stage=stage.format(name=full_name, **chosen),
                    run=lambda bench, chosen=chosen: function(bench, **chosen),
                )
            return function

        return register

    def select(self, pattern: str = "*") -> list[Case]:
        """Returns the cases whose name contains `pattern` or matches it as a glob, the cases of a stage together."""
        cases = [c for c in self._cases.values() if pattern in c.name or fnmatch.fnmatchcase(c.name, pattern)]
        first = {}
        for position, one in enumerate(cases):
            first.setdefault(one.stage, position)
        return sorted(cases, key=lambda c: first[c.stage])


# The modules with a suite's cases.
SUITES = {"cpu": ("cpu", "real"), "gpu": ("gpu", "gpu_tiers"), "tiers": ("tiers", "spill"), "log": ("log",)}
# The peers of a suite, which may not be installed.
PEERS: dict[str, tuple[Peer, ...]] = {
    "cpu": (FBGEMM, PANDAS, PLAIN_C),
    "gpu": (),
    "tiers": (FIO, ROCKSDB, PLAIN_C),
    "log": (FIO, PLAIN_C),
}


def suite(name: str) -> Registry:
    """Returns all cases of a suite. Imports their modules, and peers that are installed."""
    cases = Registry()
    for module in SUITES[name]:
        cases.add(importlib.import_module(f"benchmarks.{module}").registry)
    return cases
