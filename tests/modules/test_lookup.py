"""What a collection reads: modes, missing keys, weights, dtypes, odd batches."""

import pytest
import torch
from support.batches import assert_unchanged, kjt, memory, random_kjt, train_step

import shoal
from shoal import Feature, Table
from shoal.errors import ConfigError, InputError, NotFoundError

TWO = {"a": [[1, 2], [3]], "b": [[], [5, 5]]}


def pair(**settings):
    """Tables of dims 4 and 3, fed by a and b; `settings` are both tables'."""
    return shoal.EmbeddingBagCollection([Table("a", 4, **settings), Table("b", 3, **settings)])


def rows(bags, table, keys):
    return bags.table(table).lookup(keys)


# ---- training and evaluation


def test_training_inserts_and_updates_and_evaluation_changes_nothing():
    bags = pair()
    bags.eval()
    before = bags.state_dict()
    out = bags(kjt(TWO)).values()
    assert not out.requires_grad
    assert len(bags.table("a")) == 0
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    bags.train()
    assert torch.equal(train_step(bags, kjt(TWO)), out.flatten())  # the rows that keys are born with
    assert bags.table("a").keys().tolist() == [1, 2, 3]
    bags.eval()
    assert not torch.equal(bags(kjt(TWO)).values(), out)


def test_evaluation_changes_no_row_score_or_step():
    bags = pair()
    for step in range(3):
        train_step(bags, random_kjt(["a", "b"], seed=step))
    before, stats = memory(bags)
    bags.eval()
    for step in range(5):
        bags(random_kjt(["a", "b"], keys=100, seed=10 + step))
    after, now = memory(bags)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert all(now[name].rows == stats[name].rows and now[name].step == stats[name].step for name in now)
    assert all(now[name].counters["births"] == stats[name].counters["births"] for name in now)


@pytest.mark.filterwarnings("ignore::shoal.errors.ModeWarning")
def test_training_without_gradients_inserts_but_updates_nothing():
    bags = pair()
    with torch.no_grad():
        out = bags(kjt(TWO)).values()
    assert not out.requires_grad
    assert bags.table("a").keys().tolist() == [1, 2, 3]
    assert bags.table("a").stats().step == 0
    assert torch.equal(out[1, :4], rows(bags, "a", [3])[0])


@pytest.mark.parametrize("missing", ["init", "zero"])
def test_a_key_without_a_row_reads_as_the_table_says(missing):
    bags = pair(missing=missing, init=shoal.Constant(0.5))
    bags.eval()
    out = bags(kjt({"a": [[1, 2], []], "b": [[3], [4]]}))
    wanted = {"init": 0.5, "zero": 0.0}[missing]
    assert torch.equal(out["a"], torch.tensor([[2 * wanted] * 4, [0.0] * 4]))
    assert torch.equal(out["b"], torch.full((2, 3), wanted))
    assert torch.equal(rows(bags, "a", [1]), torch.full((1, 4), wanted))


def test_the_missing_row_is_the_row_that_is_born():
    bags = pair(init=shoal.Normal(0, 1))
    keys = [0, -1, 2**63 - 1, -(2**63)]
    foretold = rows(bags, "a", keys)
    bags(kjt({"a": [keys], "b": [[]]}))
    assert bags.table("a").contains(keys).all()
    assert torch.equal(rows(bags, "a", keys), foretold)


def test_tables_that_do_not_train_are_read_only():
    bags = pair(optimizer=None)
    bags.table("a").assign([1], torch.ones(1, 4))
    before = bags.state_dict()
    out = bags(kjt(TWO))
    out.values().sum().backward()
    assert len(bags.table("a")) == 1
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    assert bags.table("a").stats().step == 0
    with pytest.raises(ConfigError, match="nothing to schedule"):
        _ = bags.optimizer


def test_a_table_that_does_not_train_beside_one_that_does():
    bags = shoal.EmbeddingBagCollection([Table("a", 4, optimizer=None), Table("b", 3)])
    train_step(bags, kjt(TWO))
    assert [len(bags.table(name)) for name in "ab"] == [0, 1]
    assert [bags.table(name).stats().step for name in "ab"] == [0, 1]
    assert [group["name"] for group in bags.optimizer.param_groups] == ["b"]


# ---- features and their modes


def test_read_looks_up_and_changes_nothing():
    bags = shoal.EmbeddingBagCollection(
        [Table("item", 4, features=["seen", Feature("read", mode="read")], optimizer=shoal.SGD(lr=1.0))]
    )
    bags(kjt({"seen": [[1, 2]], "read": [[2, 3]]}))["read"].sum().backward()
    assert bags.table("item").keys().tolist() == [1, 2]
    first = bags.table("item").lookup([1, 2])
    out = bags(kjt({"seen": [[1]], "read": [[2]]}))
    (out["read"] * 5 + out["seen"]).sum().backward()
    assert torch.equal(bags.table("item").lookup([1, 2]), first - torch.tensor([[1.0], [0.0]]))


