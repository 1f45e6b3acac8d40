"""Warnings that point at the user's line, not at ours or torch's."""

import sys
import warnings

from shoal.errors import ShoalWarning


def warn(category: type[ShoalWarning], text: str) -> None:
    """Warn at the nearest caller that is in neither shoal nor torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("shoal", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def is_checkpointed() -> bool:
    """Whether activation checkpointing calls: it runs a forward without gradients, and once more with them."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
