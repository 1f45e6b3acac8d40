"""Counters of what a table has done. Mechanism increments; whoever reports takes a snapshot."""

from shoal.metrics.counters import Counters

__all__ = ["Counters"]
