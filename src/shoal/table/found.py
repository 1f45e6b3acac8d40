"""Which collections of tables a caller means: one, several, or those inside a model."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.table.group import Group
from shoal.table.handle import TableHandle


def collections_in(given: Any) -> list[Any]:
    """The collections that `given` is: itself, those of a list, or those inside a module, each once; may be none.

    Raises TypeError, with the name of its type and what to do, for what is neither a collection nor a module.
    """
    found: dict[int, Any] = {}
    for one in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        if _is_collection(one):
            found[id(one)] = one
        elif isinstance(one, nn.Module):
            found |= {id(part): part for part in one.modules() if _is_collection(part)}
        else:
            of = ", one table: give the collection that has it" if isinstance(one, TableHandle) else ""
            raise TypeError(f"{type(one).__name__}{of}")
    return list(found.values())


def _is_collection(given: Any) -> bool:
    # The handle of a table has a group too, and is no collection.
    groups = getattr(getattr(given, "_group", None), "members", None)
    return isinstance(given, nn.Module) and isinstance(groups, tuple) and all(isinstance(one, Group) for one in groups)
