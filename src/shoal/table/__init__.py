"""Tables: the only place where indexes, storages and optimizers meet."""

from shoal.table import ops, registry
from shoal.table.content import TableContent, TableStats, TierStats, content_bytes
from shoal.table.group import Group, LossScale, Staging
from shoal.table.handle import TableHandle
from shoal.table.host_group import HostGroup
from shoal.table.open import open_group

__all__ = [
    "Group",
    "HostGroup",
    "LossScale",
    "Staging",
    "TableContent",
    "TableHandle",
    "TableStats",
    "TierStats",
    "content_bytes",
    "open_group",
    "ops",
    "registry",
]