def test_read_sees_a_key_that_the_same_batch_gave_birth_to():
    bags = shoal.EmbeddingBagCollection(
        [Table("item", 4, features=[Feature("read", mode="read"), "seen"], missing="zero", init=shoal.Constant(1.0))]
    )
    out = bags(kjt({"read": [[7], [8]], "seen": [[7], []]}))
    assert torch.equal(out["read"], torch.tensor([[1.0] * 4, [0.0] * 4]))


def test_write_gives_zeros_in_the_graph_and_updates_from_its_gradient():
    bags = shoal.EmbeddingBagCollection(
        [Table("item", 4, features=[Feature("w", mode="write")], optimizer=shoal.Assign())]
    )
    out = bags(kjt({"w": [[1], [2], []]})).values()
    assert torch.equal(out, torch.zeros(3, 4))
    wanted = torch.randn(3, 4)
    out.backward(wanted)
    assert torch.equal(bags.table("item").lookup([1, 2]), wanted[:2])


def test_a_feature_may_feed_two_tables():
    bags = shoal.EmbeddingBagCollection([Table("x", 2, features=["a", "b"]), Table("y", 3, features=["a"])])
    out = bags(kjt(TWO))
    assert out.keys() == ["a@x", "b", "a@y"]
    assert out.length_per_key() == [2, 2, 3]
    assert torch.equal(out["a@x"][1], rows(bags, "x", [3])[0])
    assert torch.equal(out["a@y"][1], rows(bags, "y", [3])[0])
    out.values().sum().backward()
    assert [bags.table(name).stats().step for name in "xy"] == [1, 1]


def test_each_table_of_a_shared_feature_has_its_own_row():
    bags = shoal.EmbeddingBagCollection(
        [
            Table("x", 2, features=["b", "a"], optimizer=shoal.SGD(lr=1.0), pooling="mean"),
            Table("y", 3, features=["a"], optimizer=shoal.SGD(lr=1.0)),
        ]
    )
    batch = kjt({"a": [[1, 2], [3]], "b": [[7, 8, 9], [1]]}, weights=1)
    weights = batch.weights().requires_grad_()
    x, y = rows(bags, "x", [1, 2, 3, 7]), rows(bags, "y", [1, 2, 3])
    out = bags(batch)
    torch.testing.assert_close(out["a@x"], torch.stack([x[:2].mean(0), x[2]]))
    torch.testing.assert_close(out["a@y"], torch.stack([y[:2].sum(0), y[2]]))
    (out["a@x"].sum() + 10 * out["a@y"].sum()).backward()
    torch.testing.assert_close(rows(bags, "x", [1, 2, 3, 7]), x - torch.tensor([[0.5], [0.5], [1.0], [0.0]]))
    torch.testing.assert_close(rows(bags, "y", [1, 2, 3]), y - 10)
    wanted = torch.tensor([0.5, 0.5, 1.0]) * x[:3].sum(1) + 10 * y.sum(1)
    torch.testing.assert_close(weights.grad[:3], wanted)


def test_the_order_of_the_batch_does_not_matter():
    one, other = pair(), pair()
    swapped = {name: TWO[name] for name in ("b", "a")}
    assert torch.equal(train_step(one, kjt(TWO)), train_step(other, kjt(swapped)))
    for table in "ab":
        assert torch.equal(rows(one, table, [1, 2, 3, 5]), rows(other, table, [1, 2, 3, 5]))


def test_a_feature_that_no_table_has_is_named_where_features_are_strict():
    bags = shoal.EmbeddingBagCollection([Table("a", 4), Table("b", 3)], strict_features=True)
    before = memory(bags)
    with pytest.raises(NotFoundError, match="no table has the feature 'x' of the batch; the tables have 'a', 'b'"):
        bags(kjt({"x": [[9, 9], [8]], **TWO}))
    assert_unchanged(bags, before)


def test_a_feature_that_is_not_there_is_named():
    bags = pair()
    before = memory(bags)
    with pytest.raises(NotFoundError, match="'b' wants the feature 'b'; the batch has 'a', 'c'"):
        bags(kjt({"a": [[1]], "c": [[2]]}))
    assert_unchanged(bags, before)


# ---- shapes and dtypes of a batch


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_both_widths_give_the_same(dtype, lengths_dtype, by):
    bags, other = pair(), pair()
    batch = {"a": [[1, -2], [3]], "b": [[], [-(2**31), 2**31 - 1]]}
    ours = kjt(batch, dtype=dtype, lengths_dtype=lengths_dtype, by=by)
    assert torch.equal(train_step(bags, ours), train_step(other, kjt(batch)))
    assert bags.table("b").keys().tolist() == [-(2**31), 2**31 - 1]


