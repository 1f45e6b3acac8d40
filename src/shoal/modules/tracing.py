"""Symbolic tracing: a collection is one call in a torch.fx graph, as the modules of torch.nn are."""

from typing import Any

from torch import nn
from torch.fx import Proxy


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
