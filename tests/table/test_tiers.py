"""A table with tiers below its memory is the table that it would be with memory enough."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import assert_same_rows, kjt
from support.sweeps import examples
from support.tiered import (
    KINDS,
    SMALL,
    assert_equal_outputs,
    backward,
    below,
    collection,
    pair,
    skewed_kjt,
    tier,
    train,
)

import shoal
from shoal.storage import MemoryStorage
from shoal.table.host import residency

OPTIMIZERS = [
    shoal.SGD(lr=0.1, momentum=0.9),
    shoal.Adagrad(lr=0.1),
    shoal.RowwiseAdagrad(lr=0.1),
    shoal.Adam(lr=0.1),
    shoal.AdamW(lr=0.1),
    shoal.PartialRowwiseAdam(lr=0.1),
    shoal.Ftrl(lr=0.1),
    shoal.Assign(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_optimizer_trains_the_same_rows(optimizer, dtype, tmp_path):
    plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 7, "optimizer": optimizer, "dtype": dtype}])
    train([plain, tiered], torch.Generator().manual_seed(0), 40)
    assert tier(tiered, 0).demotions > 0 and tier(tiered, 0).promotions > 0
    assert_same_rows(plain, tiered)
    assert plain.stats()["t"].counters == tiered.stats()["t"].counters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["bags", "sequences"])
def test_poolings_modes_and_tables_of_both_kinds(kind, which, tmp_path):
    poolings = ("sum", "mean") if which == "bags" else ("none", "none")
    read, write = shoal.Feature("b", "read"), shoal.Feature("c", "write")
    tables = [
        {"name": "t", "dim": 5, "features": ["a", read], "pooling": poolings[0]},
        {"name": "u", "dim": 3, "features": ["a", write], "pooling": poolings[1], "missing": "zero"},
        {"name": "v", "dim": 4, "features": ["b"], "pooling": poolings[1], "tiers": [shoal.Dram()]},
    ]
    plain, tiered = pair(kind, tmp_path, tables, which=which)
    train([plain, tiered], torch.Generator().manual_seed(1), 60, ("a", "b", "c"))
    assert tier(tiered, 0, "t").demotions > 0 and tier(tiered, 0, "u").demotions > 0
    assert len(tiered.stats()["v"].tiers) == 1
    assert_same_rows(plain, tiered)


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS))
def test_whatever_is_done_in_any_order(seed, kind, tmp_path_factory):
    plain, tiered = both = pair(kind, tmp_path_factory.mktemp("tiers"), [{"name": "t", "dim": 6}])
    generator = torch.Generator().manual_seed(seed)

    def some_keys(n=40):
        return (torch.rand(n, generator=generator) ** 3 * 2200).long() - 3

    waiting = []
    for step in range(60):
        action = int(torch.randint(0, 9, (1,), generator=generator))
        if action <= 2:
            train(both, generator, 1, first=step)
        elif action == 3:  # forwards that wait for their backward, or never see one
            batch = skewed_kjt(("t",), generator, bags=8)
            outs = [bags(batch) for bags in both]
            assert_equal_outputs(outs, step)
            waiting.append(outs)
        elif action == 4 and waiting:
            outs = waiting.pop(int(torch.randint(0, len(waiting), (1,), generator=generator)))
            for out in outs:
                if seed % 2:
                    backward(out, step)
        elif action == 5:
            batch = skewed_kjt(("t",), generator)
            with torch.no_grad():
                outs = [bags.eval()(batch) for bags in both]
            assert_equal_outputs(outs, step)
            for bags in both:
                bags.train()
        elif action == 6:
            keys = some_keys()
            assert len({bags.table("t").erase(keys) for bags in both}) == 1
        elif action == 7:
            keys = some_keys()
            rows = torch.randn(len(keys), 6, generator=generator)
            for bags in both:
                bags.table("t").assign(keys, rows)
        else:
            keys = some_keys()
            one, two = (bags.table("t") for bags in both)
            assert len(one) == len(two) and torch.equal(one.contains(keys), two.contains(keys))
            assert torch.equal(one.lookup(keys), two.lookup(keys))
            assert torch.equal(one.scores(keys).nan_to_num(-1), two.scores(keys).nan_to_num(-1))
            assert all(
                torch.equal(a, b) for a, b in zip(one.state(keys).values(), two.state(keys).values(), strict=True)
            )
        if len(waiting) > 2:
            waiting.pop(0)
        out = outs = None  # these would keep the one collection's graph alive and not the other's
        memory = tier(tiered, 0)
        assert memory.bytes <= memory.budget_bytes
    assert torch.equal(plain.table("t").keys(), tiered.table("t").keys())
    assert_same_rows(plain, tiered)


def test_rows_that_did_not_change_are_not_written_again(tmp_path):
    _plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    bags.table("t").assign(torch.arange(2000), torch.randn(2000, 8))
    bags.eval()
    for first in range(0, 2000, 100):  # the last ones to be written leave
        bags(kjt({"t": [list(range(first, first + 100))]}))
    written = tier(bags, 0).demotions
    for _ in range(3):
        for first in range(0, 2000, 100):
            bags(kjt({"t": [list(range(first, first + 100))]}))
    assert tier(bags, 0).demotions == written
    assert tier(bags, 0).promotions > 5000 and tier(bags, 0).dirty == 0


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
@pytest.mark.parametrize("ahead", [False, True])
def test_demotions_are_the_rows_that_were_written_below(ahead, monkeypatch):
    written = []

    class Counting(MemoryStorage):
        def write(self, keys, rows):
            if len(written) == 30:
                written.append(0)
                raise ConnectionError("once")
            super().write(keys, rows)
            written.append(len(keys))

    monkeypatch.setattr(residency, "_WRITE_BYTES", 400)  # so that a part was written when it fails
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), Counting])
    generator = torch.Generator().manual_seed(0)
    some = [skewed_kjt(("t",), generator) for _ in range(60)]
    for batch in shoal.prefetch(some, bags) if ahead else some:
        with suppress(ConnectionError):
            bags(batch).values().sum().backward()
    assert len(written) > 31 and tier(bags, 0).demotions == sum(written)


def test_what_was_used_lately_stays(tmp_path):
    """Of keys that come in every batch none is read again, whatever else passes through memory."""
    for training in (True, False):
        bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), below("memory", tmp_path)])
        often = list(range(50))
        bags.table("t").assign(torch.arange(4200), torch.randn(4200, 8))
        bags.train(training)
        for step in range(200):
            before = tier(bags, 1).hits
            seldom = list(range(100 + 20 * step, 120 + 20 * step))
            out = bags(kjt({"t": [often, seldom]}))
            if training:
                backward(out, step)
            if step > 100:
                assert tier(bags, 1).hits - before == 20


def test_an_ssd_alone_works_in_a_little_memory(tmp_path):
    plain, bags = collection([{"name": "t", "dim": 8}]), collection([{"name": "t", "dim": 8}], [below("ssd", tmp_path)])
    train([plain, bags], torch.Generator().manual_seed(0), 10)
    assert_same_rows(plain, bags)
