"""Groups by name: how a compiled or exported program finds its tables when it runs."""

import weakref
from collections.abc import Sequence

from shoal.errors import NotFoundError
from shoal.table.group import Group
from shoal.table.protocols import Target

_waiting: dict[int, Target] = {}  # by id
_targets: weakref.WeakValueDictionary[str, Target] = weakref.WeakValueDictionary()
# Groups of a collection that has several: a table's handle keeps its group alive when the others are gone.
_members: weakref.WeakValueDictionary[tuple[str, int], Group] = weakref.WeakValueDictionary()


def register(target: Target) -> None:
    """Let operators find it for as long as it lives. REQUIRES: the name is free (see `is_free`)."""
    _targets[target.name] = target


def register_members(name: str, groups: Sequence[Group]) -> None:
    """Keep a collection's name taken for as long as one of its groups lives."""
    for number, group in enumerate(groups):
        _members[name, number] = group


def keep_waiting(target: Target) -> None:
    """Keep tables alive for the backward of a compiled graph, which knows them by their name alone."""
    _waiting[id(target)] = target


def let_go() -> None:
    """Let go of tables whose compiled graphs all had their backward, or were dropped."""
    for key, target in list(_waiting.items()):  # a list, made in one step: other threads come here too
        if not (target.process.is_here and target.is_awaited):
            _waiting.pop(key, None)


def is_free(name: str) -> bool:
    """Whether no live collection has the name."""
    let_go()
    return name not in _targets and all(taken != name for taken, _ in list(_members))


def group_named(name: str) -> Target:
    """Returns the group, or the groups of a collection, of that name."""
    target = _targets.get(name)
    if target is None:
        held = sorted(_targets) or "none"
        raise NotFoundError(
            f"[lookup] wanted the collection {name!r} in this process; it holds {held}. An exported or compiled "
            f"program has no rows of its own: make the collection, with the same name=, before running it."
        )
    return target
