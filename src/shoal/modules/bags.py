"""EmbeddingBagCollection: a pooled row for every bag of keys."""

from collections.abc import Sequence
from types import EllipsisType, SimpleNamespace
from typing import Any, ClassVar

import torch

from shoal.config import Init, Optimizer, Tier
from shoal.config.checked import checked_arguments
from shoal.errors import ConfigError, InputError
from shoal.modules.collection import Collection
from shoal.modules.features import features_of, require_every_sample
from shoal.modules.habits import weights_are_ignored
from shoal.modules.jagged import KeyedTensor
from shoal.modules.lookup import PooledLookup
from shoal.modules.torchrec import Defaults, looks_like_config
from shoal.modules.tracing import call_of, is_traced
from shoal.table import ops


@checked_arguments
class EmbeddingBagCollection(Collection):
    """Tables that grow with the ids they see; KeyedJaggedTensor in, KeyedTensor out: [batch, sum of dims].

    In `train()` unseen keys get a row and `backward()` updates rows; in `eval()` nothing changes.

    tables: Table values, or TorchRec's configs; their names and features differ. A feature may feed several tables, and
        is then called feature@table.
    device: where the rows are: "cpu", which is the default, or "cuda". On "meta" there is no place for rows yet:
        `to_empty(device=...)` makes one.
    is_weighted: whether the batch's weights are used; True insists on them, False leaves them alone. None uses them
        where the batch has them; if a table is a TorchRec config, it is TorchRec's default, False, and a WeightsWarning
        tells of the first batch with weights.
    seed: with a table's name and a key, decides a key's first row.
    name: by which compiled and exported programs find the tables; by default the class's and a number.
    output_dtype: of the output; rows have their own in Table.
    strict_features: whether a batch with features that no table has is refused; they are ignored otherwise.
    optimizer, tiers, init: what Table calls so, for those tables that are TorchRec configs, which have no place to say
        it; a Table names its own.
    """

    _state_name: ClassVar[str] = "embedding_bags"
    _poolings: ClassVar[tuple[str, ...]] = ("sum", "mean")
    _other: ClassVar[str] = "EmbeddingCollection"

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool | None = None,
        device: str | torch.device | None = None,
        *,
        seed: int = 0,
        name: str | None = None,
        output_dtype: torch.dtype = torch.float32,
        strict_features: bool = False,
        optimizer: Optimizer | EllipsisType | None = ...,
        tiers: Sequence[Tier] | None = None,
        init: Init | None = None,
    ) -> None:
        if is_weighted not in (None, True, False):
            raise ConfigError(f"[{type(self).__name__}] is_weighted must be True, False or None; got {is_weighted!r}.")
        super().__init__(
            tables,
            device=device,
            seed=seed,
            name=name,
            output_dtype=output_dtype,
            strict_features=strict_features,
            defaults=Defaults(optimizer, tiers, init),
        )
        # A script that was moved keeps its results.
        self._is_weighted_unsaid = is_weighted is None and any(map(looks_like_config, tables))
        self._is_weighted = False if self._is_weighted_unsaid else is_weighted

    @property
    def embedding_bags(self) -> SimpleNamespace:
        """The names of the state dict's entries as attributes: torch.distributed.checkpoint looks for them here."""
        return self._entry_names()

    def forward(self, features: Any) -> KeyedTensor:
        """Look up the rows of every bag and pool them: [samples, columns], each feature's columns under its name."""
        if is_traced(features):
            return call_of(self, features)  # type: ignore[no-any-return]
        return self._pooled(features, self.training)

    def lookup(self, features: Any) -> KeyedTensor:
        """Pool the rows of every bag as in eval(), whatever the mode: nothing is inserted, and no gradient is kept.

        Any thread may call it while another one trains; it sees rows as they are between two steps.
        """
        if is_traced(features):
            return call_of(self, features, "lookup")  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._pooled(features, training=False)

    def _pooled(self, features: Any, training: bool) -> KeyedTensor:
        features = features_of(type(self).__name__, features)
        require_every_sample(type(self).__name__, features)
        values, offsets = features.values(), features.offsets()
        weights = features.weights_or_none()
        if self._is_weighted is False and weights is not None:
            weights = None
            if self._is_weighted_unsaid:
                weights_are_ignored(self._group.name)
        if self._is_weighted and weights is None:
            raise InputError(f"[{type(self).__name__}] is_weighted=True wants weights; the batch has none.")
        lookup, token, columns = self._lookup(features, training), self._token_now(training), sum(self._dims)
        if torch.is_grad_enabled() and (training or (weights is not None and weights.requires_grad)):
            out = PooledLookup.apply(self._anchor, token, self._update_token, lookup, values, offsets, weights, columns)  # type: ignore[no-untyped-call]
        else:
            rows = self._habits.births_before(training, torch.is_grad_enabled())
            request = lookup.pooled(values, offsets, weights, columns, keep=False)
            out, _ = ops.lookup(lookup.held or lookup.group, token, request)
            self._habits.after_lookup(rows)
        return KeyedTensor(self._names, self._dims, out)

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' settings as they were given: Table values, or TorchRec's own configs.

        TorchRec's code can ask these Tables, too, for `name`, `embedding_dim`, `feature_names`, `pooling` and
        `num_embeddings`, which is the number of rows so far.
        """
        return self._as_given()

    def is_weighted(self) -> bool:
        """Whether per-sample weights may be used."""
        return self._is_weighted is not False
