"""NaN and infinity in gradients never reach a row."""

import pytest
import torch
from support.batches import assert_unchanged, kjt, memory, train_step

import shoal
from shoal.errors import NonFiniteError, OptimizerWarning

BATCH = {"a": [[1, 2], [3]], "b": [[4], [5]], "c": [[6], [6]]}


def trained(kind=shoal.EmbeddingBagCollection, clip=None, other_clip=None, **settings):
    clip, other_clip = clip or shoal.Clip(), other_clip or shoal.Clip()
    pooling = "none" if kind is shoal.EmbeddingCollection else "sum"
    bags = kind(
        [
            shoal.Table("one", 4, features=["a", "b"], optimizer=shoal.Adagrad(clip=clip), pooling=pooling),
            shoal.Table("two", 3, features=["c"], optimizer=shoal.SGD(clip=other_clip), pooling=pooling, **settings),
        ]
    )
    train_step(bags, kjt(BATCH))
    return bags


def gradient(value, column):
    grad = torch.ones(2, 11)
    grad[1, column] = value
    return grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("column", "table", "feature"), [(0, "one", "a"), (7, "one", "b"), (10, "two", "c")])
def test_it_raises_names_table_and_feature_and_changes_nothing(value, column, table, feature):
    bags = trained()
    out = bags(kjt(BATCH)).values()
    before = memory(bags)
    with pytest.raises(NonFiniteError, match=f"reached '{table}' through '{feature}'"):
        out.backward(gradient(value, column))
    assert_unchanged(bags, before)
    train_step(bags, kjt(BATCH))


def test_the_overflow_of_a_scaled_loss_says_what_the_scaler_needs():
    bags, scaler = trained(), torch.amp.GradScaler("cpu", init_scale=1e30)
    with (
        pytest.warns(OptimizerWarning, match=r"Set bags\.scaler = scaler"),
        pytest.raises(NonFiniteError, match=r"where a GradScaler scales the loss, set bags\.scaler = scaler"),
    ):
        scaler.scale(1e20 * bags(kjt(BATCH)).values().sum()).backward()


def test_sequences_raise_too():
    sequences = trained(shoal.EmbeddingCollection)
    out = sequences(kjt(BATCH))
    before = memory(sequences)
    with pytest.raises(NonFiniteError, match="reached 'one' through 'b'"):
        (out["a"].values().sum() + (out["b"].values() * float("inf")).sum()).backward()
    assert_unchanged(sequences, before)


@pytest.mark.parametrize("kind", [shoal.EmbeddingBagCollection, shoal.EmbeddingCollection])
def test_skip_leaves_the_whole_backward_out_and_counts_it(kind):
    skip = shoal.Clip(nonfinite="skip")
    bags = trained(kind, clip=skip, other_clip=skip)
    out = bags(kjt(BATCH))
    rows = {name: value for name, value in bags.state_dict().items() if "score" not in name}
    values = (
        torch.cat([jagged.values().flatten() for jagged in out.values()]) if isinstance(out, dict) else out.values()
    )
    (values * float("nan")).sum().backward()
    assert all(torch.equal(bags.state_dict()[name], value) for name, value in rows.items())
    for name in ("one", "two"):
        stats = bags.table(name).stats()
        assert stats.step == 1  # a skipped backward is no step
        assert stats.counters["skipped_backwards"] == 1
        assert stats.counters["steps"] == 1
    train_step(bags, kjt(BATCH))
    assert bags.table("one").stats().step == 2


def test_a_table_that_raises_is_heard_beside_one_that_skips():
    bags = trained(clip=shoal.Clip(nonfinite="skip"))
    out = bags(kjt(BATCH)).values()
    out.backward(gradient(float("nan"), 0))
    assert bags.table("one").stats().counters["skipped_backwards"] == 1
    out = bags(kjt(BATCH)).values()
    before = memory(bags)
    with pytest.raises(NonFiniteError, match="reached 'two' through 'c'"):
        out.backward(torch.full((2, 11), float("nan")))
    assert_unchanged(bags, before)


def test_weights_that_become_infinite_after_the_forward_are_heard_in_the_backward():
    bags = trained()
    batch = kjt(BATCH, weights=1.0)
    out = bags(batch).values()
    batch.weights().data.fill_(float("inf"))  # which autograd does not notice
    before = memory(bags)
    with pytest.raises(NonFiniteError, match="reached 'one', 'two'"):
        out.backward(torch.ones(2, 11))
    assert_unchanged(bags, before)


def test_what_does_not_reach_a_table_that_trains_is_let_through():
    bags = shoal.EmbeddingBagCollection(
        [
            shoal.Table("trains", 4, features=["a"], optimizer=shoal.SGD(lr=1.0)),
            shoal.Table("fixed", 4, features=["b"], optimizer=None),
            shoal.Table("read", 4, features=[shoal.Feature("c", mode="read")]),
        ]
    )
    first = bags.table("trains").lookup([3])
    grad = torch.ones(2, 12)
    grad[:, 4:] = float("nan")
    bags(kjt(BATCH)).values().backward(grad)
    assert torch.equal(bags.table("trains").lookup([3]), first - 1)


