"""What each user of a table needs of it, and what a group needs of the layers above."""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.config import Table
from shoal.records import Rows
from shoal.table.changes import Changes
from shoal.table.content import TableContent
from shoal.table.forked import OwnProcess
from shoal.table.lower.tier import Below
from shoal.table.request import Request, Update
from shoal.table.stats import TableStats


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


class Target(Protocol):
    """What operators call: a group, or the groups of a collection together."""

    name: str
    habits: "Habits | None"

    @property
    def process(self) -> OwnProcess:
        """The process that made it."""

    @property
    def is_awaited(self) -> bool:
        """Whether a backward may follow a forward."""

    def lookup(self, request: Request) -> tuple[Tensor, Tensor]:
        """Returns the output of a lookup and its lease."""

    def update(self, change: Update) -> Tensor:
        """Apply a forward's output gradients; returns the gradient of the per-sample weights, or nothing."""


# A table, wherever its rows are, has all of the protocols below. Its group's lock covers every method. Who uses a table
# asks for those that it needs: GroupTable is all of them.


class Trained(Protocol):
    """A table's settings and its optimizer's, what its policies remember, and how many backwards were applied to it."""

    config: Table
    optimizer_hyper: MutableMapping[str, Any]
    policy_state: dict[str, Any]
    step: int


class Keyed(Protocol):
    """Which keys have a row."""

    def __len__(self) -> int: ...

    def keys(self) -> Tensor:
        """Every key, in ascending order."""

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key has a row."""


class Readable(Protocol):
    """What rows hold, by key."""

    def lookup(self, keys: Tensor) -> Tensor:
        """The weights of each key; a key without a row reads as `Table(missing=)` says."""

    def state(self, keys: Tensor) -> dict[str, Tensor]:
        """The optimizer's columns of each key; a key without a row reads as one is born."""

    def scores(self, keys: Tensor) -> Tensor:
        """The score of each key; NaN for one without a row."""


class Editable(Protocol):
    """Rows that a user sets and removes."""

    def assign(self, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys, of duplicates the last; those without a row are born."""

    def erase(self, keys: Tensor, newest_lease: int | None) -> int:
        """Remove rows; returns how many there were. Slots that a lease may hold are freed when it ends."""


class Exportable(Protocol):
    """Whole rows that leave the process."""

    def content(self) -> TableContent:
        """All that the table holds now."""

    def rows(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Whole rows, on the host, of distinct keys of the host that have one; and a mask of these keys."""

    def by_bucket(self, rows_each: int) -> Iterator[Rows]:
        """All rows, in the order of their keys' buckets, in pieces on the host."""


class Fillable(Protocol):
    """Whole rows that come from outside the process. They are loaded, not born: no counter of births counts them."""

    def clear(self) -> None:
        """Forget every row."""

    def fill(self, content: TableContent) -> None:
        """Set rows and step to that content. REQUIRES: the table is empty."""

    def put(self, rows: Rows) -> None:
        """Write whole rows of distinct keys, in place of those that they had."""

    def expect(self, rows: int) -> None:
        """Make room for so many rows that will come, where that saves work."""

    def filling(self) -> AbstractContextManager[None]:
        """Rows that are put meanwhile are not listed as changes. REQUIRES: every cursor has lost its place."""


class Bounded(Protocol):
    """How many rows there can be."""

    def require_room(self, rows: int) -> None:
        """Raise CapacityError where so many rows are more than the table can have."""

    def require_more(self, rows: int) -> None:
        """Raise CapacityError where the table cannot have so many rows more."""


class Tracked(Protocol):
    """Which rows changed, for cursors."""

    changes: Changes

    def follow_cursors(self) -> None:
        """List changes from now on if a cursor is open, and stop that if none is."""

    def seal(self) -> None:
        """Tell the cursors what changed up to now."""


class Leased(Protocol):
    """Slots that leases hold."""

    @property
    def has_limbo(self) -> bool:
        """Whether slots of erased rows wait for leases to end."""

    def leases_ended(self, oldest_lease: int | None) -> None:
        """Free the slots of erased rows that no live lease can hold."""

    def compact(self, work: int) -> None:
        """Give memory of erased rows back. Call while no lease is live."""


class Tiered(Protocol):
    """What a table has below its memory."""

    @property
    def lowest(self) -> Below | None:
        """The table's lower tier; None where all of its rows are in memory."""

    def lost(self, keys: Tensor) -> Tensor:
        """Of distinct keys of the host, whose rows below could not be read, those that have no other row and still
        cannot be read; in ascending order. Rows of the others are written anew when they leave memory."""


class Measured(Protocol):
    """What a table counts."""

    def stats(self) -> TableStats:
        """Rows, bytes and counts as they are now."""


class GroupTable(
    Trained, Keyed, Readable, Editable, Exportable, Fillable, Bounded, Tracked, Leased, Tiered, Measured, Protocol
):
    """One table of a group."""


class Habits(Protocol):
    """What is told of lookups and backwards, as they begin: `shoal.modules.habits` warns."""

    def before_lookup(self, training: bool, with_gradients: bool) -> None: ...

    def births_before(self, training: bool, with_gradients: bool) -> int | None: ...

    def after_lookup(self, before: int | None) -> None: ...

    def on_weights(self) -> None: ...

    def before_backward(self) -> None: ...
