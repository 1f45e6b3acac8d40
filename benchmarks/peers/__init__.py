"""The others. Each file wraps one foreign system in the same verbs: `load`, `lookup`, `forward`, `step`, `rows`."""

from typing import Protocol

from torch import Tensor

from benchmarks.work import Batch


class Bags(Protocol):
    """Eight tables with sum pooling and their optimizer, ours or a peer's."""

    name: str

    def load(self, table: int, rows: Tensor) -> None:
        """Set the rows of ids 0 to n - 1."""

    def lookup(self, batch: Batch) -> object:
        """Pooled rows without gradient, in whatever pieces they come: what is timed."""

    def forward(self, batch: Batch) -> Tensor:
        """The same as one tensor, to be checked. [batch, tables x dim]"""

    def step(self, batch: Batch, gradient: Tensor) -> None:
        """Forward, backward, update."""

    def rows(self, table: int, ids: Tensor) -> Tensor: ...
