"""Counters and gauges of one object, by name."""

import weakref
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any


class Counter:
    """A number that starts at 0 and only grows. Safe to use from any thread."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = Lock()
        self.value: Any = 0

    def add(self, n: float = 1) -> None:
        """Add `n`."""
        with self._lock:
            self.value += n


class Metrics:
    """What one object counts and measures. Mechanism adds to counters; gauges are read by `read`, from the object
    itself, which they do not keep alive."""

    def __init__(self, owner: object, **constants: Any) -> None:
        self._owner = weakref.ref(owner)
        self._constants = constants
        self._counters: dict[str, Counter] = {}
        self._gauges: list[Callable[[Any], Mapping[str, Any]]] = []

    def counter(self, name: str) -> Counter:
        """Register a counter."""
        return self._counters.setdefault(name, Counter())

    def gauges(self, measure: Callable[[Any], Mapping[str, Any]]) -> None:
        """Register numbers that are measured together: `measure` takes the object, and returns them by name."""
        self._gauges.append(measure)

    def read(self) -> dict[str, Any]:
        """All values at one moment: constants, counters and gauges."""
        owner = self._owner()
        values = self._constants | {name: counter.value for name, counter in self._counters.items()}
        for measure in self._gauges if owner is not None else ():
            values |= measure(owner)
        return values
