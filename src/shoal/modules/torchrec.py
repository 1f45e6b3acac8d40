"""TorchRec's table configs, taken by what they look like: nothing is imported, and TorchRec need not be there."""

import math
from typing import Any, Literal

from shoal.config import Table, Uniform
from shoal.errors import ConfigError

_DTYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "FP32": "float32",
    "FP16": "float16",
    "BF16": "bfloat16",
}


def looks_like_config(value: object) -> bool:
    """Whether `value` is an EmbeddingBagConfig or EmbeddingConfig, or can stand for one."""
    return all(hasattr(value, name) for name in ("name", "embedding_dim", "num_embeddings", "feature_names"))


def table_of(config: Any) -> Table:
    """The Table that stands for a TorchRec config. `num_embeddings` only scales the first rows: the table grows."""
    where = f"TorchRec config {config.name!r}"
    if getattr(config, "init_fn", None) is not None:
        raise ConfigError(
            f"[{where}] init_fn fills a whole tensor, and rows here are born one by one. Use shoal.Table(init=...)."
        )
    dtype = getattr(getattr(config, "data_type", None), "value", "FP32")
    if dtype not in _DTYPES:
        raise ConfigError(f"[{where}] data_type must be one of {', '.join(_DTYPES)}; got {dtype}.")
    bound = math.sqrt(1 / max(config.num_embeddings, 1))
    low, high = getattr(config, "weight_init_min", None), getattr(config, "weight_init_max", None)
    pooling = getattr(getattr(config, "pooling", None), "value", "NONE").lower()
    buckets = getattr(config, "total_num_buckets", None)
    return Table(
        config.name,
        config.embedding_dim,
        features=list(config.feature_names) or None,
        pooling=pooling,
        init=Uniform(-bound if low is None else low, bound if high is None else high),
        dtype=_DTYPES[dtype],
        **({} if buckets is None else {"buckets": buckets}),
    )
