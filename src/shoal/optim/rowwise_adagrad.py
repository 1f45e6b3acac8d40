"""Adagrad with one sum a row."""

from torch import Tensor

from shoal import _native
from shoal.config import RowwiseAdagrad
from shoal.ops.update import Step
from shoal.optim.registry import Hyper, State, register


def make(config: RowwiseAdagrad, hyper: Hyper, number: int) -> Step:
    return Step(
        _native.Optimizer.rowwise_adagrad,
        hyper["lr"],
        (hyper["eps"],),
        hyper["weight_decay"],
        hyper["decoupled_weight_decay"],
    )


def reference(
    config: RowwiseAdagrad, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State
) -> Tensor:
    state["sum"].add_((gradient**2).mean())
    lr: float = hyper["lr"]
    eps: float = hyper["eps"]
    return weights - lr * gradient / (state["sum"].sqrt() + eps)


register(RowwiseAdagrad, make=make, reference=reference)
