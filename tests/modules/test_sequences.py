"""EmbeddingCollection: a row for every key."""

import pytest
import torch
from support.batches import kjt, train_step

import shoal

BATCH = {"a": [[1, 2], [], [1]], "b": [[], [5], [6, 7]]}


def sequences(**settings):
    tables = [
        shoal.Table("x", 4, features=["a", "b"], pooling="none", optimizer=shoal.SGD(lr=1.0)),
        shoal.Table("y", 3, features=["b"], pooling="none"),
    ]
    return shoal.EmbeddingCollection(tables, **settings)


def test_every_key_has_its_row_in_the_order_of_the_batch():
    module = sequences()
    out = module(kjt(BATCH))
    assert list(out) == ["a", "b@x", "b@y"]
    assert torch.equal(out["a"].values(), module.table("x").lookup([1, 2, 1]))
    assert torch.equal(out["b@y"].values(), module.table("y").lookup([5, 6, 7]))
    assert out["a"].lengths().tolist() == [2, 0, 1]
    assert out["b@x"].lengths().tolist() == [0, 1, 2]
    assert [len(bag) for bag in out["b@y"].to_dense()] == [0, 1, 2]


def test_gradients_of_repeated_keys_add_up():
    module = sequences()
    first = module.table("x").lookup([1, 2, 5])
    out = module(kjt(BATCH))
    (out["a"].values().sum() + 2 * out["b@x"].values().sum()).backward()
    assert torch.equal(module.table("x").lookup([1, 2, 5]), first - torch.tensor([[2.0], [1.0], [2.0]]))


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_outputs_may_carry_their_keys(by):
    out = sequences(need_indices=True)(kjt(BATCH, by=by))
    assert out["a"].weights().tolist() == [1, 2, 1]
    assert out["b@x"].weights().tolist() == [5, 6, 7]
    assert sequences()(kjt(BATCH))["a"].weights_or_none() is None


def test_weights_of_the_batch_are_left_alone():
    assert torch.equal(
        sequences()(kjt(BATCH, weights=3))["a"].values(),
        sequences()(kjt(BATCH))["a"].values(),
    )


@pytest.mark.parametrize("batch", [{"a": [], "b": []}, {"a": [[], []], "b": [[], []]}], ids=["no bags", "empty bags"])
def test_empty_batches(batch):
    module = sequences()
    out = module(kjt(batch))
    assert out["a"].values().shape == (0, 4)
    assert out["b@y"].lengths().tolist() == [0] * len(batch["a"])
    torch.cat([jagged.values().flatten() for jagged in out.values()]).sum().backward()
    assert module.table("x").stats().step == 1


def test_evaluation_changes_nothing():
    module = sequences()
    train_step(module, kjt(BATCH))
    before = module.state_dict()
    module.eval()
    out = module(kjt({"a": [[100]], "b": [[1]]}))
    assert not out["a"].values().requires_grad
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_it_tells_its_settings():
    module = sequences(need_indices=True)
    assert module.need_indices()
    assert module.embedding_names_by_table() == [["a", "b@x"], ["b@y"]]
    assert [table.name for table in module.embedding_configs()] == ["x", "y"]
