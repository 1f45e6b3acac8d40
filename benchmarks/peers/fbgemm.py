"""FBGEMM: static tables in host memory, and the two hash maps it has for pruned tables."""

import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import FBGEMM
from benchmarks.work import TABLES, Batch

if FBGEMM.is_installed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its CPU build tells each module that it lacks
        import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

THREADS = 2


def single_threads() -> ThreadPoolExecutor:
    """Makes two threads without OpenMP workers of their own. Once a process has more OpenMP threads than cores, OpenMP
    stops spinning at barriers, and the single module, which sorts with it, would be 2 ms slower from then on."""
    started = threading.Barrier(THREADS)

    def alone() -> None:
        torch.set_num_threads(1)
        torch.ones(1 << 20).add_(1.0)  # a thread's first parallel loop fixes its number of workers
        started.wait()

    before = torch.get_num_threads()
    threads = ThreadPoolExecutor(THREADS, initializer=alone)
    list(threads.map(lambda _: None, range(THREADS)))
    torch.set_num_threads(before)
    return threads


def fbgemm_module(
    tables: Sequence[tuple[int, int]],
    optimizer: str,
    lr: float,
    eps: float,
    pooled: bool = True,
    buffers: dict[str, Tensor] | None = None,
) -> Any:
    """Returns a module of tables with so many rows and this dim."""
    optimizers = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in tables],
        optimizer=optimizers[optimizer],
        learning_rate=lr,
        eps=eps,
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,  # its fastest; the ids are good
        preallocated_host_buffers=buffers,
    )


class FbgemmBags:
    """One module of eight tables, which is how it is used; its CPU wheel runs it on one thread."""

    name = "fbgemm"

    def __init__(self, rows: int, dim: int, optimizer: str, lr: float, eps: float) -> None:
        self.module = fbgemm_module([(rows, dim)] * TABLES, optimizer, lr, eps)
        self.tables = self.module.split_embedding_weights()

    def load(self, table: int, rows: Tensor) -> None:
        self.tables[table].copy_(rows)

    def lookup(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.module(batch.ids, batch.offsets)

    forward = lookup

    def step(self, batch: Batch, gradient: Tensor) -> None:
        self.module(batch.ids, batch.offsets).backward(gradient)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.tables[table][ids]


class FbgemmPair:
    """Two modules of four tables each, one for each thread, as users could do by hand. Rows and state are `whole`'s."""

    name = "fbgemm x 2"

    def __init__(self, whole: FbgemmBags, rows: int, dim: int, optimizer: str, lr: float, eps: float) -> None:
        tables = TABLES // THREADS
        shared = {"weights": whole.module.weights_host.detach().view(THREADS, -1)}
        if optimizer == "rowwise_adagrad":
            shared["momentum1"] = whole.module.momentum1_host.detach().view(THREADS, -1)
        self.modules = [
            fbgemm_module(
                [(rows, dim)] * tables,
                optimizer,
                lr,
                eps,
                buffers={name: halves[half] for name, halves in shared.items()},
            )
            for half in range(THREADS)
        ]
        self.whole = whole
        self.width = tables * dim
        self.threads = single_threads()

    def load(self, table: int, rows: Tensor) -> None:
        self.whole.load(table, rows)

    def lookup(self, batch: Batch) -> list[Tensor]:
        def half(number: int) -> Tensor:
            with torch.no_grad():
                return self.modules[number](*self._inputs(batch, number))

        return list(self.threads.map(half, range(THREADS)))

    def forward(self, batch: Batch) -> Tensor:
        # Not in the timed lookup: torch's second thread spins for a while after a cat and takes a core from these two.
        return torch.cat(self.lookup(batch), dim=1)

    def step(self, batch: Batch, gradient: Tensor) -> None:
        def half(number: int) -> None:
            mine = gradient[:, number * self.width : (number + 1) * self.width]
            self.modules[number](*self._inputs(batch, number)).backward(mine)

        list(self.threads.map(half, range(THREADS)))

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.whole.rows(table, ids)

    @staticmethod
    def _inputs(batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        bags = TABLES // THREADS * batch.bags
        return batch.ids.view(THREADS, -1)[number], batch.offsets[: bags + 1]


class FbgemmMap:
    """PrunedMapCPU, its map for CPUs. int32 keys only."""

    name = "fbgemm map (int32)"

    def __init__(self, keys: Tensor) -> None:
        self.map = torch.classes.fbgemm.PrunedMapCPU()
        numbers = torch.arange(len(keys), dtype=torch.int32)
        self.map.insert(keys.int(), numbers, torch.tensor([0, len(keys)], dtype=torch.int32), 1)
        self.threads = single_threads()

    def find(self, halves: list[Tensor]) -> list[Tensor]:
        """Runs one half on each thread."""
        return list(self.threads.map(self._find_one, halves))

    def _find_one(self, keys: Tensor) -> Tensor:
        return self.map.lookup(keys, torch.tensor([0, len(keys)], dtype=torch.int32))


class FbgemmPrunedOp:
    """pruned_hashmap_lookup: the linear probe of its GPU path, run on the CPU. int64 keys that are not negative."""

    name = "fbgemm op (int64)"
    load = 0.5  # its inference module's default

    def __init__(self, keys: Tensor) -> None:
        capacity = int(len(keys) / self.load)
        self.slots = torch.full((capacity, 2), -1, dtype=torch.int64)
        self.bounds = torch.tensor([0, capacity])
        offsets = torch.tensor([0, len(keys)])
        torch.ops.fbgemm.pruned_hashmap_insert(keys, torch.arange(len(keys)), offsets, self.slots, self.bounds)
        self.threads = single_threads()

    def find(self, halves: list[Tensor]) -> list[Tensor]:
        return list(self.threads.map(self._find_one, halves))

    def _find_one(self, keys: Tensor) -> Tensor:
        return torch.ops.fbgemm.pruned_hashmap_lookup(keys, torch.tensor([0, len(keys)]), self.slots, self.bounds)
