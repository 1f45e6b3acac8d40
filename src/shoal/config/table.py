"""A table and the features that read and train it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypeVar

import torch

from shoal.config.checked import choice, integer, label, settle, value
from shoal.config.dtypes import TORCH_WEIGHTS, WEIGHTS, Dtype, name_of, torch_dtype
from shoal.config.init import Init, Uniform
from shoal.config.optimizers import Optimizer, RowwiseAdagrad
from shoal.config.policies import Policy
from shoal.config.rows import SCORE, Column, RowFormat
from shoal.config.tiers import Dram, Hbm, Ssd, Tier
from shoal.errors import ConfigError

TierT = TypeVar("TierT", Hbm, Dram, Ssd)


@value
class Feature:
    """A feature of the batch, by its key in the KeyedJaggedTensor, and what it does to the table.

    mode: "train" looks up, inserts unseen keys and updates rows; "read" only looks up; "write" inserts and updates from
        its gradient, and its output is zeros.
    """

    name: str
    mode: Literal["train", "read", "write"] = "train"

    def __post_init__(self) -> None:
        label("Feature", "name", self.name)
        choice(f"Feature {self.name!r}", "mode", self.mode, ("train", "read", "write"))


@value
class Table:
    """One embedding table: a row of `dim` weights for every key it has seen.

    name: unique in its collection, and part of the state dict's keys; first rows depend on it.
    dim: weights a row.
    features: names of features, or Feature values; by default one feature called as the table.
    pooling: how the rows of a bag become one: "sum", "mean", or "none" for a sequence.
    optimizer: how rows are updated; None for a table that is only read or assigned, whose rows carry no state.
    init: what a row's weights are born with.
    tiers: where rows live, fastest first: Hbm, Dram and Ssd, any of them, in that order; None is the memory of the
        module's device, without limit. The last one bounds the table. It may also be a storage of your own: what makes
        it, such as a class, called with the bytes of a row.
    missing: what a key without a row reads as: "init", the row it would be born with, or "zero".
    dtype: the type of the weights: "float32", "float16" or "bfloat16", or torch's own names for them.
    buckets: parts the table is cut into to be placed on ranks; fixed for a table's life.
    """

    name: str
    dim: int
    features: tuple[Feature, ...]
    pooling: Literal["sum", "mean", "none"]
    optimizer: Optimizer | None
    init: Init
    tiers: tuple[Tier, ...] | None
    missing: Literal["init", "zero"]
    dtype: Dtype
    buckets: int

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        features: Sequence[str | Feature] | None = None,
        pooling: Literal["sum", "mean", "none"] = "sum",
        optimizer: Optimizer | None = RowwiseAdagrad(lr=0.01),  # noqa: B008 (frozen)
        init: Init = Uniform(-0.01, 0.01),  # noqa: B008 (frozen)
        tiers: Sequence[Tier] | None = None,
        missing: Literal["init", "zero"] = "init",
        dtype: Dtype | torch.dtype = "float32",
        buckets: int = 4096,
    ) -> None:
        if "." in label("Table", "name", name):
            raise ConfigError(
                f"[Table] name: wanted no '.', which separates the parts of a state dict's keys; got {name!r}."
            )
        where = f"Table {name!r}"
        settle(
            self,
            name=name,
            dim=integer(where, "dim", dim, low=1),
            features=_features(where, (name,) if features is None else features),
            pooling=choice(where, "pooling", pooling, ("sum", "mean", "none")),
            optimizer=_optimizer(where, optimizer),
            init=_init(where, init, _dtype(where, dtype)),
            tiers=None if tiers is None else _tiers(where, tiers),
            missing=choice(where, "missing", missing, ("init", "zero")),
            dtype=_dtype(where, dtype),
            buckets=integer(where, "buckets", buckets, low=1),
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features, in order."""
        return tuple(feature.name for feature in self.features)

    @property
    def embedding_dim(self) -> int:
        """`dim`, as TorchRec's models ask for it."""
        return self.dim

    @property
    def num_embeddings(self) -> int:
        """The rows so far, as TorchRec's code asks for them: of a Table that a collection returned as its config.

        Any other has no rows, and no such attribute.
        """
        rows: Callable[[], int] | None = self.__dict__.get("_rows")
        if rows is None:
            raise AttributeError(
                f"Table {self.name!r} has no num_embeddings, as it has no size. The configs that a collection returns "
                f"have: the rows so far, which are len(bags.table({self.name!r})) too."
            )
        return rows()

    def counted_by(self, rows: Callable[[], int]) -> Self:
        """This Table with `num_embeddings`. For Shoal's own parts."""
        counted = copy.copy(self)
        settle(counted, _rows=rows)
        return counted

    def __getstate__(self) -> dict[str, Any]:
        return {name: given for name, given in self.__dict__.items() if name != "_rows"}

    def tier(self, kind: type[TierT]) -> TierT | None:
        """The tier of that kind, if there is one."""
        return next((tier for tier in self.tiers or () if isinstance(tier, kind)), None)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The optimizer's state columns, in the order in which they lie in a row."""
        return () if self.optimizer is None else self.optimizer.columns(self.dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its weights and its state."""
        return self.format.trained_bytes

    @property
    def format(self) -> RowFormat:
        """What a row is made of."""
        facts = tuple(column for policy in self.__dict__.get("_policies", ()) for column in policy.columns)
        return RowFormat(self.dim, self.dtype, self.columns, (SCORE, *dict.fromkeys(facts)))

    def with_policies(self, *policies: Policy) -> Self:
        """This Table with policies, whose columns its rows have. For Shoal's own parts."""
        kept = copy.copy(self)
        settle(kept, _policies=policies)
        return kept


def _features(where: str, given: Any) -> tuple[Feature, ...]:
    if isinstance(given, (str, Feature)):
        name = given if isinstance(given, str) else given.name
        raise ConfigError(f"[{where}] features: wanted a list; got {given!r}. Write features=[{name!r}].")
    features = []
    for item in _items(where, "features", given):
        if not isinstance(item, (str, Feature)):
            raise ConfigError(f"[{where}] features: wanted names or Feature values; got {item!r}.")
        features.append(Feature(item) if isinstance(item, str) else item)
    names = [feature.name for feature in features]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"[{where}] features: wanted each name once; got {name!r} more than once.")
    return tuple(features)


