"""Leases: what a forward keeps for its backward.

A lease is a one-element tensor that the lookup op returns and autograd saves. While its storage lives, the rows of that
batch keep their slots. Autograd frees it after the backward or when the graph is dropped; that end is only noted, and
the group deals with it at its next call, since it can come from any thread and in the middle of anything.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import BackwardError


class Applied(Protocol):
    """What leases need to know of a forward."""

    @property
    def applied(self) -> bool:
        """Whether its backward is done."""


Held = TypeVar("Held", bound=Applied)


# Of all groups: a graph that is older than a group of the same name has no lease there.
_numbers = itertools.count(1)


class Leases(Generic[Held]):
    """The live leases of one group, numbered as they begin."""

    def __init__(self) -> None:
        self._live: dict[int, Held] = {}
        # The core's: what Python does when a tensor goes, an interrupt could keep from being done.
        self._ended = _native.EndedNumbers()
        self._noted: list[int] = []  # of these, those that were taken and not dealt with

    def begin(self, batch: Held, others: Sequence[Tensor] | None = None) -> Tensor:
        """Keep `batch`, and other leases, for as long as the returned tensor's storage lives."""
        number = next(_numbers)
        lease: Tensor = self._ended.hold(number) if others is None else self._ended.hold(number, list(others))
        self._live[number] = batch
        return lease

    @staticmethod
    def none() -> Tensor:
        """What a lookup returns that keeps nothing."""
        return torch.zeros(1, dtype=torch.int64, device="cpu")

    def of(self, lease: Tensor) -> Held:
        """The batch behind a lease that no backward was applied to."""
        batch = self._live.get(int(lease))
        if batch is None:
            raise BackwardError(
                "[backward] wanted a forward whose rows are still held; this one's were released, because the tables "
                "were loaded, rolled back or moved since. Run the forward again."
            )
        if batch.applied:
            raise BackwardError(
                "[backward] wanted one backward for each forward; this one was applied already, and rows are updated "
                "in the backward. Run the forward again, or add the losses up before the backward."
            )
        return batch

    def collect(self, dropped: Callable[[Held], None]) -> None:
        """Forget the leases that ended since the last call, behind a call of `dropped` for each that no backward was
        applied to. Where an interrupt ends it, the next call goes on with the same one."""
        self._ended.take(self._noted)
        self._noted.sort(reverse=True)
        while self._noted:
            number = self._noted[-1]
            batch = self._live.get(number)
            try:
                if batch is not None and not batch.applied:
                    dropped(batch)
            except Exception:
                self._forget(number)
                raise
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._live.pop(number, None)
        self._noted.pop()

    @property
    def has_ended(self) -> bool:
        """Whether `collect` has something to do."""
        return self._ended.any or bool(self._noted)

    def live(self) -> list[Held]:
        """The batches that leases keep."""
        return list(self._live.values())

    def awaits(self, lease: Tensor) -> bool:
        """Whether no backward was applied to the batch of a lease that lives."""
        batch = self._live.get(int(lease))
        return batch is not None and not batch.applied

    def drop(self, lease: Tensor) -> None:
        """Forget a lease as if there had been no forward."""
        self._live.pop(int(lease), None)

    def clear(self) -> None:
        """Forget all leases: their backward can no longer be applied."""
        self._live.clear()

    @property
    def oldest(self) -> int | None:
        """The number of the oldest live lease."""
        return next(iter(self._live), None)

    @property
    def newest(self) -> int | None:
        """The number of the newest live lease."""
        return next(reversed(self._live), None)
