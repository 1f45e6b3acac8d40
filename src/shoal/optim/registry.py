"""Which file serves which optimizer setting."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from shoal.config import Optimizer
from shoal.ops.update import Step

Hyper = Mapping[str, Any]
State = dict[str, Tensor]
# (settings, hyper, table step of this backward counted from 1) -> what the kernel takes.
MakeStep = Callable[[Any, Hyper, int], Step]
# (settings, hyper, table step, weights, gradient, state columns) -> new weights; state changes in place. One row each.
Reference = Callable[[Any, Hyper, int, Tensor, Tensor, State], Tensor]

Config = TypeVar("Config", bound=Optimizer)

_steps: dict[type[Optimizer], tuple[MakeStep, Reference]] = {}


def register(*configs: type[Optimizer], make: MakeStep, reference: Reference) -> None:
    """Serve these settings with `make`, and check it against `reference`."""
    for config in configs:
        _steps[config] = (make, reference)


def step(config: Optimizer, hyper: Hyper, number: int) -> Step:
    """What the kernel does in the table's backward `number` (from 1), with the settings as they are now."""
    made = _steps[type(config)][0](config, hyper, number)
    clip = config.clip
    return replace(made, clip_value=clip.value or 0.0, clip_norm=clip.norm or 0.0, max_norm=config.max_norm or 0.0)


def reference_step(
    config: Optimizer, hyper: Hyper, number: int, weights: Tensor, gradient: Tensor, state: State
) -> Tensor:
    """The same step in plain torch: takes a row's weights and reduced gradient, returns its new weights."""
    return _steps[type(config)][1](config, hyper, number, weights, gradient, state)
