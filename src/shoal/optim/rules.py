"""What tables ask of an optimizer apart from its steps."""

from collections.abc import Hashable

from shoal.config import Optimizer
from shoal.optim.registry import step


def raises_nonfinite(config: Optimizer | None) -> bool:
    """Whether gradients that are not finite are an error rather than left out. False for a table that does not
    train."""
    return config is not None and config.clip.nonfinite == "raise"


def kernel_of(config: Optimizer | None) -> Hashable:
    """Returns what is equal for optimizers whose rows one launch can update: they differ in numbers only.

    Adam and AdamW share a kernel but not a launch: the decay of one would cost the other.
    """
    if config is None:
        return None
    made = step(config, config.hyper(), 1)
    return type(config), made.kind, made.reduce
