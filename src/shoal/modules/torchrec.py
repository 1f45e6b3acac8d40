"""TorchRec's table configs, taken by what they look like: nothing is imported, and TorchRec need not be there.

`shoal.interop.torchrec` is the public side of this file.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

from torch.nn import init

from shoal.config import Constant, Init, Normal, Optimizer, Table, Tier, Uniform, Zeros
from shoal.config.dtypes import WEIGHTS, number_type
from shoal.errors import ConfigError

_DTYPES = {number_type(name).torchrec: name for name in WEIGHTS}
_INITS: dict[Any, Callable[..., Init]] = {
    init.uniform_: lambda a=0.0, b=1.0: Uniform(a, b),
    init.normal_: lambda mean=0.0, std=1.0: Normal(mean, std),
    init.zeros_: Zeros,
    init.ones_: lambda: Constant(1.0),
    init.constant_: lambda val: Constant(val),
}
_WITHOUT_COUNTERPART = (
    "num_embeddings_post_pruning",
    "need_pos",
    "input_dim",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)


def looks_like_config(value: object) -> bool:
    """Whether `value` is an EmbeddingBagConfig or EmbeddingConfig, or can stand for one. A Table is none."""
    names = ("name", "embedding_dim", "num_embeddings", "feature_names")
    return not isinstance(value, Table) and all(hasattr(value, name) for name in names)


def table_of(config: Any, **overrides: Any) -> Table:
    """The Table that stands for a TorchRec config.

    config: an EmbeddingBagConfig or an EmbeddingConfig. Its `num_embeddings` only scales the first rows: a table grows.
    overrides: arguments of Table, which win over what the config says: `optimizer=`, `tiers=`, `init=` and the others.
    """
    if not looks_like_config(config):
        raise ConfigError(
            f"[table_of] config: wanted TorchRec's EmbeddingBagConfig or EmbeddingConfig; got {config!r}. A "
            f"shoal.Table is changed by dataclasses.replace."
        )
    where = f"TorchRec config {config.name!r}"
    for setting in _WITHOUT_COUNTERPART:
        if getattr(config, setting, None):
            raise ConfigError(f"[{where}] {setting} has no counterpart here; got {getattr(config, setting)!r}.")
    settings: dict[str, Any] = {
        "name": config.name,
        "dim": config.embedding_dim,
        "features": list(config.feature_names) or None,
        "pooling": getattr(getattr(config, "pooling", None), "value", "NONE").lower(),
        **overrides,
    }
    if "init" not in overrides:
        settings["init"] = _init_of(where, config)
    if "dtype" not in overrides:
        dtype = getattr(getattr(config, "data_type", None), "value", "FP32")
        if dtype not in _DTYPES:
            raise ConfigError(
                f"[{where}] data_type must be one of {', '.join(map(str, _DTYPES))}; got {dtype}. Or name one of ours: "
                f"table_of(config, dtype='float32')."
            )
        settings["dtype"] = _DTYPES[dtype]
    if "buckets" not in overrides and getattr(config, "total_num_buckets", None) is not None:
        settings["buckets"] = config.total_num_buckets
    return Table(**settings)


@dataclass(frozen=True)
class Defaults:
    """What a collection's arguments say about tables that come as TorchRec configs, which cannot say it themselves."""

    optimizer: Optimizer | EllipsisType | None  # ... where it was not given; None is a table that does not train
    tiers: Sequence[Tier] | None
    init: Init | None

    def overrides(self) -> dict[str, Any]:
        """As arguments of Table."""
        given = {"optimizer": self.optimizer, "tiers": self.tiers, "init": self.init}
        return {name: value for name, value in given.items() if value is not (... if name == "optimizer" else None)}

    def tables(self, where: str, given: Sequence[Any]) -> tuple[Any, ...]:
        """The tables, those of TorchRec configs made with these defaults; what is neither is the caller's to refuse."""
        overrides = self.overrides()
        if overrides and not any(looks_like_config(table) for table in given):
            names = ", ".join(f"{name}=" for name in overrides)
            raise ConfigError(
                f"[{where}] {names}: wanted only for tables that are TorchRec configs; got Table values alone, which "
                f"name their own. Write Table({names.replace('=', '=...')}) and leave it out here."
            )
        return tuple(table_of(table, **overrides) if looks_like_config(table) else table for table in given)

    def without_optimizer(self, given: Sequence[Any]) -> tuple[str, ...]:
        """The names of the tables that came without an optimizer."""
        if self.optimizer is not ...:
            return ()
        return tuple(table.name for table in given if looks_like_config(table))


def _init_of(where: str, config: Any) -> Init:
    fill = getattr(config, "init_fn", None)
    if fill is None:
        bound = math.sqrt(1 / max(config.num_embeddings, 1))
        return Uniform(-bound, bound)
    # A config without an init_fn of the user's has a partial of uniform_.
    call = fill if isinstance(fill, partial) else partial(fill)
    if call.func not in _INITS or call.args:
        raise ConfigError(
            f"[{where}] init_fn must be uniform_, normal_, zeros_, ones_ or constant_ of torch.nn.init, or a partial "
            f"of one with keywords, since rows are born one by one; got {fill!r}. Or use shoal.Table(init=...)."
        )
    try:
        return _INITS[call.func](**call.keywords)
    except TypeError as error:
        raise ConfigError(f"[{where}] init_fn must have keywords that {call.func.__name__} takes; {error}.") from None
