"""What a table tells about itself: its metrics and its tiers' metrics, read at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.metrics import Metrics


@dataclass(frozen=True)
class TierStats:
    """One tier of a table at one moment. Counters start at zero when the table is created."""

    name: str  # "Hbm", "Dram", "Ssd", or the class of a storage
    rows: int
    bytes: int  # of memory or files; for memory its index is among them
    budget_bytes: int | None
    index_bytes: int  # of memory
    hits: int = 0  # keys that were looked up and found; below memory each once a batch
    misses: int = 0
    promotions: int = 0  # rows that came up into it
    # Rows that it wrote to the tier below, which had an older copy of them or none. One that leaves as it came is none;
    # one that was written and then stayed, as a batch needed it meanwhile, is.
    demotions: int = 0
    dirty: int = 0  # rows that differ from the tier below, or are not there
    pinned: int = 0  # rows that batches at work or on their way hold
    read_bytes: int = 0
    written_bytes: int = 0
    reads: int = 0  # calls, of many rows each
    writes: int = 0
    failures: int = 0  # calls that raised; of those that prefetch made, only this count tells
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    capacity: int | None = None  # rows, where it is known
    ahead_bytes: int = 0  # of rows that prefetch read from it and that have no place above yet, outside of any budget


@dataclass(frozen=True)
class TableStats:
    """A table at one moment."""

    rows: int  # in all tiers
    bytes: int  # of the memory that rows and index take
    index_bytes: int
    storage_bytes: int
    budget_bytes: int | None  # of its memory; None where there is no limit
    step: int  # updates of the table so far: one for each backward
    counters: Mapping[str, int]  # by name; they start at zero when the table is created
    tiers: tuple[TierStats, ...] = ()


def table_stats(
    rows: int, step: int, budget: int | None, counters: Metrics, memory: Sequence[Metrics], lower: Metrics | None
) -> TableStats:
    """Statistics of a table. The metrics of its tiers, in `memory` and `lower`, are named as the fields of
    TierStats."""
    tiers = [TierStats(**tier.read()) for tier in memory]
    size, index_bytes = sum(tier.bytes for tier in tiers), sum(tier.index_bytes for tier in tiers)
    if lower is not None:
        tiers.append(TierStats(**lower.read()))
    return TableStats(
        rows=rows,
        bytes=size,
        index_bytes=index_bytes,
        storage_bytes=size - index_bytes,
        budget_bytes=budget,
        step=step,
        counters=counters.read(),
        tiers=tuple(tiers),
    )
