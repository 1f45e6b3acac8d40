"""The work of all contenders: ids, their keys, rows, gradients. It is the same for each, from fixed seeds."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

TABLES = 8
BAG = 20
DISTRIBUTIONS = ("uniform", "zipf")
ZIPF_EXPONENT = 1.05


def keys_of(ids: Tensor, stream: int = 0) -> Tensor:
    """Returns the int64 key of an id: one to one, without order, so that a hash has to work. Streams share no key."""
    mixed = ids.numpy().astype(np.uint64) + np.uint64(stream << 40)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (29, 0xC4CEB9FE1A85EC53)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    return torch.from_numpy(mixed.view(np.int64))


@dataclass(frozen=True)
class Batch:
    """One batch of all tables, table by table. Peers index arrays by `ids`; ours looks up `keys`."""

    ids: Tensor  # [tables x bags x BAG]
    keys: Tensor

    @property
    def bags(self) -> int:
        """The number of bags of each table."""
        return len(self.ids) // (TABLES * BAG)

    @cached_property
    def lengths(self) -> Tensor:
        return torch.full((TABLES * self.bags,), BAG, dtype=torch.int64)

    @cached_property
    def offsets(self) -> Tensor:
        return torch.arange(0, len(self.ids) + 1, BAG)

    @cached_property
    def bag_offsets(self) -> Tensor:
        return torch.arange(0, self.bags * BAG, BAG)

    def of_table(self, table: int) -> Tensor:
        return self.ids.view(TABLES, -1)[table]


def draw(distribution: str, live_rows: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns ids below live_rows. Zipf's ids are ranks: hot rows lie together, the best case for an array."""
    random = np.random.default_rng(seed)
    if distribution == "uniform":
        return torch.from_numpy(random.integers(0, live_rows, shape))
    if distribution == "zipf":
        cumulated = np.cumsum(np.arange(1, live_rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
        ranks = np.searchsorted(cumulated, random.random(shape) * cumulated[-1]).clip(max=live_rows - 1)
        return torch.from_numpy(ranks)
    raise ValueError(f"benchmarks.work.draw: distribution is one of {DISTRIBUTIONS}; got '{distribution}'")


def batches(distribution: str, live_rows: int, bags: int, count: int) -> list[Batch]:
    made = []
    for number in range(count):
        ids = draw(distribution, live_rows, (TABLES, bags * BAG), seed=1000 + number)
        keys = torch.stack([keys_of(ids[table], stream=table) for table in range(TABLES)])
        made.append(Batch(ids.reshape(-1), keys.reshape(-1)))
    return made


def new_keys(number: int, bags: int) -> Batch:
    """Returns a batch whose keys occur once in it, in no other batch of this kind and in no table."""
    per_table = bags * BAG
    ids = torch.arange(number * per_table, (number + 1) * per_table)
    keys = torch.cat([keys_of(ids, stream=TABLES + table) for table in range(TABLES)])
    return Batch(ids.repeat(TABLES), keys)


def rows(table: int, live_rows: int, dim: int) -> Tensor:
    """Returns the first rows of a table. [live_rows, dim]"""
    generator = torch.Generator().manual_seed(table)
    return torch.empty(live_rows, dim).uniform_(-0.1, 0.1, generator=generator)


def gradient(dim: int, bags: int) -> Tensor:
    """Returns the gradient of the whole output. [bags, tables x dim]"""
    return torch.randn(bags, TABLES * dim, generator=torch.Generator().manual_seed(7))


def chunks(total: int, size: int) -> Iterator[Tensor]:
    """Yields 0 to total - 1 in order, at most `size` at a time."""
    for start in range(0, total, size):
        yield torch.arange(start, min(start + size, total))
