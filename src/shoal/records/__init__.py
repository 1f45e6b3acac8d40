"""What leaves memory, as bytes: rows as Arrow, frames of a log, dense tensors, state dicts. No file is touched here.

Bytes that are decoded are hostile until they are checked: what is wrong with them is a StorageError, and no more memory
is allocated than their size explains. Modules that need Arrow are not imported here: tables work without it.
"""

from shoal.records.layout import Layout, StateColumn, layout_of
from shoal.records.rows import Rows, join

__all__ = ["Layout", "Rows", "StateColumn", "join", "layout_of"]
