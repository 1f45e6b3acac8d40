"""Indexes: key to slot. They store slots and own no rows."""

from shoal.index.host import NO_SLOT, HostIndex, KeyRange, Missing, empty_slots, find, insert, missing

__all__ = ["NO_SLOT", "HostIndex", "KeyRange", "Missing", "empty_slots", "find", "insert", "missing"]
