"""Gradients of a backward, as its kernels find them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.table.device.plan import DevicePlan
from shoal.table.device.streams import send


@dataclass(frozen=True)
class Gradients:
    """Gradients as the kernels find them: from `base` on, each part `moved` elements from where its output was."""

    base: Tensor
    moved: Tensor | None
    aligned: bool
    held: Sequence[Tensor] = ()  # what else the kernels read must live until they are launched


def together(plan: DevicePlan, grads: Sequence[Tensor]) -> Gradients:
    """Returns the gradients of a batch's outputs as one tensor and distances in it, copied only if they must be."""
    if plan.columns or len(grads) == 1:
        whole = grads[0].contiguous()
        return Gradients(whole, None, whole.data_ptr() % 16 == 0)
    grads = [grad.contiguous() for grad in grads]
    base = min((grad for grad in grads if grad.numel()), key=Tensor.data_ptr, default=grads[0])
    places = [(grad.data_ptr() - base.data_ptr()) // 4 if grad.numel() else 0 for grad in grads]
    begins = np.cumsum([0, *(grad.numel() for grad in grads)])[:-1]
    moved = [place - int(begin) for place, begin in zip(places, begins, strict=True)]
    aligned = all(grad.data_ptr() % 16 == 0 for grad in grads)
    if not any(moved):
        return Gradients(base, None, aligned, grads)
    if max(places) >= 2**39:  # more than a ticket has room for
        return Gradients(torch.cat([grad.reshape(-1) for grad in grads]), None, True)
    table = torch.tensor([moved[at] for at in plan.order], dtype=torch.int64)
    return Gradients(base, send(table, base.device), aligned, grads)
