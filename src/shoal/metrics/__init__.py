"""Counters and gauges of what tables and tiers have done. Mechanism increments and registers; `stats()` reads."""

from shoal.metrics.counters import Counters
from shoal.metrics.metrics import Counter, Metrics

__all__ = ["Counter", "Counters", "Metrics"]
