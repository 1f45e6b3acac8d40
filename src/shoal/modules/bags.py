"""EmbeddingBagCollection: a pooled row for every bag of keys."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from shoal.config import Table
from shoal.config.checked import checked_arguments
from shoal.errors import ConfigError, InputError
from shoal.modules.collection import Collection, features_of
from shoal.modules.jagged import KeyedTensor
from shoal.modules.lookup import PooledLookup
from shoal.table import ops


@checked_arguments
class EmbeddingBagCollection(Collection):
    """Tables that grow with the ids they see; KeyedJaggedTensor in, KeyedTensor out: [batch, sum of dims].

    In `train()` unseen keys get a row and `backward()` updates rows; in `eval()` nothing changes.

    tables: their names and features differ; a feature may feed several tables, and is then called feature@table.
    device: where the rows are: "cpu", which is the default, or "cuda".
    is_weighted: whether the batch's weights are used; None uses them where the batch has them, True insists on them,
        False leaves them alone.
    seed: with a table's name and a key, decides a key's first row.
    name: by which compiled and exported programs find the tables; by default the class's and a number.
    output_dtype: of the output; rows have their own in Table.
    """

    _state_name: ClassVar[str] = "embedding_bags"
    _poolings: ClassVar[tuple[str, ...]] = ("sum", "mean")
    _other: ClassVar[str] = "EmbeddingCollection"

    def __init__(
        self,
        tables: Sequence[Table],
        is_weighted: bool | None = None,
        device: str | torch.device | None = None,
        *,
        seed: int = 0,
        name: str | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        if is_weighted not in (None, True, False):
            raise ConfigError(f"[{type(self).__name__}] is_weighted must be True, False or None; got {is_weighted!r}.")
        super().__init__(tables, device=device, seed=seed, name=name, output_dtype=output_dtype)
        self._is_weighted = is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        """Look up the rows of every bag and pool them: [samples, columns], each feature's columns under its name."""
        features = features_of(type(self).__name__, features)
        values, offsets = features.values(), features.offsets()
        weights = None if self._is_weighted is False else features.weights_or_none()
        if self._is_weighted and weights is None:
            raise InputError(f"[{type(self).__name__}] is_weighted=True wants weights; the batch has none.")
        lookup, token, columns = self._lookup(features), self._token_now(), sum(self._dims)
        if torch.is_grad_enabled() and (self.training or (weights is not None and weights.requires_grad)):
            out = PooledLookup.apply(self._anchor, token, self._update_token, lookup, values, offsets, weights, columns)  # type: ignore[no-untyped-call]
        else:
            out, _ = ops.lookup(
                lookup.group,
                token,
                lookup.names,
                values,
                offsets,
                weights,
                columns,
                lookup.training,
                False,
                lookup.dtype,
                lookup.counts,
            )
        return KeyedTensor(self._names, self._dims, out)

    def embedding_bag_configs(self) -> list[Table]:
        """The tables' settings."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        """Whether per-sample weights may be used."""
        return self._is_weighted is not False
