"""A table whose batches are staged, its equal that is all in memory, and loops over the same batches."""

import threading

import torch

import shoal
from support.tiered import SMALL, backward, below, collection, skewed_kjt

TABLE = {"name": "t", "dim": 8, "optimizer": shoal.Adam(lr=0.1)}


def batches(n, seed=0, **settings):
    """Returns n batches of one feature; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [skewed_kjt(("t",), generator, **settings) for _ in range(n)]


def train(bags, loader, act=lambda _step: None):
    """Trains on every batch, each with a gradient of its own, and returns the outputs. `act` is called before each."""
    outs = []
    for step, batch in enumerate(loader):
        act(step)
        out = bags(batch)
        outs.append(out.values().detach())
        backward(out, step)
    return outs


def spilling(kind, folder, memory=SMALL):
    """Returns a collection whose rows spill out of memory into that kind of storage."""
    return collection([TABLE], [shoal.Dram(memory), below(kind, folder)])


def is_quiet():
    """Returns whether the threads of all loops that were left end; a loop leaves some before they have."""
    left = [one for one in threading.enumerate() if one.name.startswith("shoal-prefetch-") and "table" not in one.name]
    for thread in left:
        thread.join(60)
    return not any(thread.is_alive() for thread in left)


class Stages:
    """Stages a batch, or raises."""

    device = torch.device("cpu")
    waits = in_loop = False

    def __init__(self, error=None, at=None):
        self.error, self.at = error, at
        self.staged = self.released = 0

    def move_here(self, _features):
        return None

    def stage(self, _features):
        if self.at == "stage":
            raise self.error
        self.staged += 1
        return self

    def expect(self):
        pass

    def read(self):
        if self.at == "read":
            raise self.error

    def place(self, _may_wait):
        pass

    def release(self):
        self.released += 1
