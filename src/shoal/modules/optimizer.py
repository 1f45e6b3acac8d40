"""The tables' optimizers as torch sees them: settings that schedulers may change, and steps that happen in backward."""

from collections.abc import Callable
from typing import Any

import torch

from shoal.table import Group


class TableOptimizer(torch.optim.Optimizer):
    """One param group for each table that trains, with its name and the settings that may change while training.

    Rows are updated in the backward pass, so `step` and `zero_grad` have nothing to do; they are here so that schedulers
    and training loops find what they expect.
    """

    def __init__(self, group: Group) -> None:
        self._tables = [table for table in group.tables if table.config.optimizer is not None]
        groups = [
            # torch wants a parameter in every group; the rows are not one.
            {"params": [torch.nn.Parameter(torch.empty(0))], "name": table.config.name, **table.optimizer_hyper}
            for table in self._tables
        ]
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        for table, group in zip(self._tables, self.param_groups, strict=True):
            table.optimizer_hyper = group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take settings over, as of `state_dict()`; rows and their state are the module's."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Nothing: rows are updated in the backward pass."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: rows keep no gradient."""


