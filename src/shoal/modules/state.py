"""A table in a state dict: TorchRec's names where it has them, and checked before anything is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.config import Table, trained
from shoal.errors import StateDictError, StateWarning
from shoal.modules.warned import warn
from shoal.table import TableContent


def state_names(config: Table, prefix: str) -> list[str]:
    """Every entry of a table: weight [n, dim], weight_id [n, 1], the optimizer's columns, score [n] and step."""
    columns = [f"state.{column.name}" for column in config.columns]
    return [prefix + name for name in ("weight", "weight_id", *columns, "score", "step")]


def names_as_attributes(names: Iterable[str]) -> SimpleNamespace:
    """Names with dots as objects in objects: `a.b` is there as attribute b of attribute a.

    torch.distributed.checkpoint.state_dict walks along the attributes of a module for every name of its state dict.
    """
    root = SimpleNamespace()
    for name in names:
        at = root
        for part in name.split("."):
            at = at.__dict__.setdefault(part, SimpleNamespace())
    return root


def state_shapes(config: Table, prefix: str) -> dict[str, tuple[torch.dtype, tuple[int, ...] | None]]:
    """The type of every entry of a table, and its shape without rows; None where it has none for each row."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {
        "weight": (getattr(torch, config.dtype), (config.dim,)),
        "weight_id": (torch.int64, (1,)),
    }
    shapes |= {f"state.{column.name}": (torch.float32, (column.width,)) for column in config.columns}
    shapes |= {"score": (torch.float64, ()), "step": (torch.int64, None)}
    return {prefix + name: shape for name, shape in shapes.items()}


def whole_tensor(given: Any) -> Tensor | None:
    """A tensor, also where TorchRec wraps it in a ShardedTensor or a DTensor all of which is here; else None."""
    if hasattr(given, "local_shards"):
        shards = given.local_shards() if callable(given.local_shards) else given.local_shards
        given = shards[0].tensor if len(shards) == 1 and shards[0].tensor.shape == given.size() else None
    elif hasattr(given, "to_local") and isinstance(given, Tensor):
        local = given.to_local()  # type: ignore[attr-defined]
        given = local if isinstance(local, Tensor) and local.shape == given.shape else None
    return given if isinstance(given, Tensor) else None


def save_content(content: TableContent, prefix: str, destination: dict[str, Any]) -> None:
    """Put a table's entries into a state dict. Raises StateDictError where it has more than the entries can hold."""
    if content.facts or content.policy_state:
        raise StateDictError(
            f"[{prefix}weight] a state dict holds weights, optimizer state, score and step; the table's policies keep "
            f"the columns {list(content.facts)} and the values {list(content.policy_state)} too. Such a table has no "
            f"state dict yet."
        )
    destination[prefix + "weight"] = content.weights
    destination[prefix + "weight_id"] = content.keys[:, None]
    for name, values in content.state.items():
        destination[f"{prefix}state.{name}"] = values
    destination[prefix + "score"] = content.scores
    destination[prefix + "step"] = torch.tensor(content.step, device="cpu")


def load_content(config: Table, prefix: str, state_dict: Mapping[str, Any]) -> TableContent | None:
    """A table's content, or None without weights; state that is missing is as at birth.

    Raises StateDictError for what is wrong.
    """
    entries = _Entries(prefix, state_dict)
    if is_weight_alone(config, prefix, state_dict):
        keys = torch.arange(entries.rows(), dtype=torch.int64, device="cpu")
    elif prefix + "weight" not in state_dict:
        return None
    else:
        keys = entries.keys()
    n = len(keys)
    weights = entries.floats("weight", getattr(torch, config.dtype), (n, config.dim))
    assert weights is not None
    state = {
        column.name: entries.floats(f"state.{column.name}", torch.float32, (n, column.width), column.signed)
        for column in config.columns
    }
    scores = entries.floats("score", torch.float64, (n,))
    step = entries.step()
    return TableContent(
        keys,
        weights,
        {name: values for name, values in state.items() if values is not None},
        torch.full((n,), float(step), dtype=torch.float64, device="cpu") if scores is None else scores,
        step,
    )


