"""Calls that tests interrupt, and what must be true afterwards."""

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import BackwardError
from support.batches import random_kjt
from support.inside import live_leases_of, locks_are_free, nothing_is_staged, tables_of
from support.interrupting import instructions_of, interrupted, no_thread_is_left
from support.tiered import below, outputs

FEATURES = ("x", "y", "z")
TABLES = [
    {"name": "a", "dim": 3, "features": ["x", "y"], "optimizer": shoal.SGD(lr=0.1, momentum=0.9)},
    {"name": "b", "dim": 8, "features": ["x"], "optimizer": shoal.Adam(lr=0.01), "dtype": "bfloat16"},
    {"name": "c", "dim": 5, "features": ["z"], "optimizer": shoal.RowwiseAdagrad(lr=0.1), "pooling": "mean"},
]
# Of a call's instructions, so many in a normal run, and all in a thorough one.
SOME = pytest.mark.parametrize("most", [60, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])


def gradients(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator) for tensor in tensors]


def train(bags, batch, seed):
    """A forward and a backward with a gradient of that seed."""
    tensors = outputs(bags(batch))
    torch.autograd.backward(tensors, gradients(tensors, seed))


def made(tables, folder, tiers=None, kind=shoal.EmbeddingBagCollection):
    """A collection that was trained for two steps, with most rows below memory if there are tiers."""
    if tiers is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tiers = [shoal.Dram("16KiB"), below(tiers, str(folder / "rows"))]
    bags = kind([shoal.Table(tiers=tiers, **one) for one in tables], seed=3)
    for seed in range(2):
        train(bags, batch_of(seed, tiers), seed)
    assert tiers is None or all(one.tiers[0].rows < one.rows for one in bags.stats().values() if one.rows > 300)
    return bags


def batch_of(seed, tiers=None):
    """A small batch; with tiers one of more keys than memory has room for, over time."""
    return random_kjt(FEATURES, seed=seed) if tiers is None else random_kjt(FEATURES, 60, 500, seed=seed)


@dataclass
class Case:
    """A call, what it changes, and what is done with that afterwards."""

    bags: Any
    call: Any
    kept: list = field(default_factory=list)  # graphs whose backward may come
    happens_once: bool = False  # a second call is refused
    dense: Any = None  # a module that the call changes, too

    def memory(self):
        """What tables hold."""
        held = {name: value.clone() for name, value in self.bags.state_dict().items()}
        rows = {f"len {name}": torch.tensor(len(table)) for name, table in self.bags.tables().items()}
        dense = (
            {} if self.dense is None else {f"dense {name}": p.clone() for name, p in self.dense.state_dict().items()}
        )
        return held | rows | dense

    def again(self, has_happened):
        """The call once more: it happens, if it did not."""
        if has_happened and self.happens_once:
            with pytest.raises(BackwardError):
                self.call()
        else:
            self.call()

    def go_on(self):
        """Train on."""
        self.kept.clear()
        for seed in (5, 6):
            train(self.bags, random_kjt(FEATURES, seed=seed), seed)


def is_same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def assert_sound(case, where):
    """No slot, lease, pin or lock is lost."""
    gc.collect()
    assert locks_are_free(case.bags), where
    assert not live_leases_of(case.bags), where
    assert nothing_is_staged(case.bags), where
    for table in tables_of(case.bags):
        assert len(table) == len(table.keys()), where
        assert table.storage.native.live == len(table.index), where
        assert not table.has_limbo, where
        assert table.pins(staged=True).count == 0, where


def sweep(make, folder, most, may_be_empty=False, error=KeyboardInterrupt):
    """Interrupt the call of the cases that `make` makes."""
    wanted = make(folder / "wanted")
    before = wanted.memory()
    wanted.call()
    after = wanted.memory()
    wanted.go_on()
    end = wanted.memory()
    assert not is_same(before, after)
    gc.collect()
    gc.freeze()  # what is there by now is not looked at again each time
    outcomes = set()
    for number, instruction in enumerate(instructions_of(make(folder / "counted").call, most)):
        with no_thread_is_left():
            case = make(folder / str(number))
            where, notes = interrupted(case.call, instruction, error) or ("nowhere", "")
            now = case.memory()
            has_happened = is_same(now, after)
            is_empty = may_be_empty and "are empty now" in notes and not sum(map(len, case.bags.tables().values()))
            assert not is_empty or all(torch.equal(now[name], before[name]) for name in now if "dense" in name), where
            assert has_happened or is_empty or is_same(now, before), (where, notes)
            outcomes.add(has_happened)
            case.again(has_happened)
            assert is_same(case.memory(), after), where
            case.go_on()
            assert is_same(case.memory(), end), where
            assert_sound(case, where)
            case = now = None
    gc.unfreeze()
    assert outcomes == {False, True}
