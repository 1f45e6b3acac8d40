"""Whole rows as bytes, as they are below memory, on any tier and device."""

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Column, RowFormat
from shoal.config.dtypes import torch_dtype
from shoal.config.rows import SCORE

# Rows on their way that take more are mapped, and go back to the system as soon as they are released. The heap would
# keep the memory that each thread freed: with eight batches of 20,000 keys ahead, 140 MiB outside of any budget.
_MAPPED_BYTES = 1 << 18


def empty_packed(n: int, row_bytes: int) -> Tensor:
    """Memory for packed rows, uint8 [n, row_bytes], that holds anything."""
    if n * row_bytes < _MAPPED_BYTES:
        return torch.empty(n, row_bytes, dtype=torch.uint8, device="cpu")
    rows: Tensor = _native.mapped_rows(n, row_bytes)
    return rows


class PackedRows:
    """Reads and writes the parts of packed rows of one format, uint8 [n, format.packed_bytes]."""

    def __init__(self, format: RowFormat) -> None:
        self.format = format
        self.bytes = format.packed_bytes
        self._weights = torch_dtype(format.dtype)

    def weights(self, packed: Tensor) -> Tensor:
        """Weights as float32 [n, dim]."""
        return self._cut(packed, 0, self.format.weight_bytes).view(self._weights).to(torch.float32)

    def column(self, column: Column, packed: Tensor) -> Tensor:
        """A column in its type, [n, width]."""
        return self._cut(packed, self.format.packed_at[column], column.bytes).view(torch_dtype(column.dtype))

    def scores(self, packed: Tensor) -> Tensor:
        """Scores, float64 [n]."""
        return self.column(SCORE, packed)[:, 0]

    def set_scores(self, packed: Tensor, score: float) -> None:
        """Give all of them one score."""
        begin = self.format.packed_at[SCORE]
        bytes_ = torch.tensor([score], dtype=torch.float64, device="cpu").view(torch.uint8)
        packed[:, begin : begin + SCORE.bytes] = bytes_

    @staticmethod
    def _cut(packed: Tensor, first: int, size: int) -> Tensor:
        """Some bytes of every row, in memory of their own: aligned for any type."""
        return packed[:, first : first + size].clone(memory_format=torch.contiguous_format)