def is_weight_alone(config: Table, prefix: str, state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has a table as TorchRec writes one: its weight, whose row i is key i's, and no more."""
    return [name for name in state_names(config, prefix) if name in state_dict] == [prefix + "weight"]


def trained_otherwise(config: Table, prefix: str, shapes: Mapping[str, Sequence[int] | None]) -> str | None:
    """A sentence that says that the state of a table's rows is that of other optimizers than its own; None where it is
    not, or that of no optimizer. shapes: of all entries of a state dict, None where one is no tensor."""
    own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    if "weight_id" not in own or tuple(own.get("weight") or ())[1:] != (config.dim,):
        return None
    rows = {name.removeprefix("state."): shape for name, shape in own.items() if name.startswith("state.")}
    widths = {name: shape[1] if shape is not None and len(shape) == 2 else None for name, shape in rows.items()}
    if not trained.optimizers_with(widths, config.dim):
        return None
    return trained.trained_otherwise(config.name, config.dim, config.optimizer, None, widths)


def warn_of_weights(collection: str, names: Sequence[str]) -> None:
    """Say what was made of weights without keys."""
    warn(
        StateWarning,
        f"[{collection}] the state dict has weights without keys for {', '.join(map(repr, names))}, as TorchRec writes "
        f"them: row i is that of key i now, and the optimizer's state is as at birth. "
        f"shoal.interop.torchrec.load_optimizer_state loads TorchRec's.",
    )


class _Entries:
    """One table's entries, checked as they are read."""

    def __init__(self, prefix: str, state_dict: Mapping[str, Any]) -> None:
        self._prefix = prefix
        self._state_dict = state_dict

    def keys(self) -> Tensor:
        if self._prefix + "weight_id" not in self._state_dict:
            raise self._wrong(
                "weight_id", "must be there, as the optimizer's state comes with the weights", "weights without keys"
            )
        keys = self._tensor("weight_id", torch.int64)
        if keys.dim() not in (1, 2) or keys.shape[1:] not in ((), (1,)):
            raise self._wrong("weight_id", "must be [n, 1] or [n]", f"{tuple(keys.shape)}")
        repeated = keys.numel() - torch.unique(keys).numel()
        if repeated:
            raise self._wrong("weight_id", "must hold each key once", f"{repeated} repeated ones")
        return keys.reshape(-1)

    def rows(self) -> int:
        """Of a weight without keys."""
        weight = self._given("weight")
        if weight.dim() != 2:
            raise self._wrong("weight", "must be [n, dim]", f"{tuple(weight.shape)}")
        return weight.shape[0]

    def floats(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], signed: bool = True) -> Tensor | None:
        if self._prefix + name not in self._state_dict:
            return None
        values = self._tensor(name, dtype)
        if values.shape != shape:
            raise self._wrong(name, f"must have the shape {shape}", f"{tuple(values.shape)}")
        if not torch.isfinite(values).all():
            raise self._wrong(name, "must be finite", "NaN or infinity")
        if not signed and (values < 0).any():
            raise self._wrong(name, "must not be negative", f"{float(values.min())}")
        return values

    def step(self) -> int:
        if self._prefix + "step" not in self._state_dict:
            return 0
        step = self._tensor("step", torch.int64)
        if step.numel() != 1 or int(step) < 0:
            raise self._wrong("step", "must be one number that is not negative", f"{step.tolist()}")
        return int(step)

    def _given(self, name: str) -> Tensor:
        given = whole_tensor(self._state_dict[self._prefix + name])
        if given is None:
            kind = type(self._state_dict[self._prefix + name]).__name__
            raise self._wrong(name, "must be a tensor", f"{kind}; one that is cut into shards is gathered first")
        if given.is_meta or given.layout != torch.strided:
            kind = "one on meta, which holds none" if given.is_meta else f"one of the layout {given.layout}"
            raise self._wrong(name, "must be a dense tensor with data", kind)
        return given

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        given = self._given(name)
        if given.dtype != dtype:
            raise self._wrong(name, f"must be {dtype}", f"{given.dtype}")
        return given.detach().to("cpu").contiguous()

    def _wrong(self, name: str, wanted: str, got: str) -> StateDictError:
        return StateDictError(f"[{self._prefix}{name}] {wanted}; got {got}. Nothing of this collection was loaded.")
