"""The gradient is the new row. Reductions leave out gradients of zeros: see `ops.update.reference.reduce`."""

from torch import Tensor

from shoal import _native
from shoal.config import Assign
from shoal.ops.update import Step
from shoal.optim.registry import Hyper, State, register

_REDUCE = {"first": _native.Reduce.first, "last": _native.Reduce.last, "mean": _native.Reduce.mean}


def make(config: Assign, hyper: Hyper, number: int) -> Step:
    return Step(_native.Optimizer.assign, reduce=_REDUCE[config.duplicates])


def reference(config: Assign, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State) -> Tensor:
    return gradient


register(Assign, make=make, reference=reference)
