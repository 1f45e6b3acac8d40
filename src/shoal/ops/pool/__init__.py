"""Keys to rows to output: the forward of a lookup."""

from shoal.ops.pool.cpu import bags_of, bind_again, has_bags_of, pool, pool_each

__all__ = ["bags_of", "bind_again", "has_bags_of", "pool", "pool_each"]
