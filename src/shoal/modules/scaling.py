"""Loss scaling: how tables see the gradients of a torch.amp.GradScaler."""

import gc
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState


class _Scalers:
    """The GradScalers of this process. Looking for them takes 10 ms and more, so it waits until there may be others."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._seen = (0, 0)

    def in_use(self) -> GradScaler | None:
        classes = [GradScaler]
        for one in classes:
            classes += one.__subclasses__()
        # An instance refers to its class: as long as the count stays, there is no new one.
        references = sum(map(sys.getrefcount, classes))
        if self._seen != (references, len(self._known)):
            found = [one for one in gc.get_referrers(*classes) if type(one) in classes]
            self._known = weakref.WeakSet(found)
            self._seen = (references, len(found))
            del found
        return next((one for one in list(self._known) if one.is_enabled() and one._scale is not None), None)


_scalers = _Scalers()


def scaler_in_use() -> GradScaler | None:
    """A GradScaler of this process that has scaled a loss, if there is one."""
    return _scalers.in_use()


class ScaledLoss:
    """Tells a group the scale that its gradients carry, and the scaler whether a backward was skipped."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> None:
        self.scaler = scaler
        self._optimizer = optimizer

    def factor(self) -> float:
        """What the gradients were multiplied by."""
        self._report(nonfinite=False)
        return float(self.scaler.get_scale())

    def inverse(self, device: torch.device) -> Tensor:
        """One divided by the factor, on a device that nobody waits for."""
        scale = self.scaler._scale
        if scale is None:  # before the first loss was scaled
            return torch.full((1,), 1.0 / float(self.scaler.get_scale()), dtype=torch.float32, device=device)
        return (1.0 / scale.to(device)).to(torch.float32).reshape(1)

    def found(self, nonfinite: Tensor) -> None:
        """Tell the scaler's next `update()`, on the device."""
        record = self._record()
        found = record["found_inf_per_device"]
        before = found.get(nonfinite.device)
        now = nonfinite.to(torch.float32).reshape(())
        found[nonfinite.device] = now if before is None else torch.maximum(before, now)

    def found_nonfinite(self) -> None:
        """Make the scaler's next `update()` lower the scale, as if one of its own optimizers had seen the overflow."""
        self._report(nonfinite=True)

    def _record(self) -> dict[str, Any]:
        record = self.scaler._per_optimizer_states[id(self._optimizer or self)]
        record["stage"] = OptState.UNSCALED
        return record

    def _report(self, nonfinite: bool) -> None:
        # GradScaler has no public way in. Its `update` reads these records, one for each optimizer, and wants at least
        # one; `step(bags.optimizer)` must find its gradients unscaled, and does nothing.
        found = self._record()["found_inf_per_device"]
        if nonfinite or not found:
            found[torch.device("cpu")] = torch.tensor(float(nonfinite), dtype=torch.float32, device="cpu")
