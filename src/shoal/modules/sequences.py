"""EmbeddingCollection: a row for every key."""

from collections.abc import Sequence
from types import EllipsisType, SimpleNamespace
from typing import Any, ClassVar

import torch

from shoal.config import Init, Optimizer, Tier
from shoal.config.checked import checked_arguments
from shoal.modules.collection import Collection
from shoal.modules.features import features_of
from shoal.modules.jagged import JaggedTensor
from shoal.modules.lookup import EachLookup, rows_of_each
from shoal.modules.torchrec import Defaults
from shoal.modules.tracing import call_of, is_traced


@checked_arguments
class EmbeddingCollection(Collection):
    """Tables that grow with the ids they see; KeyedJaggedTensor in, a JaggedTensor of rows for each feature out.

    In `train()` unseen keys get a row and `backward()` updates rows; in `eval()` nothing changes. Arguments are as
    EmbeddingBagCollection's; `need_indices` puts the keys into the outputs' weights, as TorchRec does.
    """

    _state_name: ClassVar[str] = "embeddings"
    _poolings: ClassVar[tuple[str, ...]] = ("none",)
    _other: ClassVar[str] = "EmbeddingBagCollection"

    def __init__(
        self,
        tables: Sequence[Any],
        device: str | torch.device | None = None,
        need_indices: bool = False,
        *,
        seed: int = 0,
        name: str | None = None,
        output_dtype: torch.dtype = torch.float32,
        strict_features: bool = False,
        optimizer: Optimizer | EllipsisType | None = ...,
        tiers: Sequence[Tier] | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__(
            tables,
            device=device,
            seed=seed,
            name=name,
            output_dtype=output_dtype,
            strict_features=strict_features,
            defaults=Defaults(optimizer, tiers, init),
        )
        self._need_indices = need_indices
        self._sources = [name for config in self._configs for name in config.feature_names]

    @property
    def embeddings(self) -> SimpleNamespace:
        """The names of the state dict's entries as attributes: torch.distributed.checkpoint looks for them here."""
        return self._entry_names()

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Look up the row of every key: for each feature a JaggedTensor whose values are [ids, dim]."""
        if is_traced(features):
            return call_of(self, features)  # type: ignore[no-any-return]
        return self._each(features, self.training)

    def lookup(self, features: Any) -> dict[str, JaggedTensor]:
        """The row of every key as in eval(), whatever the mode: nothing is inserted, and no gradient is kept.

        Any thread may call it while another one trains; it sees rows as they are between two steps.
        """
        if is_traced(features):
            return call_of(self, features, "lookup")  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._each(features, training=False)

    def _each(self, features: Any, training: bool) -> dict[str, JaggedTensor]:
        features = features_of(type(self).__name__, features)
        names = list(features.keys())
        values, offsets = features.values(), features.offsets()
        lookup, token = self._lookup(features, training), self._token_now(training)
        keys = features.length_per_key()
        if torch.compiler.is_compiling():
            for count in keys:
                torch._check(count >= 0)  # the lookup makes sure of it
        counts = dict(zip(names, keys, strict=True))
        # A feature that the batch lacks is the lookup's to name.
        shapes = [(counts.get(source, 0), dim) for source, dim in zip(self._sources, self._dims, strict=True)]
        if torch.is_grad_enabled() and training:
            outs = EachLookup.apply(self._anchor, token, self._update_token, lookup, values, offsets, keys, shapes)  # type: ignore[no-untyped-call]
        else:
            rows = self._habits.births_before(training, torch.is_grad_enabled())
            outs, _ = rows_of_each(token, lookup, values, offsets, keys, shapes, keep=False)
            self._habits.after_lookup(rows)
        lengths, bags = features.lengths(), (offsets.shape[0] - 1) // max(len(names), 1)
        results = {}
        for name, source, out in zip(self._names, self._sources, outs, strict=True):
            at = names.index(source)
            indices = features[source].values() if self._need_indices else None
            results[name] = JaggedTensor(out, weights=indices, lengths=lengths[at * bags : (at + 1) * bags])
        return results

    def embedding_configs(self) -> list[Any]:
        """The tables' settings as they were given: Table values, or TorchRec's own configs.

        TorchRec's code can ask these Tables, too, for `name`, `embedding_dim`, `feature_names`, `pooling` and
        `num_embeddings`, which is the number of rows so far.
        """
        return self._as_given()

    def need_indices(self) -> bool:
        """Whether outputs carry their keys."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """The outputs of each table."""
        names = iter(self._names)
        return [[next(names) for _ in config.features] for config in self._configs]
