"""Adam with one second moment a row."""

from torch import Tensor

from shoal import _native
from shoal.config import PartialRowwiseAdam
from shoal.ops.update import Step
from shoal.optim.adam import betas, device_settings, settings
from shoal.optim.counts import count_update
from shoal.optim.registry import Hyper, State, register


def make(config: PartialRowwiseAdam, hyper: Hyper, number: int) -> Step:
    return Step(
        _native.Optimizer.partial_rowwise_adam,
        hyper["lr"],
        settings(config, hyper, number),
        hyper["weight_decay"],
        hyper["decoupled_weight_decay"],
        device_settings=device_settings(hyper),
        is_of_one_backward=config.counts_steps,
    )


def reference(
    config: PartialRowwiseAdam, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State
) -> Tensor:
    first, second = betas(hyper)
    if config.bias_correction == "row":
        number = count_update(state["count"])
    state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
    state["exp_avg_sq"].mul_(second).add_((gradient**2).mean(), alpha=1 - second)
    mean = state["exp_avg"] / (1 - first**number)
    lr: float = hyper["lr"]
    eps: float = hyper["eps"]
    spread = (state["exp_avg_sq"] / (1 - second**number)).sqrt() + eps
    return weights - lr * mean / spread


register(PartialRowwiseAdam, make=make, reference=reference)
