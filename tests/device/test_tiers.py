"""Tables in device memory above host memory: to the bit what they are where all of device memory is theirs."""

import copy
import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.batches import kjt, random_kjt
from support.device_pairs import (  # noqa: F401
    EXTREME,
    adam,
    assert_copies_sound,
    assert_same_handles,
    assign_and_erase_between_steps,
    below_of,
    do_anything,
    same,
    slow,
    small_slabs,
    with_tiers,
)
from support.device_pairs import Pair as BasePair
from support.device_tables import DEVICE, in_hbm, train
from support.inside import device_rows_of

import shoal
from shoal import Dram, Feature, Hbm, Table
from shoal.errors import CapacityError
from shoal.index.kernels.buckets import HOLE
from shoal.ops.birth.reference import mix64
from shoal.storage import MemoryStorage
from shoal.table.device import stamps

pytestmark = pytest.mark.usefixtures("small_slabs")


def tiered(table, hbm="3KiB", dram=None):
    return with_tiers(table, [Hbm(hbm), Dram(dram)])


class Pair(BasePair):
    """A collection whose tables are in two tiers, and its equal in one."""

    def __init__(self, *tables, hbm="3KiB", dram=None, alone=(), kind=shoal.EmbeddingBagCollection, **settings):
        two = [in_hbm(table) if table.name in alone else tiered(table, hbm, dram) for table in tables]
        whole = [in_hbm(table) for table in tables]
        made = (kind(tables, device=DEVICE, seed=7, **settings) for tables in (two, whole))
        super().__init__(*made, assert_copies_sound)

    def above(self, name="a"):
        return self.stats(0, name)


# ---- training


@pytest.mark.parametrize(
    "optimizer",
    [
        slow(shoal.SGD(lr=0.1)), slow(shoal.RowwiseAdagrad(lr=0.1, max_norm=0.1)), shoal.Adam(lr=0.1),
        slow(shoal.PartialRowwiseAdam(lr=0.1, weight_decay=0.5)), shoal.Assign(duplicates="last"),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)  # fmt: skip
def test_it_trains_as_with_endless_device_memory(optimizer):
    pair = Pair(Table("a", 4, features=["a", "b"], optimizer=optimizer, init=shoal.Normal(0, 1)), hbm="2KiB")
    for step in range(4):
        pair.step(random_kjt(["a", "b"], bags=8, keys=80, seed=step), seed=step)
    pair.check()
    assert pair.above().promotions > 0 and pair.above().demotions > 0


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, "float32"), (1, "bfloat16"), (33, "float16"), slow(33, "float32"), slow(130, "bfloat16")],
)
def test_rows_of_any_width_and_type_move(dim, dtype):
    table = adam(dim=dim, dtype=dtype, init=shoal.Normal(0, 1))
    pair = Pair(table, hbm=512 + 8 * table.row_bytes)  # four buckets, and a few rows
    for step in range(3):
        pair.step(random_kjt(["a"], bags=6, keys=40, seed=step), seed=step)
    pair.check()
    assert pair.above().promotions > 0


@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [slow("sum", False), slow("sum", True), ("mean", True), slow("none", False)]
)
def test_pooling_weights_and_modes(pooling, is_weighted):
    kind = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
    read, write = Feature("r", mode="read"), Feature("w", mode="write")
    pair = Pair(
        Table("x", 4, features=["a", read, write], pooling=pooling, optimizer=shoal.Adam(lr=0.5)),
        Table("y", 3, features=[Feature("a", mode="read"), "r"], pooling=pooling),
        Table("z", 4, features=[Feature("a", mode="write"), write], pooling=pooling, optimizer=shoal.Adagrad(lr=0.1)),
        Table("fixed", 2, features=["a"], pooling=pooling, optimizer=None),
        kind=kind,
        hbm="1KiB",
    )
    for step in range(2):
        pair.step(random_kjt(["a", "r", "w"], bags=5, keys=30, seed=step, weighted=is_weighted), seed=step)
    pair.check()


