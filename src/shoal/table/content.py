"""What a table holds, as tensors: what state_dict and deepcopy move."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.config import Table


@dataclass(frozen=True)
class TableContent:
    """All that a table remembers: rows, in ascending order of keys where a table made it."""

    keys: Tensor  # int64 [n]
    weights: Tensor  # [n, dim] in the table's dtype
    state: Mapping[str, Tensor]  # float32 [n, width] by column; one that is not there is as at birth
    scores: Tensor  # float64 [n]
    step: int
    facts: Mapping[str, Tensor] = field(default_factory=dict)  # [n, width] by column: those other than the score
    policy_state: Mapping[str, Any] = field(default_factory=dict)


def content_bytes(config: Table, rows: int) -> int:
    """Bytes of the content of a table with that many rows."""
    return rows * config.format.record_bytes
