"""A histogram of scores that come piece by piece, and whose range is not known before the last piece."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_BARS = 16
_EXACT_BITS = 50  # of a bar's number


@dataclass(frozen=True)
class Bar:
    """The number of scores in [low, high)."""

    low: float
    high: float
    rows: int


class ScoreHistogram:
    """Counts scores in bars. Their width is a power of two, and they begin at multiples of it: where the range grows,
    two neighbouring bars become one, and counts stay exact."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._power: int | None = None

    def add(self, scores: Tensor) -> None:
        """Counts some more scores. REQUIRES: they are finite."""
        if not len(scores):
            return
        low, high = (float(end) for end in torch.aminmax(scores))
        wanted = _power_for(low, high, bool((scores == scores.floor()).all()))
        self._widen(wanted if self._power is None else max(self._power, _exact_power(low, high)))
        assert self._power is not None
        scaled = torch.floor(scores * 2.0**-self._power)
        scaled[(scores < 0) & (scaled == 0)] = -1.0  # too small for a float64, and below zero
        numbers, counts = torch.unique(scaled.to(torch.int64), return_counts=True)
        # A piece with a wide range may have many bars: they are counted before they are merged.
        self._counts.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        while max(self._counts) - min(self._counts) >= _MOST_BARS:
            self._widen(self._power + 1)

    def _widen(self, power: int) -> None:
        if self._power is not None and power > self._power:
            merged: Counter[int] = Counter()
            for number, count in self._counts.items():
                merged[number >> (power - self._power)] += count
            self._counts = merged
        self._power = power

    def bars(self) -> list[Bar]:
        """Returns the bars from the lowest score to the highest, including empty ones."""
        if self._power is None:
            return []
        width = 2.0**self._power
        numbers = range(min(self._counts), max(self._counts) + 1)
        return [Bar(number * width, (number + 1) * width, self._counts[number]) for number in numbers]


def _power_for(low: float, high: float, whole: bool) -> int:
    # Divided first: the difference of two finite numbers may be infinite.
    span = high / _MOST_BARS - low / _MOST_BARS
    power = math.ceil(math.log2(span)) if span > 0 else 0
    return max(power, 0 if whole else -1000, _exact_power(low, high))


def _exact_power(low: float, high: float) -> int:
    return math.frexp(max(abs(low), abs(high)))[1] - _EXACT_BITS
