"""A small DLRM (Naumov et al. 2019): the model of the demo, and the batch it eats.

It takes any module that turns a KeyedJaggedTensor into a KeyedTensor, so the same dense part runs on Shoal's tables and
on the hashed ones they are compared with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

import shoal


@dataclass(frozen=True)
class Batch:
    labels: Tensor  # float32 [batch], 0 or 1
    dense: Tensor  # float32 [batch, source.dense]
    ids: shoal.KeyedJaggedTensor
    time: float  # when it happened, in the source's time_unit


class Source(Protocol):
    """Batches in the order they happened. Iterating twice gives the same batches twice."""

    title: str
    tables: Mapping[str, Sequence[str]]  # table -> the features that look rows up in it
    dense: int  # how many dense features
    steps: int  # how many batches
    forget_after: int  # steps after which an id that was not seen again may be forgotten
    time_unit: str

    def __iter__(self) -> Iterator[Batch]: ...


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """Logit of a click: bottom MLP on the dense features, pairwise dots of everything, top MLP."""

    def __init__(self, bags: nn.Module, features: int, dense: int, dim: int) -> None:
        super().__init__()
        self.bags = bags
        self.features, self.dim = features, dim
        self.bottom = mlp(dense, 64, dim)
        vectors = features + 1
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        self.top = nn.Sequential(mlp(dim + len(first), 64, 32), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        dense = self.bottom(batch.dense)  # [batch, dim]
        rows = self.bags(batch.ids).values().view(-1, self.features, self.dim)
        vectors = torch.cat([dense.unsqueeze(1), rows], dim=1)  # [batch, features + 1, dim]
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, dots[:, self.pairs]], dim=1)).squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """What a dense optimizer updates: the rows are updated in the backward pass, by their table."""
        return [*self.bottom.parameters(), *self.top.parameters()]
