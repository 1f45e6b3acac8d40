"""Storages. Those of a table's memory have rows by slot and know no keys; `Storage` has them by key, below that."""

from shoal.storage.conformance import check_storage
from shoal.storage.dram import DramStorage
from shoal.storage.keyed import Answer, Storage
from shoal.storage.memory import MemoryStorage
from shoal.storage.ssd import SsdStorage

__all__ = ["Answer", "DramStorage", "MemoryStorage", "SsdStorage", "Storage", "check_storage"]
