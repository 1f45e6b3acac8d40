"""The same tables in host memory and in device memory. Without a GPU, Triton's interpreter runs their kernels."""

from dataclasses import dataclass

import torch

import shoal
from support.device_tables import DEVICE


@dataclass(frozen=True)
class Backend:
    """Where a test's tables are."""

    name: str
    tier: type  # of memory
    device: str
    small: str  # memory for some ten rows of a few dims

    def table(self, name="t", dim=4, size=None, lower=(), **settings):
        """A table in this memory, of a size if it is to be small, above the `lower` tiers."""
        return shoal.Table(name, dim, tiers=[self.tier(size), *lower], **settings)

    def bags(self, *tables, **settings):
        """A collection of tables."""
        return shoal.EmbeddingBagCollection(list(tables), device=self.device, seed=3, **settings)

    def batch(self, *bags, name="t"):
        """A batch of one feature, from the keys of each bag."""
        values = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
        lengths = torch.tensor([len(bag) for bag in bags])
        return shoal.KeyedJaggedTensor([name], values.to(self.device), lengths=lengths.to(self.device))

    def keys(self, *keys):
        """Keys where the tables are."""
        return torch.tensor(keys, dtype=torch.int64, device=self.device)

    def rows(self, *values, dim=4):
        """Rows, each of one value."""
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None].expand(-1, dim).contiguous()

    def train(self, bags, *keys):
        """One step of a batch with one bag for each tuple of keys."""
        bags(self.batch(*keys)).values().sum().backward()


HOST = Backend("host", shoal.Dram, "cpu", "3KiB")
ON_DEVICE = Backend("device", shoal.Hbm, DEVICE, "2KiB")
