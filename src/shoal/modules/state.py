"""A table in a state dict: TorchRec's names where it has them, and checked before anything is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.config import Table
from shoal.errors import StateDictError
from shoal.table.snapshot import TableContent


def save_content(content: TableContent, prefix: str, destination: dict[str, Any]) -> None:
    """weight [n, dim], weight_id [n, 1], the optimizer's columns, score and step."""
    destination[prefix + "weight"] = content.weights
    destination[prefix + "weight_id"] = content.keys[:, None]
    for name, values in content.state.items():
        destination[f"{prefix}state.{name}"] = values
    destination[prefix + "score"] = content.scores
    destination[prefix + "step"] = torch.tensor(content.step)


def load_content(
    config: Table, prefix: str, state_dict: Mapping[str, Any], missing: list[str]
) -> TableContent | None:
    """A table's content, or None where it has none. Names what is missing; raises StateDictError for what is wrong."""
    if prefix + "weight_id" not in state_dict or prefix + "weight" not in state_dict:
        missing += [prefix + name for name in ("weight", "weight_id") if prefix + name not in state_dict]
        return None
    keys = _tensor(prefix + "weight_id", state_dict, torch.int64, None)
    n = keys.shape[0]
    keys = keys.reshape(-1)
    if keys.numel() != n:
        raise StateDictError(f"[{prefix}weight_id] must be [n, 1] or [n]; got {tuple(state_dict[prefix + 'weight_id'].shape)}.")
    if torch.unique(keys).numel() != n:
        raise StateDictError(f"[{prefix}weight_id] keys must differ; got {n - torch.unique(keys).numel()} repeated ones.")
    weights = _tensor(prefix + "weight", state_dict, getattr(torch, config.dtype), (n, config.dim))
    if not torch.isfinite(weights).all():
        raise StateDictError(f"[{prefix}weight] rows must be finite; got NaN or infinity.")
    state = {}
    for column in config.columns:
        name = f"{prefix}state.{column.name}"
        if name in state_dict:
            state[column.name] = _tensor(name, state_dict, torch.float32, (n, column.width))
        else:
            missing.append(name)
    scores, step = torch.zeros(n, dtype=torch.float64), torch.tensor(0)
    if prefix + "score" in state_dict:
        scores = _tensor(prefix + "score", state_dict, torch.float64, (n,))
    else:
        missing.append(prefix + "score")
    if prefix + "step" in state_dict:
        step = _tensor(prefix + "step", state_dict, torch.int64, ())
    else:
        missing.append(prefix + "step")
    if int(step) < 0:
        raise StateDictError(f"[{prefix}step] must not be negative; got {int(step)}.")
    return TableContent(keys.contiguous(), weights, state, scores, int(step))


def _tensor(
    name: str, state_dict: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...] | None
) -> Tensor:
    value = state_dict[name]
    if not isinstance(value, Tensor):
        raise StateDictError(f"[{name}] must be a tensor; got {type(value).__name__}.")
    if value.dtype != dtype or (shape is not None and value.shape != shape) or (shape is None and value.dim() == 0):
        wanted = f"{dtype} {shape}" if shape is not None else f"{dtype}"
        raise StateDictError(f"[{name}] must be {wanted}; got {value.dtype} {tuple(value.shape)}.")
    return value.detach().to("cpu").contiguous()
