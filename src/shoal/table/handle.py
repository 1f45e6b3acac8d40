"""The user's view of one table."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import DeviceError, InputError
from shoal.ops.hash_ids import hint_for
from shoal.optim import numbers_of
from shoal.table.group import Group
from shoal.table.protocols import Keyed, Measured, Readable, Tiered, Trained
from shoal.table.stats import TableStats


class _Shown(Trained, Keyed, Readable, Tiered, Measured, Protocol):
    """What a handle shows of its table. Its changes go through the group, which knows of leases and interrupts."""


class TableHandle:
    """One table of a collection: look at rows, write them, erase them. Safe to use from any thread.

    Keys are an int32 or int64 tensor of one dimension, or a sequence of ints; rows are float32.
    """

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number

    @property
    def place(self) -> tuple[Group, int]:
        """The group that the table is in, and its number there. For Shoal's own parts."""
        return self._group, self._number

    @property
    def _table(self) -> _Shown:
        return self._group.tables[self._number]

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.config.name

    def __repr__(self) -> str:
        return f"<table {self.name!r}: {len(self)} rows of dim {self._table.config.dim}>"

    def __len__(self) -> int:
        """The number of rows."""
        with self._group.reading():
            return len(self._table)

    def keys(self) -> Tensor:
        """Every key that has a row, in ascending order."""
        with self._group.reading():
            return self._table.keys()

    def contains(self, keys: Tensor | Sequence[int]) -> Tensor:
        """Whether each key has a row: a bool tensor."""
        wanted = self._keys("contains", keys)
        with self._group.reading():
            return self._table.contains(wanted)

    def lookup(self, keys: Tensor | Sequence[int]) -> Tensor:
        """The row of each key, [n, dim]; one without a row reads as `Table(missing=)` says. Never inserts."""
        wanted = self._keys("lookup", keys)
        with self._group.reading():
            return self._table.lookup(wanted)

    def state(self, keys: Tensor | Sequence[int]) -> dict[str, Tensor]:
        """The optimizer's columns of each key, [n, width] by name; a key without a row reads as one is born.

        They are float32, and int64 where they are numbers of updates, as `count` of `Adam` is.
        """
        wanted = self._keys("state", keys)
        with self._group.reading():
            state = self._table.state(wanted)
            columns = self._table.config.columns
        return {one.name: numbers_of(state[one.name]) if one.counts else state[one.name] for one in columns}

    def scores(self, keys: Tensor | Sequence[int]) -> Tensor:
        """The score of each key, float64; NaN for one without a row."""
        wanted = self._keys("scores", keys)
        with self._group.reading_all():
            return self._table.scores(wanted)

    def assign(self, keys: Tensor | Sequence[int], rows: Tensor) -> None:
        """Set the weights of keys; those without a row get one. Optimizer state stays; of duplicates the last wins."""
        wanted = self._keys("assign", keys)
        weights = self._rows("assign", rows, len(wanted))
        with self._group.writing():
            self._group.assign(self._number, wanted, weights)

    def erase(self, keys: Tensor | Sequence[int]) -> int:
        """Remove the rows of keys; returns how many there were."""
        wanted = self._keys("erase", keys)
        with self._group.writing():
            return self._group.erase(self._number, wanted)

    def unreadable(self) -> Tensor:
        """The keys, in ascending order, whose rows the tier below memory has and cannot read now: `erase` them, and the
        table is whole again. None where there is no such tier.

        It reads all rows there while the table is used, and those that it could not read once more while the table is
        not used. No row, state or score changes. Rows that memory has, too, are not lost: where their copy below is
        damaged, they are written anew when they leave memory. A disk that is only away makes all its rows unreadable:
        try again before you erase them.
        """
        with self._group.reading():
            lowest = self._table.lowest
            keys = torch.empty(0, dtype=torch.int64, device="cpu") if lowest is None else lowest.storage.keys()
        if lowest is not None:
            keys = lowest.unreadable(keys)
        if len(keys):
            with self._group.writing():
                keys = self._table.lost(keys)
        return keys.to(self._group.device)

    def stats(self) -> TableStats:
        """Rows, bytes, step and counters as they are now."""
        with self._group.reading():
            return self._table.stats()

    def _keys(self, where: str, keys: Tensor | Sequence[int]) -> Tensor:
        where = f"table {self.name!r}.{where}"
        if not isinstance(keys, Tensor):
            try:
                # Asked for integers, torch would cut floats down to them; only of nothing it makes floats.
                keys = torch.tensor(keys, dtype=None if len(keys) else torch.int64, device=self._group.device)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise InputError(f"[{where}] keys must be int64s; got {keys!r} ({error}).{hint_for(keys)}") from None
        if keys.dtype not in (torch.int32, torch.int64) or keys.dim() != 1:
            raise InputError(
                f"[{where}] keys must be an int32 or int64 tensor of one dimension; got {keys.dtype} of shape "
                f"{tuple(keys.shape)}.{hint_for(keys)}"
            )
        self._require_here(where, "keys", keys)
        return keys.to(torch.int64).contiguous()

    def _require_here(self, where: str, what: str, tensor: Tensor) -> None:
        device = self._group.device
        if device.type == "meta":
            self._group.writing()  # refuses, and says what to do
        if tensor.device != device:
            raise DeviceError(
                f"[{where}] the table is on {device}; the {what} are on {tensor.device}. Move them to {device}."
            )

    def _rows(self, where: str, rows: Tensor, n: int) -> Tensor:
        where = f"table {self.name!r}.{where}"
        dim = self._table.config.dim
        if not isinstance(rows, Tensor) or rows.shape != (n, dim) or not rows.is_floating_point():
            got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else repr(type(rows))
            raise InputError(f"[{where}] rows must be floats of shape ({n}, {dim}), one for each key; got {got}.")
        self._require_here(where, "rows", rows)
        rows = rows.detach().to(torch.float32).contiguous()
        dtype = self._table.config.dtype
        if not torch.isfinite(rows.to(getattr(torch, dtype))).all():
            raise InputError(f"[{where}] rows must be finite in {dtype}; got NaN or infinity. Nothing was written.")
        return rows
