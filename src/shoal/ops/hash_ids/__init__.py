"""Ids of strings and of unsigned integers: int64, as tables want them. docs/formats.md specifies every bit."""

from shoal.ops.hash_ids.columns import hash_ids
from shoal.ops.hash_ids.hint import hint_for

__all__ = ["hash_ids", "hint_for"]
