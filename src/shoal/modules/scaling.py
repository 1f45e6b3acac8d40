"""Loss scaling: how tables see the gradients of a torch.amp.GradScaler."""

import torch
from torch.amp.grad_scaler import OptState


class ScaledLoss:
    """Tells a group the scale that its gradients carry, and the scaler whether a backward was skipped."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> None:
        self.scaler = scaler
        self._optimizer = optimizer

    def factor(self) -> float:
        """What the gradients were multiplied by."""
        self._report(nonfinite=False)
        return float(self.scaler.get_scale())

    def found_nonfinite(self) -> None:
        """Make the scaler's next `update()` lower the scale, as if one of its own optimizers had seen the overflow."""
        self._report(nonfinite=True)

    def _report(self, nonfinite: bool) -> None:
        # GradScaler has no public way in. Its `update` reads these records, one for each optimizer, and wants at least
        # one; `step(bags.optimizer)` must find its gradients unscaled, and does nothing.
        record = self.scaler._per_optimizer_states[id(self._optimizer or self)]
        record["stage"] = OptState.UNSCALED
        found = record["found_inf_per_device"]
        if nonfinite or not found:
            found[torch.device("cpu")] = torch.tensor(float(nonfinite), dtype=torch.float32, device="cpu")
