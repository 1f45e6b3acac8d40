"""Rows of the next batches, brought up while this one trains."""

from shoal.prefetch.loader import Prefetch, prefetch

__all__ = ["Prefetch", "prefetch"]
