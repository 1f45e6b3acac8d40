"""How a feature uses a table, in one word of 32 bits: plans say it of each feature, lists of each item.

The word is four times the table's number, plus 1 where the feature trains, so that its keys are inserted, plus 2 where
only others insert them and the feature must see their rows.
"""

from typing import Any

import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter looks for it here)

NO_TABLE = -1  # the word of a feature that a slot list does not have


def use_of(table: int, trains: bool, sees: bool = False) -> int:
    """The word."""
    return 4 * table + trains + 2 * sees


def table_in(use: "Any") -> "Any":
    """The table's number: of a tensor of words, or in a kernel."""
    return use >> 2


def trains_in(use: "Any") -> "Any":
    """Whether the feature trains."""
    return (use & 1) == 1


def may_be_inserted(use: "Any") -> "Any":
    """Whether this feature or another one inserts the keys."""
    return (use & 3) != 0


# As kernels call them. Their annotations are strings: Triton would look a name up among its globals.
table_of = triton.jit(table_in)
trains = triton.jit(trains_in)
is_inserted = triton.jit(may_be_inserted)
