"""Gradient descent, plain or with momentum."""

from torch import Tensor

from shoal import _native
from shoal.config import SGD
from shoal.ops.update import Step
from shoal.optim.registry import Hyper, State, register


def make(config: SGD, hyper: Hyper, number: int) -> Step:
    kind = _native.Optimizer.momentum if config.momentum > 0 else _native.Optimizer.sgd
    return Step(
        kind,
        hyper["lr"],
        (hyper.get("momentum", 0.0), float(config.nesterov)),
        hyper["weight_decay"],
        hyper["decoupled_weight_decay"],
    )


def reference(config: SGD, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State) -> Tensor:
    lr: float = hyper["lr"]
    if config.momentum == 0:
        return weights - lr * gradient
    momentum: float = hyper["momentum"]
    m = state["momentum"]
    m.mul_(momentum).add_(gradient)
    return weights - lr * (gradient + momentum * m if config.nesterov else m)


register(SGD, make=make, reference=reference)
