"""How much memory the rows of a table take, and how many more its budget has room for."""

from shoal.config import Dram, Table, format_size
from shoal.errors import CapacityError, ConfigError
from shoal.index import HostIndex
from shoal.storage import DramStorage

# What a table without Dram among its tiers has of memory to work in.
_WORKING_BYTES = 64 << 20
# A full bucket at the end of an index passes keys on to some after it.
_SPILL_BYTES = 512


def budget_of(config: Table) -> int | None:
    """Bytes of memory that a table's rows and index may take; None without limit. Raises ConfigError where that is too
    little for one row."""
    dram = config.tier(Dram)
    if dram is None:
        return _WORKING_BYTES if config.tiers else None
    if dram.bytes is not None and dram.bytes < (needed := _bytes_for(config, 1) + _SPILL_BYTES):
        raise ConfigError(
            f"[Table {config.name!r}] tiers: wanted memory for a row and the index, which take {needed} bytes; got "
            f"Dram({dram.bytes}). Raise it: the rows of a batch have to fit."
        )
    return dram.bytes


def _bytes_for(config: Table, rows: int) -> int:
    """Bytes of memory that so many rows take with their index, if there is a budget."""
    storage, index = DramStorage(config.format), HostIndex()
    storage.keep_keys(index.native)
    return index.bytes_after(rows) + storage.bytes_after(rows)


class Room:
    """The room that a table's budget leaves in its index and storage. The group's lock covers all but `never_holds`."""

    def __init__(self, config: Table, budget: int | None, index: HostIndex, storage: DramStorage) -> None:
        self._config, self._budget = config, budget
        self._index, self._storage = index, storage

    @property
    def bytes(self) -> int:
        """Bytes of rows and index in memory."""
        return self._index.bytes + self._storage.bytes

    def fits(self, more: int) -> bool:
        """Whether there is room for so many rows more."""
        if self._budget is None:
            return True
        after = self._bytes_after(more)
        # Free slots and entries take nothing more.
        return after + _SPILL_BYTES <= self._budget or after <= self.bytes

    def _bytes_after(self, more: int) -> int:
        return self._index.bytes_after(more) + self._storage.bytes_after(more)

    def spare(self, wanted: int) -> int:
        """How many of so many more rows there is room for."""
        if self.fits(wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def never_holds(self, rows: int) -> bool:
        """Whether so many rows, without their index, take more than the budget."""
        return self._budget is not None and rows * self._storage.packed.bytes > self._budget

    def can_hold(self, more: int, held: int) -> bool:
        """Whether so many rows more fit once all but `held` rows have left."""
        lacking = more - self.spare(more)
        return lacking <= 0 or lacking <= len(self._index) - held

    def bytes_with(self, rows: int) -> int:
        """The budget that so many rows need."""
        return _bytes_for(self._config, rows) + _SPILL_BYTES

    def require(self, more: int) -> None:
        """Raise CapacityError where there is no room for so many rows more."""
        if self._budget is not None and not self.fits(more):
            raise CapacityError(
                f"[table {self._config.name!r}] {len(self._index)} rows and {more} new ones take "
                f"{format_size(self._bytes_after(more))}; the budget is Dram({format_size(self._budget)!r}). "
                f"Raise it in Table(tiers=[Dram(...)]), or erase keys that are not needed."
            )

    def require_load(self, rows: int) -> None:
        """Raise CapacityError where so many rows do not fit into an empty table."""
        if self._budget is not None and (needed := _bytes_for(self._config, rows)) > self._budget:
            raise CapacityError(
                f"[table {self._config.name!r}] {rows} rows take {format_size(needed)}; the budget is "
                f"Dram({format_size(self._budget)!r}). Raise it in Table(tiers=[Dram(...)]). Nothing was loaded."
            )
