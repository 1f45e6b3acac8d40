"""Groups by name: how a compiled or exported program finds its tables when it runs."""

import weakref

from shoal.errors import NotFoundError
from shoal.table.group import Group

_waiting: dict[int, Group] = {}  # by id
_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def register(group: Group) -> None:
    """Let ops find the group for as long as it lives. REQUIRES: the name is free (see `is_free`)."""
    _groups[group.name] = group


def keep_waiting(group: Group) -> None:
    """Keep a group that a compiled graph waits for: that knows it by its name alone, also when its collection goes."""
    _waiting[id(group)] = group


def let_go() -> None:
    """Keep no group any more whose compiled graphs had their backward, or were dropped."""
    for key, group in list(_waiting.items()):  # a copy, made at once: other threads come here too
        if not (group.process.is_here and group.is_awaited):
            _waiting.pop(key, None)


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
