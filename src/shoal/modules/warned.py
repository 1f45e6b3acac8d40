"""Warnings that point at the user's line, not at one of ours, torch's or TorchRec's."""

import sys
import warnings

from shoal.errors import ShoalWarning

_PASSED = ("shoal", "torch", "torchrec")


def warn(category: type[ShoalWarning], text: str) -> None:
    """Warn at the nearest caller that is in none of these packages."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
