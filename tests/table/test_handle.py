"""bags.table(name): look at rows, write them, erase them."""

import pytest
import torch
from support.batches import assert_unchanged, kjt, memory, train_step

import shoal
from shoal.errors import DeviceError, InputError

EXTREME = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**31)]


def table(dim=4, **settings):
    bags = shoal.EmbeddingBagCollection([shoal.Table("item", dim, **settings), shoal.Table("other", 3)])
    handle = bags.table("item")
    handle.bags = bags  # for the tests that train it
    return handle


def train(handle, *keys):
    train_step(handle.bags, kjt({"item": [list(keys)], "other": [[1]]}))


def test_an_empty_table():
    item = table()
    assert len(item) == 0
    assert item.name == "item"
    assert item.keys().dtype == torch.int64
    assert item.keys().tolist() == []
    assert item.lookup([]).shape == (0, 4)
    assert item.contains([]).tolist() == []
    assert item.scores([]).tolist() == []
    assert {name: tuple(values.shape) for name, values in item.state([]).items()} == {"sum": (0, 1)}
    assert item.erase([]) == 0
    assert item.unreadable().tolist() == []
    item.assign([], torch.empty(0, 4))
    assert repr(item) == "<table 'item': 0 rows of dim 4>"


def test_rows_that_training_made_are_seen():
    item = table()
    train(item, *EXTREME, 0)
    assert len(item) == len(EXTREME)
    assert item.keys().tolist() == sorted(EXTREME)
    assert item.contains([*EXTREME, 5]).tolist() == [True] * len(EXTREME) + [False]
    assert (item.state(EXTREME)["sum"] > 0).all()
    assert item.scores([0, 5]).tolist()[0] == 0.0
    assert item.scores([0, 5]).isnan().tolist() == [False, True]


