"""FTRL-Proximal."""

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Ftrl
from shoal.ops.update import Step
from shoal.optim.registry import Hyper, State, register


def make(config: Ftrl, hyper: Hyper, number: int) -> Step:
    return Step(_native.Optimizer.ftrl, hyper["lr"], (hyper["l1"], hyper["l2"], hyper["beta"]))


def reference(config: Ftrl, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State) -> Tensor:
    z, n = state["z"], state["n"]
    grown = n + gradient**2
    z.add_(gradient - (grown.sqrt() - n.sqrt()) / hyper["lr"] * weights)
    n.copy_(grown)
    moved = -(z - z.sign() * hyper["l1"]) / ((hyper["beta"] + n.sqrt()) / hyper["lr"] + hyper["l2"])
    return torch.where(z.abs() <= hyper["l1"], 0.0, moved)


register(Ftrl, make=make, reference=reference)