def test_an_empty_batch_counts_as_a_step():
    bags = pair()
    out = bags(kjt({"a": [], "b": []})).values()
    assert out.shape == (0, 7)
    out.sum().backward()
    assert bags.table("a").stats().step == 1
    assert len(bags.table("a")) == 0


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_empty_bags_give_zeros(pooling):
    bags = pair(pooling=pooling)
    out = bags(kjt({"a": [[], []], "b": [[], []]}, weights=1)).values()
    assert torch.equal(out, torch.zeros(2, 7))
    out.sum().backward()
    assert bags.table("a").stats().step == 1


def test_tensors_that_are_not_contiguous():
    bags, other = pair(), pair()
    wide = torch.tensor([[1, 2, 3, 5, 5], [0] * 5]).t()
    lengths = torch.tensor([2, 9, 1, 9, 0, 9, 2, 9])[::2]
    weights = torch.arange(10.0).reshape(5, 2)[:, 1]
    batch = shoal.KeyedJaggedTensor(["a", "b"], wide[:, 0], weights, lengths=lengths)
    same = kjt(TWO, weights={"a": [[1.0, 3.0], [5.0]], "b": [[], [7.0, 9.0]]})
    assert torch.equal(train_step(bags, batch), train_step(other, same))
    assert torch.equal(rows(bags, "a", [1, 2, 3]), rows(other, "a", [1, 2, 3]))


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(()).expand(2, 7),
        torch.arange(7.0).expand(2, 7),
        torch.arange(2.0)[:, None].expand(2, 7),
        torch.arange(14.0).reshape(7, 2).t(),
        torch.arange(28.0).reshape(2, 14)[:, ::2],
        torch.arange(28.0).reshape(2, 14)[:, 7:],
    ],
    ids=["scalar", "row", "column", "transposed", "strided", "sliced"],
)
def test_gradients_of_any_layout(gradient):
    one, other = pair(), pair()
    one(kjt(TWO)).values().backward(gradient)
    other(kjt(TWO)).values().backward(gradient.clone(memory_format=torch.contiguous_format))
    for table in "ab":
        assert torch.equal(rows(one, table, [1, 2, 3, 5]), rows(other, table, [1, 2, 3, 5]))


def test_a_gradient_of_another_type():
    one, other = pair(), pair()
    (one(kjt(TWO)).values().double() * 0.5).sum().backward()
    other(kjt(TWO)).values().backward(torch.full((2, 7), 0.5))
    assert torch.equal(rows(one, "a", [1, 2, 3]), rows(other, "a", [1, 2, 3]))


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_output_dtype_is_the_modules_and_rows_keep_theirs(dtype, output_dtype):
    tables = [Table("a", 4, dtype=dtype, init=shoal.Constant(0.25), optimizer=shoal.SGD(lr=0.25))]
    bags = shoal.EmbeddingBagCollection(tables, output_dtype=output_dtype)
    out = bags(kjt({"a": [[1, 2], [3]]})).values()
    assert out.dtype == output_dtype
    assert torch.equal(out.float(), torch.tensor([[0.5] * 4, [0.25] * 4]))
    out.sum().backward()
    assert not rows(bags, "a", [1, 2, 3]).any()
    sequences = shoal.EmbeddingCollection([Table("a", 4, pooling="none", dtype=dtype)], output_dtype=output_dtype)
    assert sequences(kjt({"a": [[1, 2], [3]]}))["a"].values().dtype == output_dtype


# ---- per-sample weights


def weighted(pooling, is_weighted=None, **settings):
    tables = [Table("a", 4, pooling=pooling, init=shoal.Normal(0, 1), **settings)]
    return shoal.EmbeddingBagCollection(tables, is_weighted)


def test_a_weighted_mean_divides_by_the_count():
    bags = shoal.EmbeddingBagCollection([Table("a", 2, pooling="mean", init=shoal.Constant(1.0))])
    out = bags(kjt({"a": [[1, 2], [3]]}, weights={"a": [[0.5, 1.0], [3.0]]})).values()
    assert torch.equal(out, torch.tensor([[0.75] * 2, [3.0] * 2]))


