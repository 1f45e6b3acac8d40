"""State dicts as they were before DCP flattened them."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.interop.dcp_files import Names, Saved
from shoal.interop.dcp_fit import require_alike
from shoal.records.excerpt import excerpt


def nested(where: str, flat: Mapping[Names, Any], of: Any, checkpoint: Saved) -> dict[str, Any]:
    """Returns a state dict made from its leaves. DCP has every key as a str; numbers are made numbers again."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise CheckpointError(f"[{where}] wanted entries apart; got one within another: {excerpt(path)}.")
        if path[-1] in at:
            raise CheckpointError(f"[{where}] wanted entries apart; got one within another: {excerpt(path)}.")
        at[path[-1]] = value
    if isinstance(of, nn.Module):
        return {str(name): _with_lists(value) for name, value in root.items()}
    live = of.state_dict()
    require_alike(where, of, {str(name) for name in root}, live, checkpoint)
    made = _as_in(_with_lists(root), live)
    if isinstance(of, torch.optim.Optimizer):
        # A fresh optimizer has no state whose keys would tell, and DCP leaves out what is empty.
        made["state"] = {_number(key): value for key, value in made.get("state", {}).items()}
    assert isinstance(made, dict)
    return made


def _with_lists(given: Any) -> Any:
    """Returns a value in which dicts with the integer keys 0 to n - 1 are lists again."""
    if not isinstance(given, dict):
        return given
    values = {key: _with_lists(value) for key, value in given.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values


def _as_in(given: Any, live: Any) -> Any:
    """Returns `given` with the keys and the types of dicts that a state dict of today has."""
    if isinstance(given, list) and isinstance(live, list) and len(given) == len(live):
        return [_as_in(one, other) for one, other in zip(given, live, strict=True)]
    if not isinstance(given, dict) or not isinstance(live, Mapping):
        return given
    keys = {str(key): key for key in live}
    made = {keys.get(str(key), key): _as_in(value, live.get(keys.get(str(key)))) for key, value in given.items()}
    # What is empty has no leaves, and so is not in a checkpoint.
    made |= {key: {} for key, value in live.items() if isinstance(value, Mapping) and not value and key not in made}
    if not isinstance(live, dict):
        return made
    typed = copy.copy(live)
    typed.clear()
    typed.update(made)
    return typed


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
