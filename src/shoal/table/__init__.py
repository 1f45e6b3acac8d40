"""Tables: the only place where indexes, storages and optimizers meet."""

from shoal.table import ops, registry
from shoal.table.content import TableContent, content_bytes
from shoal.table.found import collections_in
from shoal.table.group import Group
from shoal.table.handle import TableHandle
from shoal.table.host.group import HostGroup
from shoal.table.job import JobRank, this_rank
from shoal.table.open import open_group
from shoal.table.protocols import GroupTable, LossScale
from shoal.table.request import Batch, Each, Pooled, Request, Update
from shoal.table.staged_together import StagedTogether
from shoal.table.staging import Staging
from shoal.table.stats import TableStats, TierStats
from shoal.table.without_rows import are_left_out, without_rows

__all__ = [
    "Batch",
    "Each",
    "Group",
    "GroupTable",
    "HostGroup",
    "JobRank",
    "LossScale",
    "Pooled",
    "Request",
    "StagedTogether",
    "Staging",
    "TableContent",
    "TableHandle",
    "TableStats",
    "TierStats",
    "Update",
    "are_left_out",
    "collections_in",
    "content_bytes",
    "open_group",
    "ops",
    "registry",
    "this_rank",
    "without_rows",
]
