"""Tables of different sizes and dims, pooled by sum or as sequences: FBGEMM, torch, and ours, with the same methods."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import shoal
from benchmarks.measure import OURS
from benchmarks.ours import evaluating, optimizer_of
from benchmarks.peers.fbgemm import THREADS, fbgemm_module, single_threads
from benchmarks.peers.torch_bag import torch_optimizer
from benchmarks.ragged import Batch, Tables
from benchmarks.work import chunks, keys_of


class FbgemmTables:
    """One module of all tables; for sequences one of each dim, as its tables have one there."""

    name = "fbgemm"

    def __init__(self, of: Tables, optimizer: str, lr: float, eps: float, pooled: bool) -> None:
        self.of, self.pooled = of, pooled
        numbers = range(len(of.rows))
        self.groups = (
            [list(numbers)] if pooled else [[n for n in numbers if of.dims[n] == dim] for dim in sorted({*of.dims})]
        )
        self.modules = [_module(of, group, optimizer, lr, eps, pooled) for group in self.groups]
        self.weights: dict[int, Tensor] = {}
        for group, module in zip(self.groups, self.modules, strict=True):
            self.weights |= dict(zip(group, module.split_embedding_weights(), strict=True))

    def load(self, table: int, rows: Tensor) -> None:
        self.weights[table].copy_(rows)

    def inputs(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Returns the inputs of the modules; made before the clock runs."""
        if self.pooled:
            return [(batch.ids, batch.offsets)]
        return [batch.of_tables(group) for group in self.groups]

    def lookup(self, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        with torch.no_grad():
            return [module(*one) for module, one in zip(self.modules, inputs, strict=True)]

    def step(self, inputs: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor]) -> None:
        for module, one, gradient in zip(self.modules, inputs, gradients, strict=True):
            module(*one).backward(gradient)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.weights[table][ids]


def _module(of: Tables, group: Sequence[int], optimizer: str, lr: float, eps: float, pooled: bool) -> Any:
    return fbgemm_module([(of.rows[n], of.dims[n]) for n in group], optimizer, lr, eps, pooled)


class FbgemmHalves:
    """Two modules with half of the ids each, one for each thread, as users could do by hand. It has rows of its own."""

    name = "fbgemm x 2"

    def __init__(self, of: Tables, optimizer: str, lr: float, eps: float) -> None:
        ids = [longest if longest == 1 else longest / 2 for longest in of.longest]
        work = sorted(range(len(ids)), key=lambda n: -ids[n] * (of.dims[n] + 32))
        self.halves: list[list[int]] = [[], []]
        for n in work:  # each table goes to the half with less work
            min(self.halves, key=lambda half: sum(ids[one] * (of.dims[one] + 32) for one in half)).append(n)
        self.modules = [_module(of, half, optimizer, lr, eps, True) for half in self.halves]
        self.weights: dict[int, Tensor] = {}
        for half, module in zip(self.halves, self.modules, strict=True):
            self.weights |= dict(zip(half, module.split_embedding_weights(), strict=True))
        columns = torch.tensor([0, *of.dims]).cumsum(0).tolist()
        self.columns = [torch.cat([torch.arange(columns[n], columns[n + 1]) for n in half]) for half in self.halves]
        self.threads = single_threads()

    def load(self, table: int, rows: Tensor) -> None:
        self.weights[table].copy_(rows)

    def inputs(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return [batch.of_tables(half) for half in self.halves]

    def lookup(self, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        def half(number: int) -> Tensor:
            with torch.no_grad():
                return self.modules[number](*inputs[number])

        return list(self.threads.map(half, range(THREADS)))

    def gradients(self, gradient: Tensor) -> list[Tensor]:
        return [gradient[:, columns].contiguous() for columns in self.columns]

    def step(self, inputs: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor]) -> None:
        list(self.threads.map(lambda n: self.modules[n](*inputs[n]).backward(gradients[n]), range(THREADS)))

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.weights[table][ids]


class TorchTables:
    """nn.EmbeddingBag(sparse=True), or nn.Embedding for sequences, one a table, and a torch optimizer."""

    name = "torch"

    def __init__(self, of: Tables, optimizer: str, lr: float, eps: float, pooled: bool) -> None:
        self.of, self.pooled = of, pooled
        made = []
        for rows, dim in zip(of.rows, of.dims, strict=True):
            weight = torch.empty(rows, dim)
            made.append(
                torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight)
                if pooled
                else torch.nn.Embedding(rows, dim, sparse=True, _weight=weight)
            )
        self.bags = made
        self.optimizer = torch_optimizer([one.weight for one in made], optimizer, lr, eps)

    def load(self, table: int, rows: Tensor) -> None:
        self.bags[table].weight.data.copy_(rows)

    def inputs(self, batch: Batch) -> list[tuple[Tensor, ...]]:
        numbers = range(len(self.bags))
        return [(batch.of_table(n), batch.bags_of(n)) if self.pooled else (batch.of_table(n),) for n in numbers]

    def lookup(self, inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        with torch.no_grad():
            return [bag(*one) for bag, one in zip(self.bags, inputs, strict=True)]

    def step(self, inputs: list[tuple[Tensor, ...]], gradients: Sequence[Tensor]) -> None:
        torch.autograd.backward([bag(*one) for bag, one in zip(self.bags, inputs, strict=True)], list(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.bags[table].weight.detach()[ids]


class ShoalTables:
    """A step includes making the KeyedJaggedTensor, as in training; the peers get their inputs ready."""

    name = OURS

    def __init__(self, of: Tables, optimizer: str, lr: float, eps: float, pooled: bool) -> None:
        self.of, self.pooled = of, pooled
        pooling = "sum" if pooled else "none"
        tables = [
            shoal.Table(name, dim, pooling=pooling, optimizer=optimizer_of(optimizer, lr, eps))
            for name, dim in zip(of.names, of.dims, strict=True)
        ]
        kind = shoal.EmbeddingBagCollection if pooled else shoal.EmbeddingCollection
        self.bags = kind(tables, device="cpu", seed=0)

    def load(self, table: int, rows: Tensor) -> None:
        handle = self.bags.table(self.of.names[table])
        for ids in chunks(len(rows), 2048):
            handle.assign(keys_of(ids, stream=table), rows[ids[0] : ids[-1] + 1])

    def inputs(self, batch: Batch) -> Batch:
        return batch

    def _outputs(self, batch: Batch) -> list[Tensor]:
        features = shoal.KeyedJaggedTensor(keys=self.of.names, values=batch.keys, lengths=batch.lengths)
        if self.pooled:
            return [self.bags(features).values()]
        return [one.values() for one in self.bags(features).values()]

    def lookup(self, batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return self._outputs(batch)

    def step(self, batch: Batch, gradients: Sequence[Tensor]) -> None:
        torch.autograd.backward(self._outputs(batch), list(gradients))

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.bags.table(self.of.names[table]).lookup(keys_of(ids, stream=table))

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.bags)
