"""Loss scaling: how tables see the gradients of a torch.amp.GradScaler."""

from typing import Any

import torch


class ScaledLoss:
    """Tells a group the scale that its gradients carry, and the scaler of a backward that was skipped."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self.scaler = scaler
        self._optimizer = optimizer

    def factor(self) -> float:
        """What the gradients were multiplied by."""
        return float(self.scaler.get_scale())

    def found_nonfinite(self) -> None:
        """Make the scaler's next `update()` lower the scale, as if one of its own optimizers had seen the overflow."""
        # GradScaler has no public way in; its `update` reads these records, one for each optimizer.
        records: dict[int, dict[str, Any]] = self.scaler._per_optimizer_states
        records[id(self._optimizer)]["found_inf_per_device"][torch.device("cpu")] = torch.ones(1)