def test_a_table_that_others_only_read_is_seen_in_both_tiers():
    tables = [Table("x", 4, features=[Feature("a", mode="read")]), Table("y", 4, features=["b"])]
    pair = Pair(*tables, hbm="1KiB")
    rows = torch.randn(60, 4, device=DEVICE)
    pair.each(lambda module: module.table("x").assign(range(60), rows))
    for step in range(4):
        pair.step(random_kjt(["a", "b"], bags=6, keys=70, seed=step), seed=step)
    pair.check()
    assert pair.above("x").promotions > 0
    assert pair.above("x").demotions == 0  # nothing changed them


@pytest.mark.parametrize("alone", [slow(["a"]), slow(["b"]), ["b", "c"]], ids=str)
def test_tables_with_and_without_tiers_live_in_one_collection(alone):
    pair = Pair(adam("a"), adam("b"), Table("c", 4, features=["a", "c"]), alone=alone, hbm="1KiB")
    for step in range(2):
        pair.step(random_kjt(["a", "b", "c"], bags=6, keys=50, seed=step), seed=step)
        pair.evaluate(random_kjt(["c", "b", "a"], bags=6, keys=60, seed=step))
    pair.check()


def test_extreme_repeated_and_no_keys():
    pair = Pair(adam(), hbm="1KiB")
    pair.step(kjt({"a": [[], []]}))
    pair.step(kjt({"a": [EXTREME * 9, [5] * 100, list(range(30))]}))
    pair.step(kjt({"a": [[], [], []]}))
    pair.step(kjt({"a": [list(range(30, 60)), EXTREME, []]}))
    pair.step(kjt({"a": [list(range(20)) * 3, EXTREME * 2, [-5] * 70]}))
    pair.check()


def test_a_batch_may_be_larger_than_the_upper_tier():
    pair = Pair(adam(), hbm="1KiB")
    for step in range(3):
        pair.step(kjt({"a": [list(range(step, 120 + step)), list(range(0, 60, 2))]}), seed=step)
    pair.check()
    assert len(pair.tiers.table("a")) == 122 > 10 * pair.above().capacity


def test_an_upper_tier_without_room_for_a_row_is_none():
    pair = Pair(adam(), hbm=16)
    for step in range(3):
        pair.step(random_kjt(["a"], keys=20, seed=step), seed=step)
    pair.check()
    assert (pair.above().capacity, pair.above().promotions) == (0, 0)


# ---- what stays where it is


def test_forwards_before_their_backwards_keep_their_rows():
    pair = Pair(adam(), hbm="1KiB")
    batches = [random_kjt(["a"], bags=4, keys=30, seed=seed) for seed in range(5)]
    waiting = []
    for seed, batch in enumerate(batches):
        waiting.append((pair.forward(batch)[0], seed))
        if len(waiting) == 3:
            pair.backward(*waiting.pop(1))
    while waiting:
        pair.backward(*waiting.pop())
    pair.check()
    assert pair.above().pinned == 0


def test_a_row_that_is_used_in_place_stays_there_until_its_backward():
    pair = Pair(adam(), hbm="1KiB")
    many = device_rows_of(pair.tiers).above.most[0]
    first, _ = pair.forward(kjt({"a": [list(range(3 * many))]}))  # most find no slot above
    assert pair.above().pinned == pair.above().rows <= many
    second, _ = pair.forward(kjt({"a": [list(range(2 * many, 4 * many))]}))
    pair.backward(second, 1)
    third, _ = pair.forward(kjt({"a": [list(range(many, 3 * many))]}))  # the first still waits
    pair.backward(first, 2)
    pair.backward(third, 3)
    pair.step(kjt({"a": [list(range(2 * many, 3 * many))]}))
    pair.check()


def test_rows_come_up_while_another_batch_waits():
    pair = Pair(adam(), hbm="3KiB")
    many = device_rows_of(pair.tiers).above.most[0]
    pair.step(kjt({"a": [list(range(2 * many))]}))
    outs, _ = pair.forward(kjt({"a": [list(range(4))]}))
    before = pair.above().promotions
    pair.step(kjt({"a": [list(range(2 * many - 4, 2 * many))]}))
    assert pair.above().promotions + pair.above().hits >= before + 4
    pair.backward(outs)
    pair.check()


