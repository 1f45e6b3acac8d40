"""What a group needs of its tables, and of those above it."""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.config import Table
from shoal.records import Rows
from shoal.table.changes import Changes
from shoal.table.content import TableContent, TableStats
from shoal.table.lower.tier import Below


class LossScale(Protocol):
    """What a group needs of a gradient scaler."""

    def factor(self) -> float:
        """What the gradients were multiplied by."""

    def inverse(self, device: torch.device) -> Tensor:
        """One divided by it, as one float32 on a device, without waiting for the device."""

    def found(self, nonfinite: Tensor) -> None:
        """Hear on the device whether a backward was skipped: one number, 0 if not."""

    def found_nonfinite(self) -> None:
        """Hear that a backward was skipped."""


class GroupTable(Protocol):
    """One table, wherever its rows are. Its group's lock covers every method."""

    config: Table
    optimizer_hyper: MutableMapping[str, Any]
    changes: Changes
    step: int

    @property
    def has_limbo(self) -> bool:
        """Whether slots of erased rows wait for leases to end."""

    def leases_ended(self, oldest_lease: int | None) -> None:
        """Free the slots of erased rows that no live lease can hold."""

    def clear(self) -> None:
        """Forget every row."""

    def __len__(self) -> int: ...

    def keys(self) -> Tensor:
        """Every key, in ascending order."""

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; one without a row reads as what is missing does."""

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; one without a row reads as one is born."""

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""

    @property
    def lowest(self) -> Below | None:
        """What the table has below its memory, if anything."""

    def lost(self, keys: Tensor) -> Tensor:
        """Of distinct keys of the host, whose rows below could not be read, those that have no other row and still
        cannot be; in ascending order. Rows of the others are written anew when they leave memory."""

    def compact(self, work: int) -> None:
        """Between leases, give memory of erased rows back."""

    def content(self) -> TableContent:
        """All that the table holds now."""

    def filling(self) -> AbstractContextManager[None]:
        """Rows that are put meanwhile are no births and no changes. REQUIRES: whoever reads changes lost its place."""

    def follow_readers(self) -> None:
        """List changes, if anybody reads them."""

    def seal(self) -> None:
        """Tell the readers of changes what changed up to now."""

    def rows(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Whole rows, on the host, of distinct keys of the host that have one; and which these are."""

    def by_bucket(self, rows_each: int) -> Iterator[Rows]:
        """All rows, in the order of their keys' buckets, in pieces on the host."""

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""

    def require_more(self, rows: int) -> None:
        """Raise CapacityError where the table cannot have so many rows more."""

    def expect(self, rows: int) -> None:
        """Make room for so many rows that will come, where that saves work."""

    def put(self, rows: Rows) -> None:
        """Have whole rows of distinct keys, in place of those that they had."""

    def fill(self, content: TableContent) -> None:
        """Have that content. REQUIRES: the table is empty."""

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now."""


class Habits(Protocol):
    """What is told of lookups and backwards, as they begin: `shoal.modules.habits` warns."""

    def before_lookup(self, training: bool, with_gradients: bool) -> None: ...

    def births_before(self, training: bool, with_gradients: bool) -> int | None: ...

    def after_lookup(self, before: int | None) -> None: ...

    def on_weights(self) -> None: ...

    def before_backward(self) -> None: ...
