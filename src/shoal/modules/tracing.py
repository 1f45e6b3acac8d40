"""Symbolic tracing: a collection is one call in a torch.fx graph, as the modules of torch.nn are."""

import functools
from abc import ABCMeta
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn
from torch.fx import Proxy

from shoal import torch_private
from shoal.errors import ConfigError


def is_traced(features: object) -> bool:
    """Whether a forward is called by a tracer, which has no batch."""
    return isinstance(features, Proxy)


def call_of(module: nn.Module, features: Any, method: str | None = None) -> Any:
    """The call of a module, or of its method, as a node of the graph.

    A tracer decides by itself which modules it does not look into, and knows torch.nn's only. It looks into this one,
    and so meets a forward that gives it the node.
    """
    tracer = features.tracer
    try:
        path = tracer.path_of_module(module)
    except NameError:
        path = None  # the module is the model itself, or a function's
    if not path:
        raise ConfigError(
            f"[{type(module).__name__}] torch.fx: wanted a model that holds the collection, which is one call of its "
            f"graph; got the collection alone, or a function. Trace a module that has it as an attribute."
        )
    if method is None:
        return tracer.create_proxy("call_module", path, (features,), {})
    owner = tracer.create_proxy("get_attr", path, (), {})
    return tracer.create_proxy("call_method", method, (owner, features), {})


class Traceable(ABCMeta):
    """Classes whose construction out of a tracer's proxies is a node of the graph, as that of TorchRec's is.

    Their subclasses may be abstract ones too, such as TorchRec's Pipelineable.
    """

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        if torch_private.is_symbolically_tracing():
            for given in chain(args, settings.values()):
                if isinstance(given, Proxy):
                    return given.tracer.create_proxy("call_function", cls, args, settings)
        return super().__call__(*args, **settings)


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose call with a tracer's proxies, alone or in lists, is a node of the graph."""

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        if torch_private.is_symbolically_tracing():
            for given in (*args, *settings.values()):
                for one in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(one, Proxy):
                        return one.tracer.create_proxy("call_function", call, args, settings)
        return function(*args, **settings)

    return call


def require_no_recording(where: str) -> None:
    """Refuse a lookup inside of torch.jit.trace."""
    if torch_private.is_jit_tracing():
        raise ConfigError(
            f"[{where}] torch.jit.trace cannot record a lookup: its graph would have outputs that nothing fills. Use "
            f"torch.export in eval(), or trace the other modules of the model one by one."
        )
