"""Loss scaling: how tables see the gradients of a torch.amp.GradScaler."""

import gc
import sys
import weakref
from sys import getrefcount
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from shoal import torch_private


class _Scalers:
    """The GradScalers of this process. Looking for them takes 10 ms and more, so it waits until there may be others."""

    def __init__(self) -> None:
        self._classes: list[type[GradScaler]] = [GradScaler]
        self._known: list[weakref.ref[GradScaler]] = []
        self._references = 0

    def in_use(self) -> list[GradScaler]:
        """Those that have scaled a loss."""
        # An instance refers to its class, and a class to its base: as long as the count stays, there is no new one.
        is_same = self._references == sum(map(getrefcount, self._classes))
        if is_same and not self._known:
            return []
        alive = [one() for one in self._known]
        if not is_same or None in alive:
            alive = self._look()
        return [one for one in alive if one is not None and one.is_enabled() and one._scale is not None]

    def _look(self) -> list[GradScaler | None]:
        classes: list[type[GradScaler]] = [GradScaler]
        for one in classes:
            classes += one.__subclasses__()
        del one
        found: list[GradScaler | None] = [one for one in gc.get_referrers(*classes) if type(one) in classes]
        self._classes, self._known = classes, [weakref.ref(one) for one in found if one is not None]
        self._references = sum(map(getrefcount, classes))
        return found


scalers_in_use = _Scalers().in_use
# Whose argument the roots of a backward are; other releases of torch may have another, and then they are not known.
_engine = torch_private.backward_code()
# What losses are made of after they were scaled.
_SHAPED = ("Stack", "Cat", "Unsqueeze", "Squeeze", "View", "UnsafeView", "Reshape", "Select", "Expand", "Clone")
_NAMES = ("Add", "Sum", "Mean", "Div", "Neg", "ToCopy", *_SHAPED)
_PASSED = tuple(f"{name}Backward" for name in _NAMES)
# A scale of 2^16 makes .66 of it: losses that were only weighted by a constant are mostly below that.
_LEAST_LOSS = 1e-5


def is_scaled_backward(scale: float) -> bool:
    """Whether the loss of the backward that runs looks as if a GradScaler has scaled it: it was multiplied by something
    that has no gradient, and is not small compared with the scale. Call it in a backward."""
    return any(_is_product(root.grad_fn) and _size(root) >= _LEAST_LOSS * scale for root in _roots())


def _size(root: Tensor) -> float:
    return float(root.detach().abs().max()) if root.numel() else 0.0


def _roots() -> list[Tensor]:
    """What `backward` was called on: by this thread, where one may run within another, as checkpointing does. On a
    device, backwards run in a thread of autograd's, and their caller waits."""
    for frame in (sys._getframe(1), *sys._current_frames().values()):
        found: list[Tensor] = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _engine:
                found += at.f_locals.get("t_outputs", ())
            at = at.f_back
        if found:
            return found
    return []


def _is_product(node: Any, depth: int = 4) -> bool:
    if node is None or depth == 0:
        return False
    parents = [parent for parent, _ in node.next_functions]
    if node.name().startswith("MulBackward"):
        return None in parents
    return node.name().startswith(_PASSED) and any(_is_product(parent, depth - 1) for parent in parents)


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
        """Returns one divided by the factor, on the device and without waiting for it."""
        scale = torch_private.loss_scale(self.scaler)
        if scale is None:  # before the first loss was scaled
            return torch.full((1,), 1.0 / float(self.scaler.get_scale()), dtype=torch.float32, device=device)
        return (1.0 / scale.to(device)).to(torch.float32).reshape(1)

    def found(self, nonfinite: Tensor) -> None:
        """Tell the scaler's next `update()`, on the device."""
        found = self._found()
        before = found.get(nonfinite.device)
        now = nonfinite.to(torch.float32).reshape(())
        found[nonfinite.device] = now if before is None else torch.maximum(before, now)

    def found_nonfinite(self) -> None:
        """Make the scaler's next `update()` lower the scale, as if one of its own optimizers had seen the overflow."""
        self._report(nonfinite=True)

    def _found(self) -> dict[torch.device, Tensor]:
        return torch_private.tell_scaler(self.scaler, id(self._optimizer or self))

    def _report(self, nonfinite: bool) -> None:
        # GradScaler has no public way in. Its `update` reads these records, one for each optimizer, and wants at least
        # one; `step(bags.optimizer)` must find its gradients unscaled, and does nothing.
        found = self._found()
        if nonfinite or not found:
            found[torch.device("cpu")] = torch.tensor(float(nonfinite), dtype=torch.float32, device="cpu")
