"""Tables: the only place where indexes, storages and optimizers meet."""

from shoal.table import ops, registry, snapshot
from shoal.table.group import Group, LossScale
from shoal.table.handle import TableHandle
from shoal.table.host import TableStats

__all__ = ["Group", "LossScale", "TableHandle", "TableStats", "ops", "registry", "snapshot"]
