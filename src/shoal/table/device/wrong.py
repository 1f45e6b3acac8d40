"""What the kernels found wrong: they count it, and the host raises it in a later call."""

from collections.abc import Sequence

import numpy as np

from shoal.errors import CapacityError, InputError, NonFiniteError
from shoal.optim import raises_nonfinite
from shoal.table.device.room import last_tier
from shoal.table.device.rows import DeviceRows
from shoal.table.device.table import DeviceTable


class Wrong:
    """The counts of what went wrong, of which those that were raised are known. The group's lock covers it."""

    def __init__(self, name: str, rows: DeviceRows, tables: Sequence[DeviceTable]) -> None:
        self._name = name
        self._rows = rows
        self._tables = tables
        # By table the keys without room, then the gradients that were left out; bags; weights. See Ledger.wrong.
        self._raised = np.zeros(3 * len(tables) + 2, dtype=np.int32)

    def raise_known(self, is_scaled: bool) -> None:
        """Raise the first new thing that the host knows of; waits for nothing. `is_scaled`: a scaler has the loss."""
        if self._rows.ledger.says_worse(self._raised):
            self._raise(self._rows.hear(), is_scaled)

    def raise_all(self, is_scaled: bool) -> None:
        """Wait for the device, and raise the first new thing."""
        self._raise(self._rows.hear_all(), is_scaled)

    def _raise(self, counted: np.ndarray | None, is_scaled: bool) -> None:
        if counted is None:
            return
        wrong = self._rows.ledger.wrong(counted)
        if np.array_equal(wrong, self._raised):
            return
        # One kind of error at a time: the others are for the next call that looks.
        new = wrong.astype(np.int64) - self._raised
        tables = len(self._tables)
        self._raise_of_batches(wrong, *new[-2:].tolist())
        self._raised[:tables] = wrong[:tables]
        self._raise_refusals(new[:tables])
        self._raised[tables:-2] = wrong[tables:-2]
        if not is_scaled:
            self._raise_overflows(new[tables + 1 : -2 : 2])

    def _raise_of_batches(self, wrong: np.ndarray, bags: int, weights: int) -> None:
        if bags:
            self._raised[-2] = wrong[-2]
            raise InputError(
                f"[{self._name}] offsets must begin at 0, must not decrease and must end at the number of values; "
                f"{bags} bags of an earlier batch did not keep to it. Those without a place among the values were "
                f"read as empty."
            )
        if weights:
            self._raised[-1] = wrong[-1]
            raise InputError(
                f"[{self._name}] per-sample weights must be finite; {weights} of an earlier batch were not (one whose "
                f"feature feeds several tables counts for each). They were read as 0. Mend the weights, or leave the "
                f"sample out; shoal.debug() refuses the batch itself."
            )

    def _raise_refusals(self, refusals: np.ndarray) -> None:
        full = np.nonzero(refusals)[0].tolist()
        for number in full:
            self._rows.tidy(number, int(refusals[number]))
        if full:
            refused = [f"{refusals[number]} of {self._tables[number].config.name!r}" for number in full]
            tiers = sorted({f"{last_tier(self._tables[number].config)}(...)" for number in full})
            raise CapacityError(
                f"[{self._name}] keys of an earlier batch found no room: {', '.join(refused)} (one that comes several "
                f"times may count as often). They have no row and learned nothing. Raise {' or '.join(tiers)} in "
                f"Table(tiers=), or erase keys that are not needed."
            )

    def _raise_overflows(self, skipped: np.ndarray) -> None:
        overflowed = [
            f"{count} of {table.config.name!r}"
            for table, count in zip(self._tables, skipped.tolist(), strict=True)
            if count and raises_nonfinite(table.config.optimizer)
        ]
        if overflowed:
            raise NonFiniteError(
                f"[{self._name}] gradients of an earlier backward must be finite, and their sum not too large (its "
                f"norm above 1e15); some were not: {', '.join(overflowed)} rows were left as they were. Find their "
                f"source, or set Clip(nonfinite='skip'); where a GradScaler scales the loss, set bags.scaler = scaler."
            )
