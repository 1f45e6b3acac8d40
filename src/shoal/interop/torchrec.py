"""From TorchRec: table configs, optimizers and their state. docs/from-torchrec.md shows a whole script.

Nothing here imports TorchRec, except `take_batches`: its classes are known by their names, its state by its entries.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    PartialRowwiseAdam,
    RowwiseAdagrad,
    Table,
)
from shoal.errors import ConfigError, StateDictError
from shoal.modules import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shoal.modules.collection import Collection
from shoal.modules.state import whole_tensor
from shoal.modules.torchrec import table_of
from shoal.optim import counts_of
from shoal.table import TableContent

__all__ = ["apply_optimizer_in_backward", "load_optimizer_state", "optimizer_of", "table_of", "take_batches"]


# ---- optimizers


@dataclass(frozen=True)
class _Foreign:
    """An optimizer class of torch or TorchRec: how its settings are called here, and what it does where none is given.

    names: setting there -> setting here.
    defaults: settings here, as the class has them.
    only: settings that have no counterpart, with the values that switch them off.
    """

    make: Callable[..., Optimizer]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# How a step is computed, not what it is.
_HOW = {
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "differentiable": (False,),
    "capturable": (False,),
}
_LR = {"lr": "lr", "learning_rate": "lr"}
# FBGEMM's: some classes of TorchRec have no step of their own and stand for these.
_FBGEMM_MOMENTS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": "global"}
_FBGEMM_NAMES = {**_LR, "eps": "eps", "betas": "betas", "beta1": "beta1", "beta2": "beta2"}

_OPTIMIZERS: dict[tuple[str, str], _Foreign] = {
    ("torchrec", "RowWiseAdagrad"): _Foreign(
        RowwiseAdagrad,
        {**_LR, "eps": "eps", "weight_decay": "weight_decay", "initial_accumulator_value": "initial"},
        {"lr": 0.01, "eps": 1e-10},
        {"lr_decay": (0,), "maximize": (False,)},
    ),
    ("torchrec", "Adagrad"): _Foreign(
        Adagrad, {**_LR, "eps": "eps"}, {"lr": 0.01, "eps": 1e-8}, {"weight_decay": (0,)}
    ),
    ("torchrec", "SGD"): _Foreign(SGD, _LR, {"lr": 0.01}, {"momentum": (0,), "weight_decay": (0,)}),
    # FBGEMM takes the decay of its Adams off the weights, not into the gradient.
    ("torchrec", "Adam"): _Foreign(
        AdamW, {**_FBGEMM_NAMES, "weight_decay": "weight_decay"}, {**_FBGEMM_MOMENTS, "weight_decay": 0.0}
    ),
    ("torchrec", "PartialRowWiseAdam"): _Foreign(
        PartialRowwiseAdam, {**_FBGEMM_NAMES, "weight_decay": "decoupled_weight_decay"}, _FBGEMM_MOMENTS
    ),
    ("torch", "SGD"): _Foreign(
        SGD,
        {"lr": "lr", "momentum": "momentum", "nesterov": "nesterov", "weight_decay": "weight_decay"},
        {"lr": 1e-3},
        {"dampening": (0,), "maximize": (False,), **_HOW},
    ),
    ("torch", "Adagrad"): _Foreign(
        Adagrad,
        {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay", "initial_accumulator_value": "initial"},
        {"lr": 0.01, "eps": 1e-10},
        {"lr_decay": (0,), "maximize": (False,), **_HOW},
    ),
    ("torch", "Adam"): _Foreign(
        Adam,
        {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"},
        {"lr": 1e-3, "bias_correction": "global"},
        {"amsgrad": (False,), "maximize": (False,), "decoupled_weight_decay": (False,), **_HOW},
    ),
    ("torch", "AdamW"): _Foreign(
        AdamW,
        {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"},
        {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": "global"},
        {"amsgrad": (False,), "maximize": (False,), **_HOW},
    ),
}


def optimizer_of(optimizer_class: Any, optimizer_kwargs: Mapping[str, Any] | None = None) -> Optimizer:
    """The optimizer of ours that makes the steps of a class of `torchrec.optim` or `torch.optim` with these settings.

    Settings that are not given are the class's own: those of `torchrec.optim.RowWiseAdagrad` have eps=1e-10, say, where
    ours has 1e-8. Settings without a counterpart are refused, unless their value switches them off (`lr_decay=0`). An
    optimizer of ours is returned as it is; it takes no settings.
    """
    settings = dict(optimizer_kwargs or {})
    if isinstance(optimizer_class, Optimizer):
        if settings:
            raise ConfigError(
                f"[optimizer_of] optimizer_kwargs: wanted none with {optimizer_class!r}, which has its own; got "
                f"{settings!r}."
            )
        return optimizer_class
    known = (getattr(optimizer_class, "__module__", "").split(".")[0], getattr(optimizer_class, "__name__", ""))
    foreign = _OPTIMIZERS.get(known)
    if foreign is None:
        names = ", ".join(f"{package}.optim.{name}" for package, name in _OPTIMIZERS)
        raise ConfigError(
            f"[optimizer_of] optimizer_class: wanted one of {names}, or an optimizer of shoal; got "
            f"{optimizer_class!r}, which has no counterpart."
        )
    where = f"{known[0]}.optim.{known[1]}"
    made: dict[str, Any] = dict(foreign.defaults)
    for name, given in settings.items():
        if name in foreign.names:
            made[foreign.names[name]] = given
        elif not any(type(given) in (type(one), int, float) and given == one for one in foreign.only.get(name, ())):
            wanted = ", ".join(foreign.names)
            only = f"; {name} only as {foreign.only[name][0]!r}" if name in foreign.only else ""
            raise ConfigError(
                f"[{where}] wanted the settings {wanted}{only}; got {name}={given!r}, which has no counterpart in "
                f"shoal.{foreign.make.__name__}. Leave it out, or name an optimizer of shoal."
            )
    if "beta1" in made or "beta2" in made:
        first, second = made["betas"]
        made["betas"] = (made.pop("beta1", first), made.pop("beta2", second))
    return foreign.make(**made)


def apply_optimizer_in_backward(
    optimizer_class: Any, params: Any, optimizer_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Train the tables of a collection with this optimizer, as TorchRec's function of that name does for parameters.

    optimizer_class: of `torchrec.optim` or `torch.optim`, see `optimizer_of`, or an optimizer of ours.
    params: a collection, a module whose only weights are those of collections, or a list of such. Not
        `bags.parameters()`, which is empty: rows are not parameters.
    optimizer_kwargs: its settings.

    A `Table(optimizer=None)` does not train, and stays as it is.

    Call it before the first row is born and before `bags.optimizer` is asked for: an optimizer decides what rows hold.
    """
    optimizer = optimizer_of(optimizer_class, optimizer_kwargs)
    collections = _collections(params)
    for collection in collections:
        _require_new(collection)
    for collection in collections:
        configs = [
            config if config.optimizer is None else replace(config, optimizer=optimizer)
            for config in collection._configs
        ]
        collection._make_anew(configs, collection._device, without_optimizer=())


