"""What Shoal replaces: tables of fixed size, into which ids are hashed.

The same rule (rowwise Adagrad, applied in the backward pass), the same first values, no index. Ids that hash to one row
share it, and an id that is new inherits the row, and the small learning rate, of the id that used it before.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import shoal


def mix(ids: Tensor) -> Tensor:
    """Spreads ids over all of int64, so that how they were numbered does not matter (splitmix64's finalizer)."""
    ids = (ids ^ (ids >> 30)) * -0x40A7B892E31B1A47
    ids = (ids ^ (ids >> 27)) * -0x6B2FB644ECCEEE15
    return ids ^ (ids >> 31)


class HashedBags(nn.Module):
    """Mean pooling. `rows` and `features` are by table."""

    def __init__(
        self,
        rows: Mapping[str, int],
        features: Mapping[str, Sequence[str]],
        dim: int,
        lr: float,
        init: float,
        seed: int,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.lr, self.features = lr, features
        self.bags = nn.ModuleDict()
        for table, size in rows.items():
            weight = torch.empty(size, dim).uniform_(-init, init, generator=generator)
            bag = nn.EmbeddingBag(size, dim, mode="mean", sparse=True, include_last_offset=True, _weight=weight)
            bag.register_buffer("squares", torch.zeros(size))
            bag.weight.register_post_accumulate_grad_hook(lambda weight, bag=bag: self._update(weight, bag.squares))
            self.bags[table] = bag

    @staticmethod
    def row_bytes(dim: int) -> int:
        return 4 * dim + 4  # the weights and a sum of squares

    def _update(self, weight: nn.Parameter, squares: Tensor) -> None:
        gradient = weight.grad.coalesce()
        (row,), values = gradient.indices(), gradient.values()
        with torch.no_grad():
            squares[row] += values.square().mean(1)
            weight[row] -= self.lr * values / (squares[row].sqrt() + 1e-8).unsqueeze(1)
        weight.grad = None

    def forward(self, ids: shoal.KeyedJaggedTensor) -> shoal.KeyedTensor:
        pooled = {}
        for table, bag in self.bags.items():
            for feature in self.features[table]:
                jagged = ids[feature]
                row = mix(jagged.values()).remainder(bag.num_embeddings)
                pooled[feature] = bag(row, jagged.offsets())
        return shoal.KeyedTensor(
            keys=list(pooled),
            length_per_key=[v.shape[1] for v in pooled.values()],
            values=torch.cat([*pooled.values()], 1),
        )
