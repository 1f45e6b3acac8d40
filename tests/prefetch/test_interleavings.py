"""Any calls during a loop with prefetch, in any order and at any moment: the same bits as with all rows in memory."""

import gc
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import assert_same_rows
from support.inside import nothing_is_staged
from support.sweeps import examples
from support.tiered import assert_equal_outputs, backward, below, collection, skewed_kjt

import shoal
from shoal.storage import MemoryStorage

pytestmark = pytest.mark.threads


class Moody(MemoryStorage):
    """Answers at once, or after a while."""

    def _wait(self):
        if random.random() < 0.3:
            time.sleep(random.random() * 0.004)

    def read(self, keys):
        self._wait()
        answer = super().read(keys)
        self._wait()
        return answer

    def write(self, keys, rows):
        self._wait()
        super().write(keys, rows)
        self._wait()


def drawn(draw, folder):
    """Tables with and without something below, which share features or not; and the names of all features."""
    tables, memory = [], draw.choice(["24KiB", "40KiB", "160KiB"])
    features = ["a", "b", "c"]
    for number in range(draw.randint(1, 3)):
        kind = draw.choice(["ssd", "memory", "moody", "moody", "all in memory"])
        lowest = Moody if kind == "moody" else None if kind == "all in memory" else below(kind, folder)
        modes = [draw.choice(["train", "train", "read", "write"]) for _ in features]
        named = [shoal.Feature(name, mode=mode) for name, mode in zip(features, modes, strict=True)]
        few = draw.sample(named, draw.randint(1, 3))
        tables.append(
            {
                "name": f"t{number}",
                "dim": draw.choice([1, 6]),
                "features": few,
                "optimizer": draw.choice([shoal.Adam(lr=0.1), shoal.RowwiseAdagrad(lr=0.1)]),
                "tiers": [shoal.Dram(memory), lowest] if lowest else None,
            }
        )
    used = sorted({feature.name for table in tables for feature in table["features"]})
    return tables, used


def backwards(outs, step):
    for out in outs:
        backward(out, step)


@settings(max_examples=examples(12))
@given(seed=st.integers(0, 2**31), depth=st.sampled_from([1, 2, 3, 8]))
def test_whatever_is_done_beside_a_loop(seed, depth, tmp_path_factory):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tables, features = drawn(draw, tmp_path_factory.mktemp("below"))
    which = draw.choice(["bags", "each"])
    if which == "each":
        tables = [{**table, "pooling": "none"} for table in tables]
    plain = collection([{**table, "tiers": None} for table in tables], which=which)
    tiered = collection(tables, which=which)
    both, names, waiting = (plain, tiered), [table["name"] for table in tables], []

    def some_keys(n=30):
        return (torch.rand(n, generator=generator) ** 3 * 2200).long() - 3

    def wait_for_a_backward(step):
        batch = skewed_kjt(features, generator, bags=4)
        outs = [bags(batch) for bags in both]
        assert_equal_outputs(outs, step)
        waiting.append(outs)

    def end_a_wait(step):
        if waiting:
            outs = waiting.pop(draw.randrange(len(waiting)))
            if draw.random() < 0.7:
                backwards(outs, step)

    def evaluate(step):
        batch = skewed_kjt(features, generator, bags=6)
        with torch.no_grad():
            assert_equal_outputs([bags.eval()(batch) for bags in both], step)
        for bags in both:
            bags.train()

    def erase(_step):
        keys, name = some_keys(), draw.choice(names)
        assert len({bags.table(name).erase(keys) for bags in both}) == 1

    def assign(_step):
        keys, name = some_keys(), draw.choice(names)
        rows = torch.randn(len(keys), plain.table(name).lookup(keys).shape[1], generator=generator)
        for bags in both:
            bags.table(name).assign(keys, rows)

    def look(_step):
        keys, name = some_keys(), draw.choice(names)
        one, two = (bags.table(name) for bags in both)
        assert len(one) == len(two) and torch.equal(one.contains(keys), two.contains(keys))
        assert torch.equal(one.lookup(keys), two.lookup(keys))

    def load(_step):
        if draw.random() < 0.3:
            waiting.clear()  # a load forgets forwards
            for bags in both:
                bags.load_state_dict(bags.state_dict())

    actions = [wait_for_a_backward, end_a_wait, evaluate, erase, assign, look, load, lambda _step: gc.collect()]
    is_over = threading.Event()
    failed = []

    def read_beside():
        """Others look rows up meanwhile, which comes between any two moments of the loop."""
        keys = torch.arange(0, 2000, 40)
        try:
            while not is_over.wait(0.003):
                tiered.table(names[0]).lookup(keys)
                tiered.stats()
        except BaseException as error:
            failed.append(error)

    beside = threading.Thread(target=read_beside)
    beside.start()
    step = 0
    try:
        for _pass in range(draw.randint(1, 3)):
            loader = [skewed_kjt(features, generator, bags=draw.randint(1, 24)) for _ in range(draw.randint(0, 14))]
            leave_after = draw.choice([None, None, draw.randint(0, 14)])
            for number, batch in enumerate(shoal.prefetch(iter(loader), tiered, depth=depth)):
                assert batch is loader[number]
                if number == leave_after:
                    break
                step += 1
                for action in draw.choices(actions, k=draw.randint(0, 2)):
                    action(step)
                if draw.random() < 0.9:  # else it is not looked up at all
                    outs = [bags(batch) for bags in both]
                    assert_equal_outputs(outs, step)
                    if draw.random() < 0.9:
                        backwards(outs, step)
                    outs = None
                if len(waiting) > 1:
                    waiting.pop(0)
                for stats in tiered.stats().values():
                    assert all(tier.budget_bytes is None or tier.bytes <= tier.budget_bytes for tier in stats.tiers)
    finally:
        is_over.set()
        beside.join()
    gc.collect()
    assert not failed
    assert_same_rows(plain, tiered)
    assert nothing_is_staged(tiered)
