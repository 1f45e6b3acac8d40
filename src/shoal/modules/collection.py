"""What EmbeddingBagCollection and EmbeddingCollection share: tables behind an nn.Module."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shoal.config import Table, format_size, parse_size
from shoal.errors import ConfigError, DeviceError, InputError, NotFoundError, ShoalError, StateDictError
from shoal.modules.lookup import Lookup
from shoal.modules.optimizer import TableOptimizer
from shoal.modules.scaling import ScaledLoss
from shoal.modules.state import load_content, save_content
from shoal.modules.torchrec import looks_like_config, table_of
from shoal.table import Group, TableHandle, registry, snapshot

_counter = itertools.count()


class Collection(nn.Module):
    """Tables, looked up together. Rows are not parameters: they grow, and are updated in the backward pass.

    `optimizer` shows the tables' settings to schedulers; `scaler` may be a torch.amp.GradScaler. `state_dict()` holds
    the rows as tensors, up to `state_dict_limit` bytes.
    """

    # "embedding_bags" or "embeddings": the part of the state dict's keys before a table's name, as TorchRec has it.
    _state_name: ClassVar[str]

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        name: str | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        _require_cpu(where, torch.device(device))
        configs = _tables(where, tables)
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
            raise ConfigError(f"[{where}] seed must be an integer of 64 bits; got {seed!r}.")
        if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(f"[{where}] output_dtype must be float32, float16 or bfloat16; got {output_dtype}.")
        self._configs = configs
        self._output_dtype = output_dtype
        self.state_dict_limit: int = parse_size("8GiB")
        self._open(name, seed)

    def _open(self, name: str | None, seed: int) -> None:
        where = type(self).__name__
        if name is None:
            name = next(free for free in (f"{where}-{n}" for n in _counter) if registry.is_free(f"{free}/0"))
        elif not isinstance(name, str) or not name:
            raise ConfigError(f"[{where}] name must be a non-empty str; got {name!r}.")
        elif not registry.is_free(f"{name}/0"):
            raise ConfigError(f"[{where}] name must be free; a live collection is called {name!r} already.")
        self.name = name
        self._group = Group(f"{name}/0", self._configs, seed % 2**64)
        registry.register(self._group)
        self._token = torch.zeros(1)
        # Autograd calls back only where something requires a gradient; this is no parameter, and gets none.
        self._anchor = torch.zeros(1, requires_grad=True)
        trains = any(config.optimizer is not None for config in self._configs)
        self._optimizer = TableOptimizer(self._group) if trains else None

    # ---- tables

    def table(self, name: str) -> TableHandle:
        """One table."""
        number = self._group.number_of(name)
        if number is None:
            names = ", ".join(repr(config.name) for config in self._configs)
            raise NotFoundError(f"[{self.name}] has the tables {names}; got {name!r}.")
        return TableHandle(self._group, number)

    def tables(self) -> dict[str, TableHandle]:
        """All tables, by name."""
        return {config.name: TableHandle(self._group, number) for number, config in enumerate(self._configs)}

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return torch.device("cpu")

    def extra_repr(self) -> str:
        return "\n".join(
            f"{config.name}: dim={config.dim}, pooling={config.pooling}, features={list(config.feature_names)}, "
            f"optimizer={type(config.optimizer).__name__}, rows={len(handle)}"
            for config, handle in zip(self._configs, self.tables().values(), strict=True)
        )

    # ---- beside the rest of torch

    @property
    def optimizer(self) -> TableOptimizer:
        """The tables' optimizers for schedulers: a param group for each table that trains, called by its name."""
        if self._optimizer is None:
            raise ConfigError(f"[{self.name}] no table has an optimizer, so there are no settings to schedule.")
        return self._optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler whose loss reaches these tables: rows see unscaled gradients."""
        scaled = self._group.loss_scale
        return scaled.scaler if isinstance(scaled, ScaledLoss) else None

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"[{self.name}] scaler must be a torch.amp.GradScaler or None; got {scaler!r}.")
        self._group.loss_scale = None if scaler is None else ScaledLoss(scaler, self.optimizer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = fn(torch.zeros(1))
        _require_cpu(self.name, probe.device)
        if probe.dtype != torch.float32:
            raise ConfigError(
                f"[{self.name}] rows do not change their type with the module's; it is set by Table(dtype=...), and the "
                f"output's by output_dtype=. Cast the other modules, not this one."
            )
        return super()._apply(fn, recurse)

    def _lookup(self, names: Sequence[str]) -> Lookup:
        return Lookup(self._group.name, list(names), self.training, self._output_dtype)

    # ---- saving and copying

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._group.reading():
            wanted = sum(
                snapshot.content_bytes(table.config, len(table.index)) for table in self._group.tables
            )
            if wanted > self.state_dict_limit:
                raise StateDictError(
                    f"[{self.name}] a state dict would take {format_size(wanted)}; state_dict_limit is "
                    f"{format_size(self.state_dict_limit)}. Raise `state_dict_limit` if memory holds the copy."
                )
            for number, config in enumerate(self._configs):
                content = snapshot.take(self._group, number)
                save_content(content, f"{prefix}{self._state_name}.{config.name}.", destination)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        contents = {}
        known = set()
        for number, config in enumerate(self._configs):
            at = f"{prefix}{self._state_name}.{config.name}."
            content = load_content(config, at, state_dict, missing_keys)
            known |= {key for key in state_dict if key.startswith(at)}
            if content is not None:
                contents[number] = content
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known and strict]
        if not (strict and (missing_keys or unexpected_keys)):
            with self._group.writing():
                snapshot.put(self._group, contents)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        own = {"_group", "_token", "_anchor", "_optimizer", "name"}
        for attribute, value in self.__dict__.items():
            if attribute not in own:
                made.__dict__[attribute] = copy.deepcopy(value, memo)
        made._open(None, self._group.seed)
        with self._group.reading():
            contents = {n: snapshot.take(self._group, n) for n in range(len(self._configs))}
        with made._group.writing():
            snapshot.put(made._group, contents)
        if self._optimizer is not None:
            made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShoalError(
            f"[{self.name}] a collection is not pickled: its rows live outside of Python. Save state_dict(), or copy it "
            f"with copy.deepcopy."
        )


def _require_cpu(where: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise DeviceError(
            f"[{where}] tables live on cpu in this version; got {device}. Keep this module on cpu: move the rest of the "
            f"model, and its output with .to({str(device)!r})."
        )


def _tables(where: str, tables: Sequence[Any]) -> tuple[Table, ...]:
    if isinstance(tables, (Table, str)) or not isinstance(tables, Sequence) or not tables:
        raise ConfigError(f"[{where}] tables must be a non-empty list of Table; got {tables!r}.")
    configs = tuple(table_of(table) if looks_like_config(table) else table for table in tables)
    for config in configs:
        if not isinstance(config, Table):
            raise ConfigError(f"[{where}] tables must be Table values; got {config!r}.")
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"[{where}] tables must have different names; got {name!r} more than once.")
    return configs


def features_of(where: str, features: Any) -> Any:
    """A KeyedJaggedTensor, ours or TorchRec's, known by its methods."""
    if not all(hasattr(features, method) for method in ("keys", "values", "offsets", "weights_or_none")):
        raise InputError(f"[{where}] wanted a KeyedJaggedTensor; got {type(features).__name__}.")
    if getattr(features, "variable_stride_per_key", bool)():
        raise InputError(f"[{where}] wanted the same number of bags for every feature; got a variable one.")
    return features
