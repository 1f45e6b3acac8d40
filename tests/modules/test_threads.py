"""Eval lookups during training, from any thread: each sees rows between steps, never half of a step."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.batches import kjt, random_kjt
from support.inside import group_of, live_leases_of
from support.tiered import SMALL, below, outputs
from support.tiered import collection as tiered

import shoal
from shoal.table import Batch, Pooled, Request

pytestmark = [pytest.mark.threads, pytest.mark.timeout(600)]

DIM = 64
KEYS = list(range(256))


def collection(**settings):
    # With zero rows and equal gradients, all weights of all rows are equal between steps.
    return shoal.EmbeddingBagCollection(
        [shoal.Table("a", DIM, init=shoal.Zeros(), optimizer=shoal.SGD(lr=1.0), **settings)]
    )


def step(bags, keys=KEYS):
    bags(kjt({"a": [[key] for key in keys]})).values().sum().backward()


def beside_training(readers, write):
    """Run `readers` over and over in threads while `write` runs; raises what any of them raised."""
    done = threading.Event()

    def loop(read):
        times = 0
        while not done.is_set() or times == 0:
            read()
            times += 1
        return times

    with ThreadPoolExecutor(len(readers)) as pool:
        loops = [pool.submit(loop, read) for read in readers]
        try:
            write()
        finally:
            done.set()
        return [loop.result() for loop in loops]


def whole(rows):
    """One value in all of it: no step was seen half."""
    return rows.min() == rows.max()


def test_lookups_see_whole_steps():
    bags = collection()
    step(bags)
    batch = kjt({"a": [[key] for key in KEYS]})
    evaluating = group_of(bags)

    def by_handle():
        assert whole(bags.table("a").lookup(KEYS))

    def by_group():
        keyed = Batch(["a"], batch.values(), batch.offsets())
        out, _ = evaluating.lookup(Request(keyed, Pooled(DIM), torch.float32, False, False))
        assert whole(out)

    def by_state_dict():
        state = bags.state_dict()
        assert whole(state["embedding_bags.a.weight"])
        assert -state["embedding_bags.a.weight"][0, 0] == state["embedding_bags.a.step"]

    beside_training([by_handle, by_group, by_group, by_state_dict], lambda: [step(bags) for _ in range(30)])
    assert bags.table("a").stats().step == 31
    assert torch.equal(bags.table("a").lookup([0]), torch.full((1, DIM), -31.0))


def test_a_module_in_eval_is_looked_up_from_several_threads():
    bags = collection()
    step(bags)
    bags.eval()
    batch = random_kjt(["a"], bags=200, keys=300)
    wanted = bags(batch).values()

    def read():
        assert torch.equal(bags(batch).values(), wanted)

    beside_training([read] * 3, lambda: [read() for _ in range(100)])


def test_weight_gradients_in_eval_from_several_threads():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", DIM, optimizer=None, init=shoal.Constant(0.5))]).eval()

    def read():
        batch = random_kjt(["a"], bags=50, keys=300, weighted=True)
        batch.weights().requires_grad_()
        bags(batch).values().sum().backward()
        assert torch.equal(batch.weights().grad, torch.full_like(batch.weights(), DIM / 2))

    beside_training([read] * 3, lambda: [read() for _ in range(50)])
    assert len(live_leases_of(bags)) <= 4


def test_tables_grow_shrink_and_are_read_at_once():
    bags = collection()
    table = bags.table("a")

    def write():
        for at in range(0, 20_000, 1000):
            step(bags, range(at, at + 1000))
            table.erase(range(at, at + 900))

    def read():
        keys = table.keys()
        assert torch.equal(keys, keys.unique())
        rows = table.lookup(range(0, 20_000, 7))
        assert ((rows == 0) | (rows == -1)).all()
        assert (rows.amin(1) == rows.amax(1)).all()
        assert table.contains(keys).dtype == torch.bool
        assert len(table) >= 0
        assert table.stats().rows >= 0
        repr(bags)

    beside_training([read, read], write)
    assert len(table) == 2000


def test_several_threads_may_assign_and_erase():
    bags = collection()
    table = bags.table("a")
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: [
                    table.assign(range(n * 1000, n * 1000 + 100), torch.full((100, DIM), float(n))),
                    table.erase(range(n * 1000, n * 1000 + 50)),
                ],
                range(8),
            )
        )
    assert len(table) == 400
    for n in range(8):
        assert torch.equal(table.lookup([n * 1000 + 99]), torch.full((1, DIM), float(n)))


def test_training_from_another_thread_than_the_one_that_made_it():
    bags = collection()
    thread = threading.Thread(target=step, args=(bags,))
    thread.start()
    thread.join()
    assert bags.table("a").stats().step == 1


def test_leases_may_end_in_any_thread():
    bags = collection()
    outs = [bags(kjt({"a": [[key]]})) for key in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: outs.pop(), range(20)))
    bags.table("a").erase([0])
    assert group_of(bags).newest_lease is None


@pytest.mark.parametrize("kind", [None, "ssd", "memory"], ids=["in memory", "ssd", "storage"])
@pytest.mark.parametrize("which", ["bags", "sequences"])
def test_lookup_sees_whole_steps_wherever_rows_are(which, kind, tmp_path):
    tiers = None if kind is None else [shoal.Dram(SMALL), below(kind, tmp_path)]
    pooling = {} if which == "bags" else {"pooling": "none"}
    table = {"name": "a", "dim": 4, "init": shoal.Zeros(), "optimizer": shoal.SGD(lr=1.0), **pooling}
    made = tiered([table], tiers, which)
    batch, unseen = kjt({"a": [[key] for key in range(50)]}), kjt({"a": [[2**40], [-1]]})

    def train(one):
        (out,) = outputs(made(one))
        out.sum().backward()

    def read():
        (rows,) = outputs(made.lookup(batch))
        assert whole(rows)
        assert not rows.requires_grad
        (born,) = outputs(made.lookup(unseen))
        assert not born.any()

    def write():
        for at in range(30):
            train(batch)
            train(kjt({"a": [[1000 + 100 * at + key] for key in range(100)]}))  # in memory there is no room for all
            made.eval().train()

    train(batch)
    beside_training([read] * 3, write)
    assert made.training
    assert len(made.table("a")) == 50 + 30 * 100
    assert torch.equal(made.table("a").lookup([0, 49]), torch.full((2, 4), -31.0))
    assert (kind is not None) == (made.stats()["a"].tiers[-1].rows > 0 and len(made.stats()["a"].tiers) == 2)
