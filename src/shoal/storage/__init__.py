"""Storages: rows by slot. They know no keys."""

from shoal.storage.dram import DramStorage

__all__ = ["DramStorage"]
