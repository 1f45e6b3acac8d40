"""Symbolic tracing: a collection is one call in a torch.fx graph, as the modules of torch.nn are."""

from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from shoal.errors import ConfigError


def is_traced(features: object) -> bool:
    """Whether a forward is called by a tracer, which has no batch."""
    return isinstance(features, Proxy)


def call_of(module: nn.Module, features: Any) -> Any:
    """The call of a module as a node of the graph.

    A tracer decides by itself which modules it does not look into, and knows torch.nn's only. It looks into this one,
    and so meets a forward that gives it the node.
    """
    tracer = features.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (features,), {})


def require_no_recording(where: str) -> None:
    """Refuse a lookup inside of torch.jit.trace."""
    if torch._C._get_tracing_state() is not None:  # torch.jit.is_tracing(), in half the time
        raise ConfigError(
            f"[{where}] torch.jit.trace cannot record a lookup: its graph would have outputs that nothing fills. Use "
            f"torch.export in eval(), or trace the other modules of the model one by one."
        )
