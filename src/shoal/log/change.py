"""A change: rows of one table that were put, or keys that were deleted. A commit is a sequence of them.

As bytes a change is one frame (records/frames.py).
"""

from dataclasses import dataclass

from torch import Tensor

from shoal.records import Layout, Rows
from shoal.records.frames import encode_deletes, encode_puts

# Bytes of the rows that are handed on together: a change of a commit, a block of a snapshot.
BLOCK_BYTES = 16 << 20
KEYS_EACH = 1 << 20  # that are deleted by one change


def rows_in_block(layout: Layout) -> int:
    """Returns how many rows one change, or one block of a snapshot, holds at most."""
    return max(BLOCK_BYTES // layout.format.record_bytes, 1)


@dataclass(frozen=True)
class TableChange:
    """Some changes of one table: rows that were put, or keys that were deleted."""

    table: str
    puts: Rows | None = None
    deletes: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """The keys that were put or deleted."""
        if self.puts is not None:
            return self.puts.keys
        assert self.deletes is not None
        return self.deletes

    def frame(self, layout: Layout, *, table: int, version: int) -> list[memoryview]:
        """Returns the change as a frame of a version, in pieces over the change's own memory. table: its number."""
        if self.puts is not None:
            return encode_puts(self.puts, layout, table=table, version=version)
        assert self.deletes is not None
        return encode_deletes(self.deletes, layout, table=table, version=version)
