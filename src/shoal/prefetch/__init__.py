"""Rows of the next batches, brought up while this one trains."""

from shoal.prefetch.ahead import Prefetch, prefetch

__all__ = ["Prefetch", "prefetch"]
