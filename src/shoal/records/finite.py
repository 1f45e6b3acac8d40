"""Finding rows with NaN or infinity, which training may make of extreme weights and gradients."""

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.records.rows import Rows

# The bits of NaN and infinity.
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


def all_finite(values: Tensor) -> bool:
    """Returns whether no float is NaN or infinity, at the speed of memory: a load checks all that it reads."""
    if values.numel() == 0:
        return True
    values = values.contiguous()
    if values.dtype in _EXPONENTS:
        return _native.all_finite16(values.view(torch.int16).reshape(-1), _EXPONENTS[values.dtype])
    if values.dtype == torch.float32:
        return _native.all_finite(values.data_ptr(), 1, values.numel(), 0, get_num_threads())
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def first_not_finite(values: Tensor) -> int | None:
    """Returns the first row that has NaN or infinity; None where none has."""
    if all_finite(values):
        return None
    return int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])


def count_not_finite(rows: Rows) -> int:
    """Returns how many rows have NaN or infinity in their weights or state."""
    parts = [part for part in (rows.weights, *rows.state.values()) if not all_finite(part)]
    if not parts:
        return 0
    bad = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
    for part in parts:
        bad |= (~torch.isfinite(part)).any(1)
    return int(bad.sum())
