"""What leaves memory, as bytes: rows as Arrow, frames of a log, dense tensors, state dicts. No file is touched here.

Whatever is decoded is hostile until checked: what is wrong with it is a StorageError, and no more memory is asked for
than the size of what came explains. What needs Arrow is imported by who needs it: tables do not.
"""

from shoal.records.layout import Layout, StateColumn, layout_of
from shoal.records.rows import Rows, join

__all__ = ["Layout", "Rows", "StateColumn", "join", "layout_of"]
