"""Some rows of a table, in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a table, row i of every tensor that of key i; on the CPU.

    Those that were decoded lie in memory that belongs to a file or a message, which may be read-only: clone before
    writing into them.
    """

    keys: Tensor  # int64 [n]
    weights: Tensor  # [n, dim] in the layout's dtype
    state: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [n, width] by column
    scores: Tensor | None = None  # float64 [n]; None in serving records, which have no state either
    facts: Mapping[str, Tensor] = field(default_factory=dict)  # [n, width] by column: those of policies

    def __len__(self) -> int:
        return self.keys.shape[0]

    def some(self, which: Tensor | slice) -> "Rows":
        """Returns the rows at some positions, or where a mask is true."""
        return Rows(
            self.keys[which],
            self.weights[which],
            {name: column[which] for name, column in self.state.items()},
            None if self.scores is None else self.scores[which],
            {name: column[which] for name, column in self.facts.items()},
        )


def join(pieces: Sequence[Rows]) -> Rows:
    """Returns all rows of pieces with the same columns. REQUIRES: there is at least one piece."""
    scores = [rows.scores for rows in pieces if rows.scores is not None]
    return Rows(
        torch.cat([rows.keys for rows in pieces]),
        torch.cat([rows.weights for rows in pieces]),
        {name: torch.cat([rows.state[name] for rows in pieces]) for name in pieces[0].state},
        torch.cat(scores) if scores else None,
        {name: torch.cat([rows.facts[name] for rows in pieces]) for name in pieces[0].facts},
    )
