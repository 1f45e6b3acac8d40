"""Batches like those of production: forty tables of very different sizes, three dims, ragged bags, skewed ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.work import keys_of

TABLES = 40
DIMS = (16, 48, 96)
EXPONENTS = (1.1, 1.2, 1.4)
SIZES = (512, 4096)
LONGEST_BAGS = (1, 1, 5, 20, 60)  # ids; a bag has from none up to so many, and exactly one where the most is one


@dataclass(frozen=True)
class Tables:
    """Rows and dims of the tables, and the longest bag of each."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    longest: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [f"t{table}" for table in range(len(self.rows))]

    def values(self, table: int) -> Tensor:
        """The rows a table starts with."""
        generator = torch.Generator().manual_seed(table)
        return torch.empty(self.rows[table], self.dims[table]).uniform_(-0.1, 0.1, generator=generator)


def tables(most_rows: int) -> Tables:
    """Returns tables of 100 rows (fewer if the largest has fewer) to `most_rows`, in equal ratios and random order."""
    low = min(100, most_rows)
    sizes = np.geomspace(low, most_rows, TABLES).astype(np.int64)
    order = np.random.default_rng(5).permutation(TABLES)
    rows = tuple(int(sizes[at]) for at in order)
    dims = tuple(DIMS[table % len(DIMS)] for table in range(TABLES))
    longest = tuple(LONGEST_BAGS[table % len(LONGEST_BAGS)] for table in range(TABLES))
    return Tables(rows, dims, longest)


@dataclass(frozen=True)
class Batch:
    """One batch, table by table. Peers index arrays by `ids`; ours looks up `keys`."""

    ids: Tensor
    keys: Tensor
    lengths: Tensor  # [tables x size]
    size: int

    @cached_property
    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @cached_property
    def bounds(self) -> list[int]:
        """Returns the place where each table's ids begin, and the end."""
        return self.offsets[:: self.size].tolist()

    def of_table(self, table: int) -> Tensor:
        return self.ids[self.bounds[table] : self.bounds[table + 1]]

    def bags_of(self, table: int) -> Tensor:
        """Returns the places where its bags begin in `of_table`."""
        return self.offsets[table * self.size : (table + 1) * self.size] - self.bounds[table]

    def of_tables(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns ids and offsets of some tables, as FBGEMM takes them."""
        lengths = torch.cat([self.lengths[table * self.size : (table + 1) * self.size] for table in chosen])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return torch.cat([self.of_table(table) for table in chosen]), offsets


def batches(of: Tables, exponent: float, size: int, count: int) -> list[Batch]:
    made = []
    shares = [np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent) for rows in of.rows]
    for number in range(count):
        random = np.random.default_rng(number)
        ids, keys, lengths = [], [], []
        for table, (rows, longest) in enumerate(zip(of.rows, of.longest, strict=True)):
            counts = np.full(size, 1) if longest == 1 else random.integers(0, longest + 1, size)
            drawn = random.random(int(counts.sum())) * shares[table][-1]
            mine = torch.from_numpy(np.searchsorted(shares[table], drawn).clip(max=rows - 1))
            ids.append(mine)
            keys.append(keys_of(mine, stream=table))
            lengths.append(torch.from_numpy(counts))
        made.append(Batch(torch.cat(ids), torch.cat(keys), torch.cat(lengths), size))
    return made


def gradient(of: Tables, size: int) -> Tensor:
    """Returns the gradient of the whole pooled output. [size, sum of dims]"""
    return torch.randn(size, sum(of.dims), generator=torch.Generator().manual_seed(7))