def test_sums_that_overflow_leave_their_rows_alone_and_raise():
    bags = shoal.EmbeddingBagCollection([shoal.Table("one", 4, features=["a"], optimizer=shoal.SGD(lr=1e-12))])
    bags(kjt({"a": [[1, 1], [2]]}))
    rows = bags.table("one").lookup([1, 2])
    out = bags(kjt({"a": [[1, 1], [2]]})).values()
    with pytest.raises(NonFiniteError, match="1 of 'one'"):
        out.backward(torch.tensor([[3e38], [4e14]]).expand(2, 4))
    after = bags.table("one").lookup([1, 2])
    assert torch.equal(after[0], rows[0])
    assert torch.isfinite(after).all()
    assert not torch.equal(after[1], rows[1])
    assert bags.table("one").stats().counters["skipped_rows"] == 1


@pytest.mark.parametrize("setting", [float("nan"), float("inf"), -0.1, "fast", None])
def test_an_impossible_learning_rate_is_refused_before_any_row_changes(setting):
    bags = trained()
    bags.optimizer.param_groups[1]["lr"] = setting
    out = bags(kjt(BATCH)).values()
    before = memory(bags)
    with pytest.raises(shoal.errors.ConfigError, match="lr"):
        out.sum().backward()
    assert_unchanged(bags, before)
    bags.optimizer.param_groups[1]["lr"] = 0.1
    train_step(bags, kjt(BATCH))


def test_a_gradient_whose_square_overflows_does_not_poison_the_state():
    for optimizer in (shoal.Adagrad(), shoal.RowwiseAdagrad(), shoal.Adam(), shoal.Ftrl()):
        bags = shoal.EmbeddingBagCollection([shoal.Table("one", 4, features=["a"], optimizer=optimizer)])
        out = bags(kjt({"a": [[1], [2]]})).values()
        with pytest.raises(NonFiniteError, match="2 of 'one'"):
            out.backward(torch.full((2, 4), 1e30))
        bags.load_state_dict(bags.state_dict())


def test_a_huge_gradient_is_clipped_before_it_is_squared():
    optimizer = shoal.Adagrad(lr=1.0, clip=shoal.Clip(value=1.0))
    bags = shoal.EmbeddingBagCollection([shoal.Table("one", 4, features=["a"], optimizer=optimizer)])
    bags(kjt({"a": [[1], [2]]})).values().backward(torch.full((2, 4), 1e30))
    assert torch.equal(bags.table("one").state([1, 2])["sum"], torch.ones(2, 4))


@pytest.mark.parametrize("huge", [1e20, 3e38])
def test_a_huge_gradient_is_clipped_to_its_norm(huge):
    optimizer = shoal.SGD(lr=1.0, clip=shoal.Clip(norm=1.0))
    bags = shoal.EmbeddingBagCollection(
        [shoal.Table("one", 4, features=["a"], optimizer=optimizer, init=shoal.Zeros())]
    )
    bags(kjt({"a": [[1]]})).values().backward(torch.full((1, 4), huge))
    torch.testing.assert_close(bags.table("one").lookup([1]), torch.full((1, 4), -0.5))


def test_a_huge_row_is_brought_down_to_max_norm():
    optimizer = shoal.SGD(lr=1e5, max_norm=1.0)
    bags = shoal.EmbeddingBagCollection(
        [shoal.Table("one", 4, features=["a"], optimizer=optimizer, init=shoal.Zeros())]
    )
    bags(kjt({"a": [[1]]})).values().backward(torch.full((1, 4), 4e14))
    torch.testing.assert_close(bags.table("one").lookup([1]), torch.full((1, 4), -0.5))


@pytest.mark.parametrize("huge", [0.0, 1e-30, 1e-20, 4e14])
@pytest.mark.parametrize(
    "optimizer",
    [
        shoal.SGD(lr=9e5, momentum=0.9),
        shoal.Adagrad(lr=9e5, eps=1e-15),
        shoal.RowwiseAdagrad(lr=9e5, eps=1e-15),
        shoal.Adam(lr=9e5, eps=1e-15),
        shoal.Adam(lr=9e5, eps=1e-15, betas=(0.9, 0.0)),
        shoal.AdamW(lr=200.0, eps=1e-15),
        shoal.PartialRowwiseAdam(lr=9e5, eps=1e-15),
        shoal.Ftrl(lr=1e-6, initial=0.0, beta=1e-15),
        shoal.Ftrl(lr=9e5, initial=1e-15),
    ],
)
def test_no_accepted_setting_makes_finite_gradients_poison_a_row(optimizer, huge):
    bags = shoal.EmbeddingBagCollection([shoal.Table("one", 4, features=["a"], optimizer=optimizer)])
    for value in (huge, -huge, 0.0, huge):
        bags(kjt({"a": [[1]]})).values().backward(torch.full((1, 4), value))
    bags.load_state_dict(bags.state_dict())  # refuses what is not finite


def test_what_reaches_only_empty_bags_does_not_count():
    bags = trained()
    grad = torch.ones(2, 11)
    grad[1, :4] = float("nan")
    bags(kjt({"a": [[1, 2], []], "b": [[4], [5]], "c": [[6], [6]]})).values().backward(grad)
    assert bags.table("one").stats().step == 2
