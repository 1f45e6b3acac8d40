"""Groups by name: how a compiled or exported program finds its tables when it runs."""

import weakref

from shoal.errors import NotFoundError
from shoal.table.group import Group

_outliving: list[Group] = []
_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def register(group: Group) -> None:
    """Let ops find the group for as long as it lives. REQUIRES: the name is free (see `is_free`)."""
    _groups[group.name] = group


def outlive(group: Group) -> None:
    """Keep a group whose collection goes, where compiled graphs wait for a backward: these know it by name only. A
    later call lets it go, once they had their backward or were dropped."""
    let_go()
    if group.is_known_by_name and group.is_awaited:
        _outliving.append(group)


def let_go() -> None:
    """Keep no group that no backward waits for."""
    for group in list(_outliving):
        if not group.is_awaited:
            _outliving.remove(group)


def is_free(name: str) -> bool:
    """Whether no live group has the name."""
    let_go()
    return name not in _groups


def group_named(name: str) -> Group:
    """The live group of that name."""
    group = _groups.get(name)
    if group is None:
        held = sorted(_groups) or "none"
        raise NotFoundError(
            f"[lookup] wanted the collection {name!r} in this process; it holds {held}. An exported or compiled "
            f"program has no rows of its own: make the collection, with the same name=, before running it."
        )
    return group
