"""Leases: what a forward keeps for its backward.

A lease is a one-element tensor that the lookup op returns and autograd saves. While its storage lives, the rows of that
batch keep their slots. Autograd frees it after the backward or when the graph is dropped. That can happen in any thread
and in the middle of anything, so the end is only noted, and the group deals with it at its next call.
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


# Numbers are of all groups: a graph that is older than a group of the same name finds no lease there.
_numbers = itertools.count(1)


class Leases(Generic[Held]):
    """The live leases of one group, numbered as they begin."""

    def __init__(self) -> None:
        self._live: dict[int, Held] = {}
        # The core keeps them: an interrupt could prevent what Python does when a tensor is freed.
        self._ended = _native.EndedNumbers()
        self._noted: list[int] = []  # ended leases that were taken from the core and are not dealt with

    def begin(self, forward: Held, others: Sequence[Tensor] | None = None) -> Tensor:
        """Keep a forward, and other leases, for as long as the returned tensor's storage lives."""
        number = next(_numbers)
        lease: Tensor = self._ended.hold(number) if others is None else self._ended.hold(number, list(others))
        self._live[number] = forward
        return lease

    @staticmethod
    def none() -> Tensor:
        """Returns the lease of a lookup that keeps nothing."""
        return torch.zeros(1, dtype=torch.int64, device="cpu")

    def of(self, lease: Tensor) -> Held:
        """Returns the forward of a lease. Raises BackwardError where its backward was applied, or its rows are gone."""
        forward = self._live.get(int(lease))
        if forward is None:
            raise BackwardError(
                "[backward] wanted a forward whose rows are still held; this one's were released, because the tables "
                "were loaded, rolled back or moved since. Run the forward again."
            )
        if forward.applied:
            raise BackwardError(
                "[backward] wanted one backward for each forward; this one was applied already, and rows are updated "
                "in the backward. Run the forward again, or add the losses up before the backward."
            )
        return forward

    def collect(self, dropped: Callable[[Held], None]) -> None:
        """Forget the leases that ended since the last call. `dropped` is called first for each forward that no backward
        was applied to. After an interrupt the next call goes on with the same one."""
        self._ended.take(self._noted)
        self._noted.sort(reverse=True)
        while self._noted:
            number = self._noted[-1]
            forward = self._live.get(number)
            try:
                if forward is not None and not forward.applied:
                    dropped(forward)
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
        """Returns the forwards that leases keep."""
        return list(self._live.values())

    def awaits(self, lease: Tensor) -> bool:
        """Whether a lease lives and no backward was applied to its forward."""
        forward = self._live.get(int(lease))
        return forward is not None and not forward.applied

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
