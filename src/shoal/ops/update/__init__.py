"""Output gradients to row gradients, and the optimizers' steps in place: the backward of a lookup."""

from shoal.ops.update.cpu import Counts, Step, all_finite, update, weight_gradients

__all__ = ["Counts", "Step", "all_finite", "update", "weight_gradients"]
