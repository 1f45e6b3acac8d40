"""Output gradients to row gradients, and the optimizers' steps in place: the backward of a lookup."""

from shoal.ops.update.cpu import LeftOut, Step, all_finite, update, weight_gradients

__all__ = ["LeftOut", "Step", "all_finite", "update", "weight_gradients"]
