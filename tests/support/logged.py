"""Collections that are committed to logs, for tests."""

import torch

import shoal
from support.batches import train_step
from support.tiered import SMALL, below, skewed_kjt

FEATURES = ("a", "b", "c")


def tables(tiers=None):
    """Tables of several widths, types and optimizers."""
    return [
        shoal.Table("a", 5, tiers=tiers, optimizer=shoal.RowwiseAdagrad(lr=0.1)),
        shoal.Table("b", 16, tiers=tiers, optimizer=shoal.Adam(lr=0.01), dtype="bfloat16", pooling="mean"),
        shoal.Table("c", 3, tiers=tiers, optimizer=shoal.SGD(lr=0.1, momentum=0.9), dtype="float16"),
    ]


def made(kind="memory", folder=None, seed=3):
    """A collection of them in memory, or with most rows below a small one."""
    tiers = None if kind == "memory" else [shoal.Dram(SMALL), below("ssd", str(folder))]
    return shoal.EmbeddingBagCollection(tables(tiers), seed=seed)


def batch(step, keys=2000):
    """The same batch for a step, in every process."""
    return skewed_kjt(FEATURES, torch.Generator().manual_seed(step), keys=keys)


def train(bags, steps, keys=2000):
    """Some steps, each with a batch and a gradient of its own."""
    for step in steps:
        train_step(bags, batch(step, keys), seed=step)


def rows_of(bags):
    """What tables hold, to be compared bit for bit."""
    return {name: value.clone() for name, value in bags.state_dict().items()}


def assert_rows(bags, wanted):
    """The tables hold that."""
    found = bags.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(value, found[name]), (name, value.shape, found[name].shape)


def recovered(path, kind="memory", folder=None):
    """A collection as a log has it, and the commit."""
    bags = made(kind, folder)
    return bags, shoal.recover(path, bags)
