"""The metrics of a table's tiers in memory: of copies in device memory, and of the rows that kernels reach."""

from functools import partial

from shoal.config import Hbm
from shoal.metrics import Metrics
from shoal.table.device.residency import DeviceMemory
from shoal.table.device.room import budget_above, last_tier
from shoal.table.device.rows import DeviceRows


def memory_tiers(rows: DeviceRows, number: int, deep: DeviceMemory | None) -> tuple[Metrics, ...]:
    """The metrics of each tier in memory of a table, the highest first. `deep`: its rows, if it has a lower tier."""
    config, above = rows.configs[number], rows.above
    if deep is None:
        reached = Metrics(rows, name=last_tier(config), budget_bytes=rows.budget(number))
        reached.gauges(partial(_reached, number=number))
    else:
        reached = deep.metrics
        reached.gauges(partial(_reached_above_lower, number=number))
    if above is not None and above.has(number) and config.tier(Hbm) is not None:
        copies = Metrics(rows, name="Hbm", budget_bytes=budget_above(config))
        copies.gauges(partial(_copies, number=number))
        return copies, reached
    return (reached,)


def _reached(rows: DeviceRows, number: int) -> dict[str, int | None]:
    counted, index_bytes = rows.counted(number), rows.index.bytes(number)
    held, row_bytes = int(rows.ledger.keys[number]), rows.layout(number).row_bytes
    misses = counted["lookups"] - counted["hits"]
    told = {
        "rows": held,
        "bytes": index_bytes + held * row_bytes,
        "index_bytes": index_bytes,
        "hits": counted["hits"],
        "misses": misses,
        "capacity": rows.capacity(number),
    }
    if rows.above is not None and rows.above.has(number):
        promoted, demoted = rows.above.counted(number)
        told["hits"] = rows.not_above(number) - misses
        told["read_bytes"], told["written_bytes"] = promoted * row_bytes, demoted * row_bytes
    return told


def _reached_above_lower(deep: DeviceMemory, number: int) -> dict[str, int | None]:
    """Keys that were fetched from the lower tier for their batch were not in memory."""
    told = _reached(deep.reached, number)
    told["hits"] = (told["hits"] or 0) - deep.fetched
    told["misses"] = (told["misses"] or 0) + deep.fetched
    return told | deep.measured()


def _copies(rows: DeviceRows, number: int) -> dict[str, int]:
    above = rows.above
    assert above is not None
    promoted, demoted = above.counted(number)
    copies, dirty, pinned = above.held(number, rows.oldest_at_work(True))
    not_above = rows.not_above(number)
    return {
        "rows": copies,
        "bytes": above.bytes(number),
        "index_bytes": above.index.bytes(number),
        "hits": rows.counted(number)["lookups"] - not_above,
        "misses": not_above,
        "promotions": promoted,
        "demotions": demoted,
        "dirty": dirty,
        "pinned": pinned,
        "capacity": above.most[number],
    }
