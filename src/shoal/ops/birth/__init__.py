"""The first row of a key, a function of (seed, table name, key) alone. docs/formats.md specifies every bit."""

from shoal.ops.birth.cpu import birth, native_init

__all__ = ["birth", "native_init"]
