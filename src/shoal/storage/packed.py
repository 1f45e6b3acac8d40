"""Whole rows as they are below memory, on any tier and device: weights, state columns, score."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Column

_SCORE_BYTES = 8
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
    """What the bytes of a packed row are."""

    def __init__(self, dim: int, dtype: str, columns: Sequence[Column]) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.weight_bytes = dim * self._dtype.itemsize
        self._begins: dict[str, int] = {}
        at = self.weight_bytes
        for column in columns:
            self._begins[column.name] = at
            at += 4 * column.width
        self.state_bytes = at - self.weight_bytes
        self.bytes = at + _SCORE_BYTES

    def weights(self, packed: Tensor) -> Tensor:
        """Weights as float32 [n, dim]."""
        return self._cut(packed, 0, self.weight_bytes).view(self._dtype).to(torch.float32)

    def state(self, column: Column, packed: Tensor) -> Tensor:
        """A state column, float32 [n, width]."""
        return self._cut(packed, self._begins[column.name], 4 * column.width).view(torch.float32)

    def scores(self, packed: Tensor) -> Tensor:
        """Scores, float64 [n]."""
        return self._cut(packed, self.bytes - _SCORE_BYTES, _SCORE_BYTES).view(torch.float64)[:, 0]

    def set_scores(self, packed: Tensor, score: float) -> None:
        """Give all of them one score."""
        packed[:, self.bytes - _SCORE_BYTES :] = torch.tensor([score], dtype=torch.float64, device="cpu").view(
            torch.uint8
        )

    @staticmethod
    def _cut(packed: Tensor, first: int, size: int) -> Tensor:
        """Some bytes of every row, in memory of their own: aligned for any type."""
        return packed[:, first : first + size].clone(memory_format=torch.contiguous_format)