def test_is_weighted_says_whether_weights_are_used():
    batch = {"a": [[1, 2], [3]]}
    plain = weighted("sum")(kjt(batch)).values()
    doubled = kjt(batch, weights=2)
    assert torch.equal(weighted("sum")(doubled).values(), 2 * plain)
    assert torch.equal(weighted("sum", True)(doubled).values(), 2 * plain)
    assert torch.equal(weighted("sum", False)(doubled).values(), plain)
    insists = weighted("sum", True)
    before = memory(insists)
    with pytest.raises(InputError, match="wants weights"):
        insists(kjt(batch))
    assert_unchanged(insists, before)
    assert [weighted("sum", given).is_weighted() for given in (None, True, False)] == [True, True, False]
    with pytest.raises(ConfigError, match="is_weighted"):
        weighted("sum", "yes")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_the_gradient_of_weights_is_that_of_finite_differences(pooling, training):
    # Rows must not move between the two ends of a difference.
    bags = weighted(pooling, optimizer=shoal.SGD(lr=0.0)).train(training)
    batch = {"a": [[1, 2, 1], [], [3], [4, 5]]}
    weights = torch.randn(6)
    towards = torch.randn(4, 4)

    def loss(given):
        features = shoal.KeyedJaggedTensor(["a"], kjt(batch).values(), given, lengths=kjt(batch).lengths())
        return (bags(features).values() * towards).sum()

    given = weights.clone().requires_grad_()
    loss(given).backward()
    step = 0.125
    for at in range(6):
        moved = torch.zeros(6).index_fill(0, torch.tensor([at]), step)
        slope = (loss(weights + moved) - loss(weights - moved)) / (2 * step)
        torch.testing.assert_close(given.grad[at], slope.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_other_types_get_gradients_of_their_own(dtype):
    bags = weighted("sum")
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    batch = shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    bags(batch).values().sum().backward()
    assert weights.grad.dtype == dtype


def test_evaluation_gives_weights_a_gradient_and_keeps_nothing():
    bags = weighted("sum").eval()
    for _ in range(3):
        weights = torch.ones(3, requires_grad=True)
        batch = shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
        bags(batch).values().sum().backward()
        torch.testing.assert_close(weights.grad, rows(bags, "a", [1, 2, 3]).sum(1))
    assert len(bags.table("a")) == 0


def test_weights_reach_the_rows_gradients():
    bags = weighted("sum", optimizer=shoal.SGD(lr=1.0))
    first = rows(bags, "a", [1, 2, 3])
    weights = {"a": [[0.5, -2.0], [0.0]]}
    bags(kjt({"a": [[1, 2], [3]]}, weights=weights)).values().sum().backward()
    assert torch.equal(rows(bags, "a", [1, 2, 3]), first - torch.tensor([[0.5], [-2.0], [0.0]]))


# ---- around the module


def test_threads_do_not_change_the_result():
    states = []
    try:
        for threads in (1, 2, 5, None):
            shoal.set_num_threads(threads)
            bags = pair(optimizer=shoal.Adam(lr=0.1), dtype="bfloat16")
            for step in range(2):
                train_step(bags, random_kjt(["a", "b"], bags=3000, keys=500, seed=step), seed=step)
            states.append(bags.state_dict())
            assert shoal.get_num_threads() == (torch.get_num_threads() if threads is None else threads)
    finally:
        shoal.set_num_threads(None)
    assert all(torch.equal(value, state[name]) for state in states for name, value in states[0].items())


def test_a_bad_number_of_threads_is_refused():
    for threads in (0, -1, 1.5, "two", True):
        with pytest.raises(ConfigError, match="threads"):
            shoal.set_num_threads(threads)
    assert shoal.get_num_threads() == torch.get_num_threads()


def test_inference_mode():
    with torch.inference_mode():
        bags = pair()
        bags.eval()
        inferred = bags(kjt(TWO)).values()
    bags.train()
    assert torch.equal(train_step(bags, kjt(TWO)), inferred.flatten())
    assert len(bags.table("a")) == 3


def test_the_default_device_and_dtype_do_not_matter():
    plain, other = pair(), None
    batch, gradient = kjt(TWO), torch.ones(2, 7)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            other = pair()
            other(batch).values().backward(gradient)
            state = other.state_dict()
            keys = other.table("a").keys()
            other.table("a").assign(keys, other.table("a").lookup(keys))
            other.load_state_dict(state)
            other.eval()(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    plain(batch).values().backward(gradient)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_autocast_leaves_rows_and_output_alone():
    bags, other = pair(), pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = bags(kjt(TWO)).values()
    assert torch.equal(out, other(kjt(TWO)).values())


def test_it_shows_its_tables():
    bags = pair()
    train_step(bags, kjt(TWO))
    assert "a: dim=4, pooling=sum, features=['a'], optimizer=RowwiseAdagrad, rows=3" in repr(bags)
    assert [table.name for table in bags.embedding_bag_configs()] == ["a", "b"]
    assert list(bags.tables()) == ["a", "b"]
    assert list(bags.parameters()) == []
    assert list(bags.buffers()) == []
    assert bags.device == torch.device("cpu")
