"""What a batch must be to be looked up, and what its outputs are called."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.config import Table
from shoal.errors import ConfigError, DeviceError, InputError


def output_names(where: str, configs: Sequence[Table]) -> list[str]:
    """A feature's own name, or feature@table where it feeds several tables."""
    names = [name for config in configs for name in config.feature_names]
    outputs = [
        f"{name}@{config.name}" if names.count(name) > 1 else name
        for config in configs
        for name in config.feature_names
    ]
    for output in outputs:
        if outputs.count(output) > 1:
            raise ConfigError(
                f"[{where}] outputs must have different names; {output!r} is a feature's own name and what another "
                f"one is called that feeds several tables. Rename the feature."
            )
    return outputs


def features_of(where: str, features: Any) -> Any:
    """A KeyedJaggedTensor, ours or TorchRec's, known by its methods."""
    if not all(hasattr(features, method) for method in ("keys", "values", "offsets", "weights_or_none")):
        raise InputError(f"[{where}] wanted a KeyedJaggedTensor; got {type(features).__name__}.")
    if getattr(features, "variable_stride_per_key", bool)():
        raise InputError(f"[{where}] wanted the same number of bags for every feature; got a variable one.")
    for what in ("values", "offsets", "weights_or_none"):
        tensor = getattr(features, what)()
        if tensor is None and what == "weights_or_none":
            continue
        if not isinstance(tensor, Tensor):
            raise InputError(f"[{where}] the batch's {what}() must be a tensor; got {type(tensor).__name__}.")
        if tensor.device.type == "meta":  # these would not reach the tables
            raise DeviceError(f"[{where}] wanted a batch with data; its {what}() is on meta, which holds none.")
    return features


def require_every_sample(where: str, features: Any) -> None:
    """Refuse a batch of deduplicated samples, for which TorchRec's EmbeddingBagCollection expands its output."""
    if getattr(features, "inverse_indices_or_none", bool)():
        raise InputError(
            f"[{where}] wanted a batch with every sample; got deduplicated ones (inverse_indices). Leave "
            f"inverse_indices= out of the KeyedJaggedTensor, and index the output with them."
        )