def _collections(params: Any) -> list[Collection]:
    where = "apply_optimizer_in_backward"
    given = [params] if isinstance(params, nn.Module) else list(params) if isinstance(params, Iterable) else [params]
    found: list[Collection] = []
    for one in given:
        if not isinstance(one, nn.Module):
            raise ConfigError(
                f"[{where}] params: wanted a collection, or a module that holds some; got {type(one).__name__}. For "
                f"parameters use torch.distributed.optim._apply_optimizer_in_backward."
            )
        dense = [name for name, _ in one.named_parameters()]
        if dense:
            raise ConfigError(
                f"[{where}] params: wanted modules whose only weights are rows; got {type(one).__name__} with the "
                f"parameters {', '.join(dense[:3])}{' ...' if len(dense) > 3 else ''}. Give the collections alone."
            )
        found += [module for module in one.modules() if isinstance(module, Collection) and module not in found]
    if not found:
        raise ConfigError(
            f"[{where}] params: wanted a collection, or a module that holds some; got none. Give the collection in "
            f"place of its parameters(), which are none since rows are not parameters."
        )
    return found


def _require_new(collection: Collection) -> None:
    group = collection._group
    if all(config.optimizer is None for config in collection._configs):
        raise ConfigError(
            f"[{collection.name}] apply_optimizer_in_backward: wanted a table that trains; got optimizer=None for all. "
            f"Leave it out where the collection is made."
        )
    with group.reading():
        rows = {table.config.name: len(table) for table in group.tables}
        stepped = any(table.step for table in group.tables)
    if any(rows.values()) or stepped or group.newest_lease is not None:
        raise ConfigError(
            f"[{collection.name}] wanted tables without rows, since an optimizer decides what a row holds; got {rows} "
            f"rows. Call apply_optimizer_in_backward before the first training lookup, before a load, "
            f"and before rows of tables that do not train are assigned."
        )
    if group.settings_may_change:
        raise ConfigError(
            f"[{collection.name}] wanted `optimizer` of the collection not asked for yet, since it would belong to the "
            f"optimizer before. Call apply_optimizer_in_backward first, and make schedulers after it."
        )


# ---- state

# TorchRec's names of a state, after the table's name: FBGEMM's, its fused modules', and those of torch's optimizers.
_FIRST = ("momentum1", "momentum_1", "exp_avg", "sum", "momentum_buffer")
_SECOND = ("exp_avg_sq", "momentum2", "momentum_2")
_STEP = ("step", "iter")


