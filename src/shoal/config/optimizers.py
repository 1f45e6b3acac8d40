"""Optimizers: their settings, and the state columns that each adds to a row.

In the formulas w is a row's weights and g its gradient, reduced over the batch and clipped. Where an optimizer has
them, `weight_decay` (L2) makes g += weight_decay * w before anything else, and `decoupled_weight_decay` makes
w *= 1 - lr * decoupled_weight_decay before the step. `max_norm` scales w down to that L2 norm after the step.
State is float32 whatever the type of the weights.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY
from typing import ClassVar, Literal

from shoal.config.checked import choice, flag, number, settle, value
from shoal.config.rows import Column
from shoal.errors import ConfigError

Hyper = dict[str, float | tuple[float, float]]

# Far beyond what trains, and near enough that no accepted setting makes infinity or NaN of finite gradients.
_LR_BELOW = 1e6
_LEAST_EPS = 1e-15


@value
class Clip:
    """What happens to a row's gradient after it is reduced and before the optimizer sees it.

    value: each element is limited to [-value, value].
    norm: the row is scaled down to at most this L2 norm; after `value` where both are given.
    nonfinite: a backward with NaN or infinity in its gradients raises NonFiniteError ("raise") or changes nothing and
        is counted ("skip").
    """

    value: float | None = None
    norm: float | None = None
    nonfinite: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        if self.value is not None:
            settle(self, value=number("Clip", "value", self.value, above=0.0))
        if self.norm is not None:
            settle(self, norm=number("Clip", "norm", self.norm, above=0.0))
        choice("Clip", "nonfinite", self.nonfinite, ("raise", "skip"))


@value
class Optimizer(ABC):
    """What all optimizers have: clipping of the gradient, and a bound on a row's norm after the update."""

    _: KW_ONLY
    clip: Clip = Clip()
    max_norm: float | None = None

    _changeable: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.clip, Clip):
            raise ConfigError(
                f"[{self._where}] clip: wanted a Clip; got {self.clip!r}. Write clip=Clip(norm=1.0), say."
            )
        if self.max_norm is not None:
            settle(self, max_norm=number(self._where, "max_norm", self.max_norm, above=0.0))

    @abstractmethod
    def columns(self, dim: int) -> tuple[Column, ...]:
        """The state columns of a row with `dim` weights, in the order in which they lie in the row."""

    def hyper(self) -> Hyper:
        """The settings that may change while training, by name; `dataclasses.replace` takes and checks new ones."""
        return {name: getattr(self, name) for name in self._changeable}

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on how many the table made before, beyond what its settings say."""
        return False

    @property
    def _where(self) -> str:
        return type(self).__name__

    def _settle_numbers(self, *names: str, low: float = 0.0, above: float = -math.inf, below: float = math.inf) -> None:
        for name in names:
            given = getattr(self, name)
            settle(self, **{name: number(self._where, name, given, low=low, above=above, below=below)})

    def _require_decay(self, lr: float, name: str) -> None:
        """A row is multiplied by 1 - lr * decay in every step, which must not make it grow."""
        if lr * getattr(self, name) > 2.0:
            raise ConfigError(
                f"[{self._where}] {name}: wanted at most 2 / lr, beyond which rows grow without end; got "
                f"{getattr(self, name)!r} with lr={lr!r}."
            )


@value
class SGD(Optimizer):
    """Gradient descent: w -= lr * g.

    With momentum: m = momentum * m + g, then w -= lr * m, or with nesterov w -= lr * (g + momentum * m).
    """

    lr: float = 0.01
    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0

    _changeable: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "decoupled_weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_numbers("lr", below=_LR_BELOW)
        self._settle_numbers("weight_decay", "decoupled_weight_decay")
        self._settle_numbers("momentum", below=1.0)
        self._require_decay(self.lr, "decoupled_weight_decay")
        if flag("SGD", "nesterov", self.nesterov) and self.momentum == 0.0:
            raise ConfigError("[SGD] nesterov: wanted momentum > 0 with it; got momentum=0.0. Set momentum=0.9, say.")

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("momentum", dim),) if self.momentum > 0 else ()

    def hyper(self) -> Hyper:
        # Without its column there is no momentum to change.
        return {**super().hyper(), **({"momentum": self.momentum} if self.momentum > 0 else {})}


@value
class _Accumulating(Optimizer):
    """What Adagrad and RowwiseAdagrad share: all but the width of the sum."""

    lr: float = 0.01
    _: KW_ONLY
    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0

    _changeable: ClassVar[tuple[str, ...]] = ("lr", "eps", "weight_decay", "decoupled_weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_numbers("lr", below=_LR_BELOW)
        self._settle_numbers("eps", low=_LEAST_EPS)
        self._settle_numbers("initial", "weight_decay", "decoupled_weight_decay")
        self._require_decay(self.lr, "decoupled_weight_decay")


@value
class Adagrad(_Accumulating):
    """A learning rate per element: sum += g^2; w -= lr * g / (sqrt(sum) + eps). `sum` is born as `initial`."""

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("sum", dim, self.initial, signed=False),)


@value
class RowwiseAdagrad(_Accumulating):
    """A learning rate per row, for one float of state: sum += mean(g^2); w -= lr * g / (sqrt(sum) + eps).

    `sum` is born as `initial`.
    """

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("sum", 1, self.initial, signed=False),)


@value
class _Moments(Optimizer):
    """What the Adam family shares."""

    lr: float = 0.01
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: Literal["row", "global"] = "row"

    _changeable: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_numbers("lr", below=_LR_BELOW)
        self._settle_numbers("eps", low=_LEAST_EPS)
        self._settle_numbers("weight_decay")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigError(f"[{self._where}] betas: wanted two numbers, such as (0.9, 0.999); got {self.betas!r}.")
        first, second = (number(self._where, "betas", beta, low=0.0, below=1.0) for beta in self.betas)
        settle(self, betas=(first, second))
        choice(self._where, "bias_correction", self.bias_correction, ("row", "global"))

    @property
    def counts_steps(self) -> bool:
        return self.bias_correction == "global"

    def _count(self) -> tuple[Column, ...]:
        return (Column("count", 1, signed=False, counts=True),) if self.bias_correction == "row" else ()


@value
class Adam(_Moments):
    """First and second moment per element.

    exp_avg = b1 * exp_avg + (1 - b1) * g; exp_avg_sq = b2 * exp_avg_sq + (1 - b2) * g^2;
    w -= lr * (exp_avg / (1 - b1^t)) / (sqrt(exp_avg_sq / (1 - b2^t)) + eps).
    t counts the row's own updates (bias_correction="row", since rows are born at different times; one more float of
    state) or the table's steps ("global"). `weight_decay` is L2.
    """

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("exp_avg", dim), Column("exp_avg_sq", dim, signed=False), *self._count())


@value
class AdamW(_Moments):
    """Adam with `weight_decay` decoupled: w *= 1 - lr * weight_decay, then Adam's step with the gradient as it came."""

    _: KW_ONLY
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_decay(self.lr, "weight_decay")

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("exp_avg", dim), Column("exp_avg_sq", dim, signed=False), *self._count())


