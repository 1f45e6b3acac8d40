"""Shoal with the methods of the peers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

import shoal
from benchmarks.measure import OURS
from benchmarks.work import TABLES, Batch, chunks, keys_of

NAMES = [f"t{table}" for table in range(TABLES)]


def optimizer_of(name: str, lr: float, eps: float) -> shoal.SGD | shoal.Adam | shoal.RowwiseAdagrad:
    if name == "sgd":
        return shoal.SGD(lr=lr)
    if name == "adam":
        return shoal.Adam(lr=lr, eps=eps)
    return shoal.RowwiseAdagrad(lr=lr, eps=eps)


@contextmanager
def evaluating(bags: torch.nn.Module) -> Iterator[None]:
    """Puts the module into eval mode."""
    bags.eval()
    try:
        yield
    finally:
        bags.train()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of threads of torch and of Shoal."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    shoal.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        shoal.set_num_threads(None)


class ShoalBags:
    """A step includes making the KeyedJaggedTensor, as in training; the peers get their offsets ready."""

    name = OURS

    def __init__(self, dim: int, optimizer: str, lr: float, eps: float) -> None:
        tables = [shoal.Table(name, dim, optimizer=optimizer_of(optimizer, lr, eps)) for name in NAMES]
        self.bags = shoal.EmbeddingBagCollection(tables, device="cpu", seed=0)

    def load(self, table: int, rows: Tensor) -> None:
        """Assigns in small chunks, because assign chooses the order of the rows of one call. So rows lie roughly in the
        order of ids, as in the peers' arrays, and as if they had been born in training, hot ids first."""
        handle = self.bags.table(NAMES[table])
        for ids in chunks(len(rows), 2048):
            handle.assign(keys_of(ids, stream=table), rows[ids[0] : ids[-1] + 1])

    def _features(self, batch: Batch) -> shoal.KeyedJaggedTensor:
        return shoal.KeyedJaggedTensor(keys=NAMES, values=batch.keys, lengths=batch.lengths)

    def lookup(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.bags(self._features(batch)).values()

    forward = lookup

    def step(self, batch: Batch, gradient: Tensor) -> None:
        self.bags(self._features(batch)).values().backward(gradient)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.bags.table(NAMES[table]).lookup(keys_of(ids, stream=table))

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.bags)


class OneTable:
    """A single table of dim 8, as large as asked, for what grows with the number of rows."""

    def __init__(self, rows: int, dim: int = 8) -> None:
        table = shoal.Table("t", dim, optimizer=shoal.RowwiseAdagrad(lr=0.01))
        self.bags = shoal.EmbeddingBagCollection([table], device="cpu", seed=0)
        handle = self.bags.table("t")
        values = torch.zeros(1 << 17, dim)
        for ids in chunks(rows, len(values)):
            handle.assign(keys_of(ids), values[: len(ids)])

    def step(self, keys: Tensor, lengths: Tensor, gradient: Tensor) -> None:
        features = shoal.KeyedJaggedTensor(keys=["t"], values=keys, lengths=lengths)
        self.bags(features).values().backward(gradient)