def test_rows_that_wait_for_their_backward_stay_when_stamps_begin_anew():
    pair = Pair(adam(), hbm="1KiB")
    numbered, many = device_rows_of(pair.tiers).stamps, device_rows_of(pair.tiers).above.most[0]
    pair.step(kjt({"a": [list(range(4 * many))]}))
    numbered._numbers = itertools.count(2**30 - 2)
    waiting = [pair.forward(kjt({"a": [list(range(2 * many))]}))[0]]  # half of it is used in place
    waiting.append(pair.forward(kjt({"a": [list(range(many, 3 * many))]}))[0])
    pinned = pair.above().pinned
    pair.step(kjt({"a": [list(range(2 * many, 4 * many))]}), 1)
    assert numbered.of(2**30 - 2) == 1 and numbered.of(2**30 - 1) == 2
    assert pair.above().pinned == pinned
    pair.step(kjt({"a": [list(range(2 * many))]}), 2)
    for seed, outs in enumerate(waiting):
        pair.backward(outs, seed)
    for first in range(3):
        pair.step(kjt({"a": [list(range(first * many, (first + 1) * many))]}), first)
    pair.check()
    assert pair.above().pinned == 0


@pytest.mark.timeout(600)  # it did not end
def test_rows_leave_though_stamps_need_all_of_their_bits(monkeypatch):
    monkeypatch.setattr(stamps, "_MOST", 2**31 - 2)
    pair = Pair(adam(), hbm="1KiB")
    device_rows_of(pair.tiers).stamps._numbers = itertools.count(2**31 - 7)
    many = device_rows_of(pair.tiers).above.most[0]
    for step in range(4):
        pair.step(kjt({"a": [list(range(step % 3 * many, (step % 3 + 1) * many))]}), step)
    pair.check()
    assert pair.above().promotions > 0


@pytest.mark.filterwarnings("ignore::shoal.errors.ModeWarning")
def test_forwards_without_a_backward():
    pair = Pair(adam(), hbm="1KiB")
    for step in range(6):
        outs, _ = pair.forward(random_kjt(["a"], bags=6, keys=50, seed=step))
        if step % 3 == 0:
            pair.backward(outs)
        del outs
        with torch.no_grad():
            pair.forward(random_kjt(["a"], bags=6, keys=50, seed=step + 10))
    pair.check()