_ORDER = (Hbm, Dram, Ssd)


def _tiers(where: str, given: Any) -> tuple[Tier, ...]:
    if isinstance(given, (str, *_ORDER)):
        raise ConfigError(
            f"[{where}] tiers: wanted a list; got {given!r}. Write tiers=[Dram('8GiB')] or tiers=[Hbm('8GiB')], say."
        )
    tiers = _items(where, "tiers", given)
    ranks = []
    for tier in tiers:
        if isinstance(tier, type) and tier in _ORDER:
            raise ConfigError(f"[{where}] tiers: wanted tiers such as Dram('8GiB'); got the class {tier.__name__}.")
        if not isinstance(tier, _ORDER) and not callable(tier):
            raise ConfigError(
                f"[{where}] tiers: wanted tiers such as Dram('8GiB'), or what makes a storage; got {tier!r}."
            )
        ranks.append(_ORDER.index(type(tier)) if isinstance(tier, _ORDER) else len(_ORDER) - 1)
    if ranks.count(len(_ORDER) - 1) > 1:
        raise ConfigError(
            f"[{where}] tiers: wanted one lowest tier, an Ssd or what makes a storage; got {list(tiers)!r}. Keep "
            f"one of these."
        )
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"[{where}] tiers: wanted each kind of tier once; got {list(tiers)!r}.")
    if ranks != sorted(ranks):
        raise ConfigError(f"[{where}] tiers: wanted them in the order Hbm, Dram, Ssd; got {list(tiers)!r}.")
    for tier in tiers[:-1]:
        if tier.size is None:
            raise ConfigError(
                f"[{where}] tiers: wanted a size for each tier with a tier below it, which would never be used; got "
                f"{list(tiers)!r}. Write {type(tier).__name__}('8GiB'), say."
            )
    return tiers


def _items(where: str, name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"[{where}] {name}: wanted a non-empty list; got {given!r}.")
    return tuple(given)


def _optimizer(where: str, given: object) -> Optimizer | None:
    if given is not None and not isinstance(given, Optimizer):
        raise ConfigError(
            f"[{where}] optimizer: wanted a value such as RowwiseAdagrad(lr=0.01), or None; got {given!r}."
        )
    return given


def _init(where: str, given: object, dtype: str) -> Init:
    if not isinstance(given, Init):
        raise ConfigError(f"[{where}] init: wanted Uniform, Normal, Zeros or Constant; got {given!r}.")
    if given.bound > torch.finfo(torch_dtype(dtype)).max:
        raise ConfigError(f"[{where}] init: wanted weights that are finite in {dtype}; got {given!r}.")
    return given


def _dtype(where: str, given: object) -> str:
    named = name_of(given) if isinstance(given, torch.dtype) and given in TORCH_WEIGHTS else given
    return choice(where, "dtype", named, WEIGHTS)
