"""Which of the keys that have no row get one.

A lookup in training finds keys without a row in any tier. Without a policy each of them gets its first row, and no mask
is made. A policy answers with a mask. A key that it does not admit reads as `Table(missing=)` says, and its gradient is
dropped and counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import InputError


@dataclass(frozen=True)
class Candidates:
    """Keys of one table, all different, to which a batch would give a row. On the host."""

    table: str
    step: int  # of the table
    keys: Tensor
    brought: Callable[[], Sequence[Tensor]]  # the values of the features that may give a key its row

    def times(self) -> Tensor:
        """Returns how often each key is in the batch, in features that may give it its row."""
        order = torch.argsort(self.keys)
        ordered = self.keys[order]
        times = torch.zeros(len(ordered), dtype=torch.int64, device="cpu")
        for values in self.brought():
            at = torch.searchsorted(ordered, values.to(torch.int64)).clamp_(max=max(len(ordered) - 1, 0))
            times += torch.bincount(at[ordered[at] == values], minlength=len(ordered))
        result = torch.empty_like(times)
        result[order] = times
        return result


class Admission(Protocol):
    """A policy that says which keys get a row."""

    def admits(self, candidates: Candidates) -> Tensor:
        """Returns for each key whether it gets a row. Called while the tables are held exclusively, and possibly twice
        for one batch: it may not count anything."""


def admitted(admission: Admission, candidates: Candidates) -> Tensor:
    """Returns what a policy answers, a bool for each key."""
    keys = candidates.keys
    if not len(keys):
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    mask = admission.admits(candidates)
    if mask.dtype != torch.bool or mask.shape != keys.shape or mask.device != keys.device:
        raise InputError(
            f"[table {candidates.table!r}] an admission policy returns one bool on {keys.device} for each of the "
            f"{len(keys)} keys; {type(admission).__name__} returned {tuple(mask.shape)} of {mask.dtype} on "
            f"{mask.device}."
        )
    return mask