@value
class PartialRowwiseAdam(_Moments):
    """Adam with one second moment per row: exp_avg_sq = b2 * exp_avg_sq + (1 - b2) * mean(g^2); the rest as Adam."""

    _: KW_ONLY
    decoupled_weight_decay: float = 0.0

    _changeable: ClassVar[tuple[str, ...]] = (*_Moments._changeable, "decoupled_weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_numbers("decoupled_weight_decay")
        self._require_decay(self.lr, "decoupled_weight_decay")

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("exp_avg", dim), Column("exp_avg_sq", 1, signed=False), *self._count())


@value
class Ftrl(Optimizer):
    """FTRL-Proximal with learning-rate power -1/2 (McMahan et al., 2013), whose `l1` makes weights exactly zero.

    z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2;
    w = 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2). `n` is born as `initial`.
    """

    lr: float = 0.01
    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial: float = 0.1

    _changeable: ClassVar[tuple[str, ...]] = ("lr", "l1", "l2", "beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_numbers("lr", low=1e-6, below=_LR_BELOW)  # the formula divides by it
        self._settle_numbers("l1", "l2", "beta", "initial")
        if self.initial + self.beta + self.l2 < _LEAST_EPS:
            raise ConfigError(
                f"[Ftrl] initial: wanted it, beta or l2 at least {_LEAST_EPS:g}, as the first step divides by them; "
                f"got {self.initial!r}, {self.beta!r} and {self.l2!r}. Leave initial out for 0.1."
            )

    def columns(self, dim: int) -> tuple[Column, ...]:
        return (Column("z", dim), Column("n", dim, self.initial, signed=False))


@value
class Assign(Optimizer):
    """The gradient is the new row: w = g.

    A gradient of zeros is none: it comes where an output did not reach the loss, where a sample is masked, or from a
    per-sample weight of 0. So a row all of whose gradients are zeros is left as it is, with its score, and is not
    logged. To set rows to zeros, use the table's `assign`.
    duplicates: which of a key's gradients in one batch wins, the "last", the "first", or their "mean". Those of zeros
        do not count.
    """

    _: KW_ONLY
    duplicates: Literal["last", "first", "mean"] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("Assign", "duplicates", self.duplicates, ("last", "first", "mean"))

    def columns(self, dim: int) -> tuple[Column, ...]:
        return ()
