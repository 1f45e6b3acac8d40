"""Rows to output: the forward of a lookup."""

from shoal.ops.pool.cpu import pool, pool_each

__all__ = ["pool", "pool_each"]
