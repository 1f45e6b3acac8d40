"""PyTorch's own: eight nn.EmbeddingBag(sparse=True) and a torch optimizer."""

import torch
from torch import Tensor

from benchmarks.work import TABLES, Batch


def torch_optimizer(weights: list[Tensor], optimizer: str, lr: float, eps: float) -> torch.optim.Optimizer:
    """Returns torch's optimizer for tables with sparse gradients."""
    if optimizer == "sgd":
        return torch.optim.SGD(weights, lr=lr)
    if optimizer == "adam":
        return torch.optim.SparseAdam(weights, lr=lr, eps=eps)
    return torch.optim.Adagrad(weights, lr=lr, eps=eps)  # torch has no rowwise one; this is the nearest


class TorchBags:
    name = "torch"

    def __init__(self, rows: int, dim: int, optimizer: str, lr: float, eps: float) -> None:
        empty = [torch.empty(rows, dim) for _ in range(TABLES)]
        self.bags = [torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=one) for one in empty]
        self.optimizer = torch_optimizer([bag.weight for bag in self.bags], optimizer, lr, eps)
        self.dim = dim

    def load(self, table: int, rows: Tensor) -> None:
        self.bags[table].weight.data.copy_(rows)

    def _outputs(self, batch: Batch) -> list[Tensor]:
        return [bag(batch.of_table(table), batch.bag_offsets) for table, bag in enumerate(self.bags)]

    def lookup(self, batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return self._outputs(batch)

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat(self.lookup(batch), dim=1)

    def step(self, batch: Batch, gradient: Tensor) -> None:
        torch.autograd.backward(self._outputs(batch), list(gradient.split(self.dim, dim=1)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.bags[table].weight.detach()[ids]