def load_optimizer_state(bags: Collection, state_dict: Mapping[str, Any]) -> None:
    """Give rows the optimizer state that TorchRec had for them.

    bags: a collection that has loaded TorchRec's weights, by `bags.load_state_dict(...)`: key i is their row i.
    state_dict: of `model.fused_optimizer`, of a fused module's `fused_optimizer()`, or of a `KeyedOptimizer`:
        {"state": {"...<table>.weight": {"<table>.momentum1": tensor}}}.

    Every table with rows and with state has to be there. The state has to be that of the tables' optimizers: where
    shapes differ, a StateDictError is raised before anything changes. TorchRec's Adams count steps for the whole
    table: with `bias_correction="row"` every row has that count.
    """
    where = f"{bags.name}, load_optimizer_state"
    states = state_dict.get("state", state_dict)
    with bags._group.writing():
        contents = {}
        for number, table in enumerate(bags._group.tables):
            if table.config.columns and len(table):
                entries = _entries_of(where, table.config, states)
                contents[number] = _with_state(where, table.config, table.content(), entries)
        bags._group.replace(contents)


def _entries_of(where: str, config: Table, states: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a table, by their names without the table's."""
    ends = (f"{config.name}.weight", config.name)
    owners = [name for name in states if str(name) in ends or str(name).endswith(tuple(f".{end}" for end in ends))]
    if len(owners) != 1:
        raise StateDictError(
            f"[{where}] wanted one entry of the table {config.name!r}, called ...{config.name}.weight; got "
            f"{owners or list(states)}. Nothing was loaded."
        )
    return {str(name).rpartition(".")[2]: value for name, value in states[owners[0]].items()}


def _with_state(where: str, config: Table, content: TableContent, entries: Mapping[str, Any]) -> TableContent:
    state: dict[str, Tensor] = {}
    step = _step_of(entries)
    for at, column in enumerate(column for column in config.columns if not column.counts):
        names = (_FIRST, _SECOND)[at]
        name = next((name for name in names if name in entries), None)
        given = None if name is None else whole_tensor(entries[name])
        if given is None:
            raise StateDictError(
                f"[{where}] table {config.name!r}: wanted a tensor for {column.name!r} of {config.optimizer!r}, called "
                f"one of {', '.join(names)}; got {list(entries)}. Nothing was loaded."
            )
        given = given.detach().to(device="cpu", dtype=torch.float32)
        rows = given.shape[0] if given.dim() else 0
        if given.numel() != rows * column.width or (given.dim() == 1 and column.width > 1):
            raise StateDictError(
                f"[{where}] table {config.name!r}: wanted {name} of [n, {column.width}]; got {tuple(given.shape)}. "
                f"Its optimizer is {config.optimizer!r}. Nothing was loaded."
            )
        outside = content.keys[(content.keys < 0) | (content.keys >= rows)]
        if len(outside):
            raise StateDictError(
                f"[{where}] table {config.name!r}: wanted keys from 0 to {rows - 1}, which {name} has rows for; got "
                f"{outside[:3].tolist()}. Load it right after TorchRec's weights. Nothing was loaded."
            )
        values = given.reshape(rows, column.width)[content.keys]
        if not torch.isfinite(values).all() or (not column.signed and (values < 0).any()):
            raise StateDictError(
                f"[{where}] table {config.name!r}: wanted {name} finite{'' if column.signed else ' and not negative'}; "
                f"got values that are not. Nothing was loaded."
            )
        state[column.name] = values.contiguous()
    counts = [column.name for column in config.columns if column.counts]
    if counts or (config.optimizer and config.optimizer.counts_steps):
        if step is None:
            raise StateDictError(
                f"[{where}] table {config.name!r}: wanted the number of steps of {config.optimizer!r}, called one of "
                f"{', '.join(_STEP)}; got {list(entries)}. Nothing was loaded."
            )
        for name in counts:
            of_all = torch.full((len(content.keys), 1), step, dtype=torch.int64, device="cpu")
            state[name] = counts_of(of_all)
    return replace(content, state=state, step=content.step if step is None else step)


def _step_of(entries: Mapping[str, Any]) -> int | None:
    for name in _STEP:
        if name in entries:
            given = whole_tensor(entries[name])
            return int(entries[name] if given is None else given.max())
    return None


# ---- batches


def take_batches() -> None:
    """Let TorchRec's pipelines take our KeyedJaggedTensor and KeyedTensor as a batch by themselves.

    They ask whether a batch is one of TorchRec's `Pipelineable` classes. Ours are not before TorchRec is imported,
    which shoal never does by itself; so call this once. A batch class such as TorchRec's `Batch`, which holds one of
    ours among other tensors, does not need this call.
    """
    from torchrec.streamable import Pipelineable  # type: ignore[import-not-found, unused-ignore]

    for ours in (KeyedJaggedTensor, KeyedTensor, JaggedTensor):
        Pipelineable.register(ours)