@pytest.mark.parametrize("missing", ["init", "zero"])
def test_lookup_never_inserts(missing):
    item = table(missing=missing, init=shoal.Constant(0.5), optimizer=shoal.Adagrad(initial=0.25))
    wanted = 0.5 if missing == "init" else 0.0
    assert torch.equal(item.lookup([7, 8, 7]), torch.full((3, 4), wanted))
    assert torch.equal(item.state([7])["sum"], torch.full((1, 4), 0.25))
    assert len(item) == 0
    assert not item.contains([7]).any()
    assert item.stats().counters["births"] == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keys_may_be_tensors_lists_and_ranges(dtype):
    item = table()
    rows = torch.randn(3, 4)
    item.assign(torch.tensor([1, 2, 3], dtype=dtype), rows)
    for keys in ([1, 2, 3], (1, 2, 3), range(1, 4), torch.tensor([1, 0, 2, 0, 3], dtype=dtype)[::2]):
        assert torch.equal(item.lookup(keys), rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_assign_writes_weights_and_keeps_state(dtype):
    item = table(dtype=dtype, optimizer=shoal.Adam(lr=0.1))
    train(item, 1, 2)
    state = item.state([1, 2])
    scores = item.scores([1, 2])
    rows = torch.randn(3, 4).to(getattr(torch, dtype)).float()
    item.assign([2, 9, -5], rows)
    assert torch.equal(item.lookup([2, 9, -5]), rows)
    assert item.lookup([1]).dtype == torch.float32
    for name, values in item.state([1, 2]).items():
        assert torch.equal(values, state[name])
    assert torch.equal(item.scores([1, 2]), scores)
    # A row that it made has state and score as at birth.
    assert not item.state([9])["exp_avg"].any()
    assert item.scores([9]).tolist() == [1.0]
    assert len(item) == 4


def test_of_duplicates_the_last_wins():
    item = table()
    item.assign([1, 2, 1, 1], torch.arange(16.0).reshape(4, 4))
    assert torch.equal(item.lookup([1, 2]), torch.tensor([[12.0, 13, 14, 15], [4, 5, 6, 7]]))
    assert len(item) == 2


def test_assign_takes_other_float_types_layouts_and_graphs():
    item = table()
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    item.assign([1, 2], rows.t())
    assert torch.equal(item.lookup([1, 2]), rows.t().float())
    item.assign([1], torch.ones(1, 1, dtype=torch.bfloat16).expand(1, 4))
    assert torch.equal(item.lookup([1]), torch.ones(1, 4))


def test_rows_that_come_back_are_copies():
    item = table()
    item.assign([1], torch.ones(1, 4))
    item.lookup([1]).zero_()
    item.state([1])["sum"].fill_(9)
    item.keys().fill_(9)
    assert torch.equal(item.lookup([1]), torch.ones(1, 4))
    assert not item.state([1])["sum"].any()
    assert item.keys().tolist() == [1]


def test_erase_removes_rows_and_says_how_many():
    item = table()
    first = item.lookup([1])
    train(item, 1, 2, 3)
    assert item.erase([1, 3, 1, 77]) == 2
    assert item.keys().tolist() == [2]
    assert item.contains([1, 2, 3]).tolist() == [False, True, False]
    assert item.erase(torch.tensor([1], dtype=torch.int32)) == 0
    assert torch.equal(item.lookup([1]), first)
    assert item.scores([1]).isnan().all()
    train(item, 1)
    assert item.state([1])["sum"].item() < 10  # state began anew
    assert item.stats().counters["erased"] == 2


def test_erasing_most_rows_gives_memory_back():
    item = table(dim=64)
    keys = torch.arange(200_000)
    item.assign(keys, torch.zeros(len(keys), 64))
    full = item.stats().bytes
    kept = keys[torch.randperm(len(keys))[:20_000]].sort().values
    rows = torch.randn(20_000, 64)
    item.assign(kept, rows)
    for part in keys[~torch.isin(keys, kept)].split(20_000):
        item.erase(part)
    for _ in range(20):
        item.erase([-1])
    assert torch.equal(item.keys(), kept)
    assert torch.equal(item.lookup(kept), rows)
    assert item.stats().bytes < 0.35 * full


def test_stats_are_a_moment():
    item = table(tiers=[shoal.Dram("64MiB")])
    train(item, 1, 2, 2)
    stats = item.stats()
    train(item, 1, 9)
    assert (stats.rows, stats.step, stats.budget_bytes) == (2, 1, 64 * 2**20)
    assert stats.bytes == stats.index_bytes + stats.storage_bytes > 0
    assert stats.counters["lookups"] == 3
    assert stats.counters["births"] == 2
    assert stats.counters["hits"] == 0
    now = item.stats()
    assert (now.rows, now.step) == (3, 2)
    assert now.counters["lookups"] == 5
    assert now.counters["hits"] == 1
    assert now.counters["steps"] == 2


def test_tables_do_not_know_each_other():
    item = table()
    train(item, 5)
    assert item.bags.table("other").keys().tolist() == [1]
    item.erase([1, 5])
    assert len(item.bags.table("other")) == 1


# ---- bad arguments


@pytest.mark.parametrize("method", ["contains", "lookup", "state", "scores", "erase"])
@pytest.mark.parametrize(
    "keys",
    [
        [1.5],
        [1.0],
        [True],
        ["a"],
        [None],
        None,
        5,
        "12",
        [[1, 2]],
        [2**63],
        [-(2**63) - 1],
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([1], dtype=torch.int16),
        torch.tensor([[1]]),
        torch.tensor(1),
    ],
    ids=repr,
)
def test_bad_keys_are_refused(method, keys):
    item = table()
    train(item, 1, 2)
    before = memory(item.bags)
    with pytest.raises(InputError, match=f"table 'item'.{method}. keys must be"):
        getattr(item, method)(keys)
    assert_unchanged(item.bags, before)


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        ([1.5], torch.ones(1, 4), "keys must be"),
        ([1], torch.ones(1, 3), r"shape \(1, 4\)"),
        ([1], torch.ones(2, 4), r"shape \(1, 4\)"),
        ([1], torch.ones(4), r"shape \(1, 4\)"),
        ([1, 2], torch.ones(1, 4), r"shape \(2, 4\)"),
        ([1], torch.ones(1, 4, dtype=torch.int64), "floats"),
        ([1], torch.ones(1, 4, dtype=torch.complex64), "floats"),
        ([1], [[1.0] * 4], "got <class 'list'>"),
        ([1], None, "rows must be"),
        ([1, 5], torch.tensor([[1.0] * 4, [float("nan")] * 4]), "finite"),
        ([5, 1], torch.tensor([[float("inf")] * 4, [1.0] * 4]), "finite"),
        ([5], torch.full((1, 4), 1e300, dtype=torch.float64), "finite in float32"),
    ],
)
def test_bad_rows_are_refused(keys, rows, message):
    item = table()
    train(item, 1, 2)
    before = memory(item.bags)
    with pytest.raises(InputError, match=message):
        item.assign(keys, rows)
    assert_unchanged(item.bags, before)


def test_rows_beyond_the_tables_type_are_refused():
    item = table(dtype="float16")
    before = memory(item.bags)
    with pytest.raises(InputError, match="finite in float16"):
        item.assign([1], torch.full((1, 4), 70_000.0))
    assert_unchanged(item.bags, before)


def test_other_devices_are_refused():
    item = table()
    with pytest.raises(DeviceError, match="the keys are on meta"):
        item.lookup(torch.tensor([1], device="meta"))
    with pytest.raises(DeviceError, match="the rows are on meta"):
        item.assign([1], torch.ones(1, 4, device="meta"))
    assert len(item) == 0
