"""Keys to rows to output: the forward of a lookup."""

from shoal.ops.pool.cpu import bags_of, bind_again, pool, pool_each, remembers

__all__ = ["bags_of", "bind_again", "pool", "pool_each", "remembers"]
