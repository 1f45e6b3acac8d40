"""One table's optimizer settings, where the core reads them."""

from collections.abc import Mapping
from typing import Any

from shoal import _native, optim
from shoal.config import Optimizer


class Settings:
    """The step of a table's next update in the core; the core hears it again where it is another."""

    def __init__(self, optimizer: Optimizer | None, update: _native.UpdateTable) -> None:
        self._optimizer = optimizer
        self._update = update
        self._told: tuple[Any, ...] | None = None

    def refresh(self, hyper: Mapping[str, Any], number: int) -> None:
        """Bring the settings as they are now to the core, for the table's backward `number` (from 1)."""
        now = tuple(hyper.values())
        if now == self._told:
            return
        assert self._optimizer is not None
        step = optim.step(self._optimizer, hyper, number)
        step.tell(self._update)
        self._told = None if step.is_of_one_backward else now
