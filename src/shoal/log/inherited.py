"""What commits say of tables, where each commit says only what changed since the one before."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar


class _Said(Protocol):
    def unchanged(self) -> Self:
        """Returns what the next commit says, if nothing changes."""


T = TypeVar("T", bound=_Said)


class Inherited(Mapping[str, T], Generic[T]):
    """What a commit says of some tables, and what the one before it said of all others.

    Each of many commits takes only the memory of what it says itself: the rest is in layers that commits share. Each
    layer has at least twice as many tables as the one above it, so that there are few layers.
    """

    def __init__(self, said: dict[str, T], before: Mapping[str, T]) -> None:
        self.said = said
        latest = before.said if isinstance(before, Inherited) else before
        layers = [*before._layers] if isinstance(before, Inherited) else []
        if latest:
            layers.append({name: one.unchanged() for name, one in latest.items()})
        while len(layers) > 1 and 2 * len(layers[-1]) > len(layers[-2]):
            above = layers.pop()
            layers[-1] = layers[-1] | above
        self._layers: tuple[dict[str, T], ...] = tuple(layers)  # the oldest first
        self._count = len(before) + sum(name not in before for name in said)

    def __getitem__(self, name: str) -> T:
        for layer in (self.said, *reversed(self._layers)):
            if name in layer:
                return layer[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return self._count

    def items(self) -> Any:
        """Returns names with what is said of them; tables that were said first come first."""
        return self._all().items()

    def values(self) -> Any:
        """Returns what is said of all tables, in the order of `items`."""
        return self._all().values()

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> dict[str, T]:
        found: dict[str, T] = {}
        for layer in (*self._layers, self.said):
            found |= layer
        return found


def said_in(tables: Mapping[str, T]) -> Mapping[str, T]:
    """Returns what a commit says itself."""
    return tables.said if isinstance(tables, Inherited) else tables
