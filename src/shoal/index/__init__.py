"""Indexes: key to slot. They store slots and own no rows."""

from shoal.index.host import NO_SLOT, HostIndex

__all__ = ["NO_SLOT", "HostIndex"]
