"""Updates in plain torch, one row at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.config import Clip


def position_gradients(
    grad: Tensor, offsets: Tensor, pooling: str, rows: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient that reaches each position's row, [n, dim], and its per-sample weight, [n]."""
    lengths = offsets.diff()
    if pooling == "none":
        each = grad
    else:
        each = torch.repeat_interleave(grad, lengths, dim=0)
        if pooling == "mean":
            each = each / torch.repeat_interleave(lengths, lengths)[:, None]
    to_weights = (each * rows).sum(1)
    return (each if weights is None else each * weights[:, None]), to_weights


def reduce(gradients: Tensor, how: str) -> Tensor | None:
    """The gradients of one row, [k, dim] in order of position, as one.

    All but "sum" take the gradients that are not all zeros, which the loss did not touch; None where all are.
    """
    if how != "sum":
        gradients = gradients[(gradients != 0).any(1)]
        if not len(gradients):
            return None
    match how:
        case "first":
            return gradients[0]
        case "last":
            return gradients[-1]
        case "mean":
            return gradients.mean(0)
        case _:
            return gradients.sum(0)


def update_row(
    weights: Tensor,
    gradient: Tensor,
    step: Callable[[Tensor, Tensor], Tensor],
    *,
    clip: Clip,
    weight_decay: float,
    shrink: float,
    max_norm: float | None,
) -> Tensor:
    """New float32 weights of one row."""
    if clip.value is not None:
        gradient = gradient.clamp(-clip.value, clip.value)
    if clip.norm is not None and gradient.norm() > clip.norm:
        gradient = gradient * (clip.norm / gradient.norm())
    gradient = gradient + weight_decay * weights
    result = step(weights * shrink, gradient)
    if max_norm is not None and result.norm() > max_norm:
        result = result * (max_norm / result.norm())
    return result


def stochastic_round(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to 16 bits: up with the probability of the part that is cut off. `words` are 32 random bits in int64."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign, body = bits & 0x80000000, bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        raised = (body + (words & 0xFFFF)) & ~0xFFFF
        kept = torch.where(raised >= 0x7F800000, body & ~0xFFFF, raised)
        return _float(sign | kept).to(torch.bfloat16)
    raised = (body + (words & 0x1FFF)) & ~0x1FFF
    normal = _float(torch.clamp(raised, max=0x477FE000))
    scaled = _float(body) * 2.0**24
    up = (words >> 8).float() * 2.0**-24 < scaled - scaled.floor()
    tiny = (scaled.floor() + up) * 2.0**-24
    rounded = torch.where(body < 0x38800000, tiny, normal)
    rounded = torch.where(body >= 0x7F800000, _float(body), rounded)
    return torch.where(sign != 0, -rounded, rounded).to(torch.float16)


def _float(bits: Tensor) -> Tensor:
    wrapped = torch.where(bits >= 2**31, bits - 2**32, bits)
    return wrapped.to(torch.int32).view(torch.float32)
