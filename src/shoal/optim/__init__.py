"""Optimizers: from a table's settings to the step its kernel takes, and the same step in plain torch. One file each."""

from shoal.optim import adagrad, adam, assign, ftrl, partial_rowwise_adam, rowwise_adagrad, sgd
from shoal.optim.counts import counts_of, numbers_of
from shoal.optim.registry import Hyper, State, reference_step, step
from shoal.optim.rules import kernel_of, raises_nonfinite

__all__ = [
    "Hyper",
    "State",
    "adagrad",
    "adam",
    "assign",
    "counts_of",
    "ftrl",
    "kernel_of",
    "numbers_of",
    "partial_rowwise_adam",
    "raises_nonfinite",
    "reference_step",
    "rowwise_adagrad",
    "sgd",
    "step",
]