def test_a_clean_row_is_not_written_down():
    table = Table("a", 4, features=["t", Feature("r", mode="read")], optimizer=shoal.Adam(lr=0.1))
    pair = Pair(table, hbm="1KiB")
    many = device_rows_of(pair.tiers).above.most[0]
    pair.step(kjt({"t": [list(range(4 * many))], "r": [[]]}))
    keys = list(range(4 * many))
    for begin in range(0, 4 * many, many // 2):
        pair.step(kjt({"t": [[]], "r": [keys[begin : begin + many // 2]]}))
    assert pair.above().dirty == 0
    before = pair.above()
    for begin in range(0, 4 * many, many // 2):
        pair.step(kjt({"t": [[]], "r": [keys[begin : begin + many // 2]]}))
    after = pair.above()
    assert after.promotions - before.promotions >= 3 * many
    assert after.demotions == before.demotions
    pair.check()


def test_a_row_that_is_written_down_takes_the_home_of_the_one_that_comes():
    table = Table("a", 4, features=["t", Feature("r", mode="read")], optimizer=shoal.Adam(lr=0.1))
    pair = Pair(table, hbm="1KiB")
    rows = device_rows_of(pair.tiers)
    many = rows.above.most[0]
    pair.step(kjt({"t": [list(range(2 * many))], "r": [[]]}))
    up = rows.above.index.entries(0)[0].tolist()
    down = [key for key in range(2 * many) if key not in up]
    before = below_of(rows, 0)
    pair.forward(kjt({"t": [down[:many]], "r": [[]]}))
    after = below_of(rows, 0)
    assert sorted(after[key][0] for key in up) == sorted(before[key][0] for key in down[:many])
    assert sorted(after[key][0] for key in down[:many]) == sorted(before[key][0] for key in up)
    assert all(after[key][1] == before[key][1] for key in after)
    # Nothing changed these rows yet, and their homes have no copy of them.
    assert pair.above().dirty == many
    pair.check()
    pair.step(kjt({"t": [[]], "r": [up]}))
    pair.check()


@pytest.mark.slow
def test_rows_find_their_homes_once_the_index_below_was_built_anew():
    pair = Pair(adam(), hbm="1KiB")
    rows = device_rows_of(pair.tiers)
    pair.step(kjt({"a": [list(range(60))]}))
    for grow in (True, False):
        before, up = rows.index.moved[0], rows.above.index.entries(0)[0]
        if grow:
            keys = range(100, 100 + rows.index.capacity(0))
            weights = torch.zeros(len(keys), 4, device=DEVICE)
            pair.each(lambda module, keys=keys, weights=weights: module.table("a").assign(keys, weights))
        else:
            rows.tidy(0, rows.index.capacity(0))
        assert rows.index.moved[0] > before
        assert torch.equal(rows.above.index.entries(0)[0], up) and len(up)
        assert_copies_sound(pair.tiers)
        pair.step(kjt({"a": [list(range(30, 60))]}))
        pair.step(kjt({"a": [list(range(40))]}))
        pair.check()


def test_rows_that_were_used_last_stay_above():
    pair = Pair(adam(), hbm="3KiB")
    many = device_rows_of(pair.tiers).above.most[0]
    hot = list(range(many // 2))
    pair.step(kjt({"a": [hot]}))
    for step in range(8):
        pair.step(kjt({"a": [hot, [1000 + 3 * step + n for n in range(3)]]}))
    before = pair.above()
    pair.step(kjt({"a": [hot]}))
    assert pair.above().misses == before.misses
    pair.check()


def test_finds_end_although_keys_come_and_go():
    pair = Pair(adam(), hbm="3KiB")
    for step in range(8):
        pair.step(kjt({"a": [[100 * step + n for n in range(15)]]}))
    buckets = device_rows_of(pair.tiers).above.index._buffers[0]
    assert int((buckets[:, 16:24] == HOLE.value).sum()) <= 8
    pair.check()


def homes_in(index, keys):
    """The home bucket of each key in the index of the first table."""
    return [(mix64(key % 2**64) >> 32) * index.buckets(0) >> 32 for key in keys]


def buckets_in(index, keys):
    """The bucket that each key is in."""
    held = index._buffers[0].view(torch.int64)[:, :8]
    used = index._buffers[0][:, 16:24] >= 0
    return [int(torch.nonzero(((held == key) & used).any(1))[0]) for key in keys]


@pytest.mark.slow
def test_keys_go_back_to_their_home_once_others_left_it():
    pair = Pair(adam(), hbm="3KiB")
    index = device_rows_of(pair.tiers).above.index
    pair.step(kjt({"a": [[0]]}))
    many = device_rows_of(pair.tiers).above.most[0]
    pool = list(range(1, 4000))
    crowd = [key for key, home in zip(pool, homes_in(index, pool), strict=True) if home == 2]
    crowd, hot = crowd[:8], crowd[8:12]
    pair.step(kjt({"a": [crowd]}))
    pair.step(kjt({"a": [hot]}))
    assert set(buckets_in(index, hot)) == {3}  # their home was full
    others = [key for key, home in zip(pool, homes_in(index, pool), strict=True) if home > 3]
    for first in range(0, 4 * many, many // 2):
        pair.step(kjt({"a": [hot, others[first : first + many // 2]]}))
    assert set(buckets_in(index, hot)) == {2}
    assert int((index._buffers[0][2:4, 16:24] == HOLE.value).sum()) == 0
    pair.check()


@pytest.mark.slow
def test_keys_that_crowd_together_come_and_go():
    pair = Pair(adam(), hbm="3KiB")
    pair.step(kjt({"a": [[0]]}))
    index, pool = device_rows_of(pair.tiers).above.index, list(range(1, 4000))
    ends = (0, index.buckets(0) - 1)  # who finds no place in the last bucket goes on in the first
    pool = [key for key, home in zip(pool, homes_in(index, pool), strict=True) if home in ends][:60]
    generator = torch.Generator().manual_seed(0)
    before, moved = {}, 0
    for step in range(24):
        drawn = torch.rand(14, generator=generator) ** 2 * len(pool)
        pair.step(kjt({"a": [[pool[at] for at in drawn.long().tolist()]]}), seed=step)
        up = index.entries(0)[0].tolist()
        now = dict(zip(up, buckets_in(index, up), strict=True))
        moved += sum(before.get(key, at) != at for key, at in now.items())
        before = now
        assert_copies_sound(pair.tiers)
    assert moved > 0
    pair.check()


# ---- eval


def test_eval_reads_both_tiers_and_moves_nothing():
    pair = Pair(adam(), hbm="1KiB")
    for step in range(3):
        pair.step(random_kjt(["a"], bags=8, keys=60, seed=step), seed=step)
    above = device_rows_of(pair.tiers).above.index.entries(0)
    before = pair.above()
    for seed in range(3):
        pair.evaluate(random_kjt(["a"], bags=8, keys=80, seed=seed))
    after = pair.above()
    assert all(torch.equal(*one) for one in zip(above, device_rows_of(pair.tiers).above.index.entries(0), strict=True))
    assert (after.promotions, after.demotions) == (before.promotions, before.demotions)
    assert after.hits + after.misses > before.hits + before.misses
    pair.check()


def test_gradients_of_weights_in_eval_are_of_the_rows_that_were_read():
    pair = Pair(adam(), hbm="1KiB")
    for step in range(2):
        pair.step(random_kjt(["a"], bags=8, keys=60, seed=step, weighted=True), seed=step)
    for module in pair.both:
        module.eval()
    outs, batches = pair.forward(random_kjt(["a"], bags=8, keys=60, seed=9, weighted=True))
    for module in pair.both:
        module.train()
    pair.forward(random_kjt(["a"], bags=8, keys=60, seed=5))  # other rows come up
    pair.backward(outs)
    same(batches[0].weights().grad, batches[1].weights().grad)
    pair.check()


# ---- handles


def test_a_handle_sees_one_table():
    pair = Pair(adam(), hbm="1KiB")
    for step in range(3):
        pair.step(random_kjt(["a"], bags=8, keys=60, seed=step), seed=step)
    asked = [*range(0, 70, 3), *EXTREME]
    assert_same_handles(pair, asked)


@pytest.mark.slow
def test_assign_erase_and_training_between_each_other():
    pair = Pair(adam(), hbm="1KiB")
    assign_and_erase_between_steps(pair, steps=5, bags=8, keys=60)
    pair.step(random_kjt(["a"]))
    pair.check()


@pytest.mark.slow
def test_a_state_dict_goes_from_tier_to_tier():
    pair = Pair(adam(), adam("b", alone_dim := 3), alone=["b"], hbm="1KiB")
    other = Pair(adam(), adam("b", alone_dim), alone=["b"], hbm="2KiB")
    for step in range(3):
        pair.step(random_kjt(["a", "b"], bags=8, keys=60, seed=step), seed=step)
        other.step(random_kjt(["a", "b"], bags=8, keys=90, seed=step + 9), seed=step)
    other.tiers.load_state_dict(pair.whole.state_dict())
    other.whole.load_state_dict(pair.tiers.state_dict())
    assert_copies_sound(other.tiers)
    for step in range(3):
        batch = random_kjt(["a", "b"], bags=8, keys=60, seed=step + 30)
        other.step(batch, seed=step)
        pair.step(batch, seed=step)
    for one, two in zip(pair.tiers.state_dict().values(), other.tiers.state_dict().values(), strict=True):
        same(one, two)
    copied = copy.deepcopy(pair.tiers)
    batch = random_kjt(["a", "b"], bags=8, keys=60, seed=50)
    same(train(copied, batch), train(pair.whole, batch))
    for one, two in zip(copied.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


def test_erased_rows_make_room_in_both_tiers():
    pair = Pair(adam(), hbm="1KiB")
    for _ in range(3):
        pair.step(kjt({"a": [list(range(40))]}))
        assert pair.each(lambda module: module.table("a").erase(range(40))) == [40, 40]
    assert pair.above().rows == 0
    pair.check()


# ---- budgets


@pytest.mark.slow
def test_both_budgets_hold_and_the_last_tier_is_what_a_table_may_have():
    bags = shoal.EmbeddingBagCollection([tiered(adam(), "2KiB", "8KiB")], device=DEVICE)
    with pytest.raises(CapacityError, match=r"Raise Dram\(\.\.\.\)"):
        for first in range(0, 1000, 40):
            train(bags, kjt({"a": [list(range(first, first + 40))]}))
            bags.check()
    rows = device_rows_of(bags)
    stats = bags.table("a").stats()
    assert rows.storage.bytes + rows.above.index.bytes(0) + 4 * rows.above.capacity(0) == stats.tiers[0].bytes <= 2048
    assert rows.storage.host_bytes + rows.index.bytes(0) <= 8 * 1024
    assert len(bags.table("a")) == stats.tiers[1].capacity > 80
    assert_copies_sound(bags)
    kept = bags.table("a").keys()
    state = bags.state_dict()
    with pytest.raises(CapacityError, match="Dram"):
        bags.table("a").assign(range(1000, 1100), torch.ones(100, 4, device=DEVICE))
    for name, value in bags.state_dict().items():
        same(value, state[name], name)
    bags.table("a").erase(kept[:10])
    train(bags, kjt({"a": [list(range(2000, 2010))]}))
    bags.check()
    assert len(bags.table("a")) == len(kept)


def test_stats_tell_of_each_tier():
    pair = Pair(adam(), hbm="1KiB", dram="1MiB")
    many = device_rows_of(pair.tiers).above.most[0]
    pair.step(kjt({"a": [list(range(many))]}))
    pair.step(kjt({"a": [list(range(many, 2 * many))]}))
    hbm, dram = pair.tiers.table("a").stats().tiers
    assert (hbm.name, dram.name) == ("Hbm", "Dram")
    assert (hbm.rows, dram.rows) == (many, 2 * many)
    assert (hbm.promotions, hbm.demotions, hbm.dirty) == (0, many, many)
    assert (hbm.hits, hbm.misses, dram.hits, dram.misses) == (0, 2 * many, 0, 2 * many)
    pair.step(kjt({"a": [list(range(many)), list(range(many))]}))
    hbm, dram = pair.tiers.table("a").stats().tiers
    assert (hbm.promotions, hbm.demotions) == (many, 2 * many)
    assert dram.hits == 2 * many
    assert dram.read_bytes == many * 64 and dram.written_bytes == 2 * many * 64
    assert (hbm.budget_bytes, dram.budget_bytes) == (1024, 2**20)
    stats = pair.tiers.table("a").stats()
    assert stats.bytes == hbm.bytes + dram.bytes == stats.index_bytes + stats.storage_bytes


@pytest.mark.parametrize("below", [(), (MemoryStorage,)])
def test_stats_tell_of_no_tier_that_was_not_asked_for(below):
    tables = [with_tiers(adam("a"), [Dram("64KiB"), *below]), in_hbm(adam("b"))]
    bags = shoal.EmbeddingBagCollection(tables, device=DEVICE, seed=7)
    for _ in range(2):
        train(bags, kjt({"a": [list(range(9))], "b": [[1]]}))
    stats = bags.stats()["a"]
    assert [tier.name for tier in stats.tiers] == ["Dram", *(made.__name__ for made in below)]
    dram = stats.tiers[0]
    assert (dram.rows, dram.hits, dram.misses, dram.bytes) == (9, 9, 9, stats.bytes)


# ---- anything


@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_anything_in_any_order(data):
    pair = Pair(adam("a", 3), adam("b", 2, features=["a", "b"]), hbm=data.draw(st.sampled_from([1024, 2048])))
    pool = [*range(40), *EXTREME]
    do_anything(data, pair, pool, st.integers(2, 6), most_waiting=6)
    pair.step(kjt({"a": [pool], "b": [pool]}))
    pair.check()
