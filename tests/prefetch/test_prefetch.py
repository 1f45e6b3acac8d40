"""With prefetch and without it a run is the same, bit for bit."""

import threading
import time

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import nothing_is_staged
from support.prefetching import TABLE, backward, batches, is_quiet, spilling, train
from support.tiered import assert_equal_outputs, below, collection, fetched_by_lookups, skewed_kjt

import shoal
from shoal.storage import MemoryStorage

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("kind", ["ssd", "memory"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_run_is_the_same_and_finds_its_rows_in_memory(kind, depth, tmp_path):
    # Room for the batches that are on their way, with some to spare, and not for the table.
    plain, ahead = collection([TABLE]), spilling(kind, tmp_path, "160KiB")
    wanted = train(plain, batches(60))
    got = train(ahead, shoal.prefetch(batches(60), ahead, depth=depth))
    assert ahead.stats()["t"].tiers[0].demotions > 0
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert plain.stats()["t"].counters == ahead.stats()["t"].counters
    assert fetched_by_lookups(ahead) == 0  # no lookup had to fetch
    assert is_quiet() and nothing_is_staged(ahead)


def test_what_happens_between_staging_and_forward(tmp_path):
    """Erase, assign, load: the lookup sees the rows as they are then."""
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path, "40KiB")

    def meddler(bags):
        def act(step):
            table, generator = bags.table("t"), torch.Generator().manual_seed(step)
            if step % 3 == 0:
                table.erase((torch.rand(60, generator=generator) ** 3 * 2000).long())
            if step % 4 == 1:
                keys = (torch.rand(60, generator=generator) ** 3 * 2000).long()
                table.assign(keys, torch.randn(60, 8, generator=generator))
            if step == 25:
                bags.load_state_dict(bags.state_dict())
            if step % 5 == 2:  # a forward of another batch, without a backward
                bags(skewed_kjt(("t",), generator, bags=6))

        return act

    wanted = train(plain, batches(50), meddler(plain))
    got = train(ahead, shoal.prefetch(batches(50), ahead, depth=3), meddler(ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_the_same_batch_again_and_batches_that_are_not_looked_up(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    some = batches(10)
    loader = [some[n % 3 if n % 4 else n % 10] for n in range(40)]
    for step, (one, two) in enumerate(zip(loader, shoal.prefetch(loader, ahead), strict=True)):
        if step % 6 == 5:
            continue
        outs = [plain(one), ahead(two)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)
    assert nothing_is_staged(ahead)


def test_more_batches_ahead_than_memory_holds(tmp_path):
    """It waits until rows of the batches before may leave."""
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path, "40KiB")
    wide = {"bags": 60, "keys": 100_000}
    wanted = train(plain, batches(25, **wide))
    got = train(ahead, shoal.prefetch(batches(25, **wide), ahead, depth=20))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_graphs_that_are_kept_hold_their_rows_and_later_lookups_do_without_memory(tmp_path):
    plain, ahead = collection([TABLE]), spilling("memory", tmp_path)
    some = batches(50, bags=40, keys=10**6)
    kept = [plain(batch).values() for batch in some], []
    for batch in shoal.prefetch(some, ahead):
        kept[1].append(ahead(batch).values())
    for step, outs in enumerate(zip(*kept, strict=True)):
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.ones_like(out) * step)
    assert_same_rows(plain, ahead)
    train(ahead, shoal.prefetch(batches(5), ahead))


def test_a_batch_too_large_for_memory_is_not_read_ahead(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    large = kjt({"t": [list(range(5000))]})
    for step in range(3):
        outs = [plain(large)]
        for batch in shoal.prefetch([large], ahead):
            assert ahead.stats()["t"].tiers[1].ahead_bytes == 0
            outs.append(ahead(batch))
        assert torch.equal(*(out.values() for out in outs))
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)
    assert nothing_is_staged(ahead)


def test_births_ask_a_storage_once(tmp_path):
    """What a storage of one's own does not have is known from staging: the lookup does not ask again."""
    asked = []

    class Remote(MemoryStorage):
        def read(self, keys):
            asked.append((threading.current_thread().name, len(keys)))
            time.sleep(0.001)
            return super().read(keys)

    ahead = collection([TABLE], [shoal.Dram("1MiB"), Remote])
    train(ahead, shoal.prefetch(batches(30), ahead))
    from_loop = [n for name, n in asked if not name.startswith("shoal-prefetch")]
    assert sum(n for _, n in asked) > 500 and not from_loop


def test_eval_is_staged_too(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    for bags in (plain, ahead):
        train(bags, batches(40))
        bags.eval()
    before = fetched_by_lookups(ahead)
    with torch.no_grad():
        for one, two in zip(batches(40, seed=1), shoal.prefetch(batches(40, seed=1), ahead), strict=True):
            assert_equal_outputs([plain(one), ahead(two)])
    assert before and fetched_by_lookups(ahead) == before
    assert_same_rows(plain, ahead)


def test_features_are_found_in_the_batch_for_several_collections(tmp_path):
    tables = [{"name": "u", "dim": 4, "features": ["t"]}]
    one = spilling("ssd", tmp_path, "64KiB")
    two = collection(tables, [shoal.Dram("32KiB"), below("memory", tmp_path)])
    loader = [{"both": batch, "other": other} for batch, other in zip(batches(20), batches(20, seed=1), strict=True)]
    finders = [lambda batch: batch["both"], lambda batch: (batch["both"], batch["other"])]
    for number, features in enumerate(finders):
        for step, batch in enumerate(shoal.prefetch(loader, [one, two], features=features)):
            assert batch is loader[step]
            backward(one(batch["both"]), step)
            backward(two(batch["other" if number else "both"]), step)
    assert fetched_by_lookups(one) == fetched_by_lookups(two) == 0


def test_tables_that_are_all_in_memory_are_left_alone():
    bags = collection([TABLE])
    assert bags.stage(batches(1)[0]) is None
    train(bags, shoal.prefetch(batches(5), bags))


def test_keys_that_the_loop_changes_on_the_way_are_looked_up_as_they_are_then(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    for step, (one, two) in enumerate(zip(batches(30), shoal.prefetch(batches(30), ahead), strict=True)):
        for batch in (one, two):
            batch.values().numpy()[::3] += 1  # torch does not hear of it
        outs = [plain(one), ahead(two)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)


def test_batches_that_share_their_values_and_not_their_bags(tmp_path):
    plain, ahead = (
        collection([TABLE, {"name": "u", "dim": 4}], tiers)
        for tiers in (None, [shoal.Dram("64KiB"), below("ssd", tmp_path)])
    )
    values = torch.arange(12)
    one, two = (
        shoal.KeyedJaggedTensor(["t", "u"], values, lengths=torch.tensor(lengths))
        for lengths in ([4, 4, 2, 2], [2, 2, 4, 4])
    )
    for _ in range(2):
        staging = ahead.stage(one)
        staging.read()
        staging.place(lambda: False)
        outs = [plain(two), ahead(two)]
        assert_equal_outputs(outs)
        for out in outs:
            backward(out, 0)
    assert_same_rows(plain, ahead)


def test_a_storage_is_not_asked_for_nothing():
    asked = []

    class Counting(MemoryStorage):
        def read(self, keys):
            asked.append(len(keys))
            return super().read(keys)

    tables = [TABLE, {**TABLE, "name": "u"}]
    bags = collection(tables, [shoal.Dram("1MiB"), Counting])
    some = [kjt({"t": [range(10)], "u": [range(5)]}) for _ in range(8)]
    train(bags, shoal.prefetch(some, bags, depth=4))
    assert asked and min(asked) > 0
