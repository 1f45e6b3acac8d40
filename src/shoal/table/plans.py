"""The plans of a group, by the order in which batches bring their features."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Plan = TypeVar("Plan")

# Orders of features that a group remembers. A batch that brings yet another one makes the oldest be forgotten.
_MOST_PLANS = 64


class Plans(Generic[Plan]):
    """Remembers plans. Several threads may use it at a time."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._newest: tuple[list[str], Plan] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def of(self, names: Sequence[str], make: Callable[[tuple[str, ...]], Plan]) -> Plan:
        """Returns the plan for these features; `make` makes the first one."""
        newest = self._newest
        if newest is not None and newest[0] == names:  # quicker than a hash of many names
            return newest[1]
        wanted = tuple(names)
        plan = self._plans.get(wanted)
        self._newest = None if plan is None else (list(wanted), plan)
        if plan is None:
            plan = self._plans[wanted] = make(wanted)
            for oldest in list(self._plans)[:-_MOST_PLANS]:  # a copy: others make some meanwhile
                self._plans.pop(oldest, None)
        return plan

    def known(self, names: Sequence[str]) -> Plan | None:
        """Returns the plan for these features if there is one."""
        return self._plans.get(tuple(names))

    def forget(self) -> None:
        """Forget all: they know where rows were."""
        self._plans.clear()
        self._newest = None
