"""What a backward does where NaN or infinity in its gradients reaches rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import NonFiniteError


@dataclass(frozen=True)
class Reached:
    """A table whose rows a gradient with NaN or infinity reaches, and the feature through which it does."""

    table: str
    feature: str
    raises: bool  # whether the table wants an error; else the backward is skipped


@dataclass(frozen=True)
class Judged:
    """What a group finds in the gradients of a backward before it changes a row.

    is_found: whether anything is not finite; on a device an int32 tensor of one number, 0 if not. A device looks for it
        where a loss is scaled, and else leaves it to its kernels, which skip row by row.
    reached: where it reaches rows.
    """

    is_found: bool | Tensor
    reached: Sequence[Reached] = ()


def require_skipping(where: str, reached: Sequence[Reached]) -> None:
    """Raise NonFiniteError if one of the tables wants an error. REQUIRES: no row was changed."""
    stopped = [one for one in reached if one.raises]
    if stopped:
        names = sorted({one.table for one in stopped})
        raise NonFiniteError(
            f"[{where}] gradients must be finite; NaN or infinity reached {', '.join(map(repr, names))} "
            f"through {', '.join(repr(one.feature) for one in stopped)}. No row was changed. Find their "
            f"source, or set Clip(nonfinite='skip') to leave such a backward out; where a GradScaler scales the "
            f"loss, set bags.scaler = scaler."
        )
