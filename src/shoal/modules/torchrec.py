"""TorchRec's table configs, taken by what they look like: nothing is imported, and TorchRec need not be there."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch.nn import init

from shoal.config import Constant, Init, Normal, Table, Uniform, Zeros
from shoal.errors import ConfigError

_DTYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "FP32": "float32",
    "FP16": "float16",
    "BF16": "bfloat16",
}
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
    """Whether `value` is an EmbeddingBagConfig or EmbeddingConfig, or can stand for one."""
    return all(hasattr(value, name) for name in ("name", "embedding_dim", "num_embeddings", "feature_names"))


def table_of(config: Any) -> Table:
    """The Table that stands for a TorchRec config. `num_embeddings` only scales the first rows: the table grows."""
    where = f"TorchRec config {config.name!r}"
    for setting in _WITHOUT_COUNTERPART:
        if getattr(config, setting, None):
            raise ConfigError(f"[{where}] {setting} has no counterpart here; got {getattr(config, setting)!r}.")
    dtype = getattr(getattr(config, "data_type", None), "value", "FP32")
    if dtype not in _DTYPES:
        raise ConfigError(f"[{where}] data_type must be one of {', '.join(_DTYPES)}; got {dtype}.")
    pooling: Any = getattr(getattr(config, "pooling", None), "value", "NONE").lower()
    buckets = getattr(config, "total_num_buckets", None)
    return Table(
        config.name,
        config.embedding_dim,
        features=list(config.feature_names) or None,
        pooling=pooling,
        init=_init_of(where, config),
        dtype=_DTYPES[dtype],
        **({} if buckets is None else {"buckets": buckets}),
    )


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
