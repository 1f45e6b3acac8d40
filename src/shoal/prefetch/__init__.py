"""Rows of the next batches, brought up while this one trains."""

from shoal.prefetch.ahead import Prefetch, prefetch
from shoal.prefetch.run import PrefetchWarning

__all__ = ["Prefetch", "PrefetchWarning", "prefetch"]
