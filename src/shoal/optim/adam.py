"""Adam, with L2 or decoupled (AdamW) decay."""

import math

from torch import Tensor

from shoal import _native
from shoal.config import Adam, AdamW, PartialRowwiseAdam
from shoal.ops.update import Step
from shoal.optim.counts import count_update
from shoal.optim.registry import Hyper, State, register


def betas(hyper: Hyper) -> tuple[float, float]:
    """Both decay rates."""
    first, second = hyper["betas"]
    return float(first), float(second)


def settings(config: Adam | AdamW | PartialRowwiseAdam, hyper: Hyper, number: int) -> tuple[float, ...]:
    """What the Adam kernels read: betas, eps, and the table-wide bias corrections or zeros."""
    first, second = betas(hyper)
    if config.bias_correction == "row":
        return (first, second, hyper["eps"], 0.0, 0.0)
    return (first, second, hyper["eps"], 1.0 - first**number, 1.0 - second**number)


def device_settings(hyper: Hyper) -> tuple[float, ...]:
    """Logarithms of both betas, from which the device's kernels make powers. A beta of 0 leaves nothing to correct."""
    return tuple(math.log(beta) if beta > 0.0 else -1e4 for beta in betas(hyper))


def make(config: Adam | AdamW, hyper: Hyper, number: int) -> Step:
    decay = {"decoupled_weight_decay" if isinstance(config, AdamW) else "weight_decay": hyper["weight_decay"]}
    return Step(
        _native.Optimizer.adam,
        hyper["lr"],
        settings(config, hyper, number),
        device_settings=device_settings(hyper),
        is_of_one_backward=config.counts_steps,
        **decay,
    )


def reference(
    config: Adam | AdamW, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State
) -> Tensor:
    first, second = betas(hyper)
    if config.bias_correction == "row":
        number = count_update(state["count"])
    state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
    state["exp_avg_sq"].mul_(second).add_(gradient**2, alpha=1 - second)
    mean = state["exp_avg"] / (1 - first**number)
    lr: float = hyper["lr"]
    eps: float = hyper["eps"]
    spread = (state["exp_avg_sq"] / (1 - second**number)).sqrt() + eps
    return weights - lr * mean / spread


register(Adam, AdamW, make=make, reference=reference)
