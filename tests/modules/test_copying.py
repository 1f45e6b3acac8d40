"""deepcopy makes an independent collection; pickle is refused."""

import copy
import io

import pytest
import torch
from support.batches import assert_same_rows, kjt, random_kjt, train_step
from torch import nn

import shoal
from shoal.errors import ShoalError


def trained(steps=3, name=None):
    tables = [
        shoal.Table("item", 5, features=["item", "history"], optimizer=shoal.Adam(lr=0.1), dtype="bfloat16"),
        shoal.Table("user", 3, optimizer=shoal.SGD(lr=0.1, momentum=0.9)),
        shoal.Table("shop", 2, optimizer=None),
    ]
    bags = shoal.EmbeddingBagCollection(tables, seed=7, name=name)
    for step in range(steps):
        train_step(bags, batch(step), seed=step)
    return bags


def batch(seed):
    return random_kjt(["item", "history", "user", "shop"], keys=30, seed=seed)


def test_a_copy_continues_bit_for_bit_under_a_new_name():
    bags = trained()
    other = copy.deepcopy(bags)
    assert other.name != bags.name
    assert_same_rows(bags, other)
    for step in range(3, 6):
        assert torch.equal(train_step(bags, batch(step)), train_step(other, batch(step)))
    assert_same_rows(bags, other)


def test_a_copy_is_independent():
    bags = trained()
    before = bags.state_dict()
    other = copy.deepcopy(bags)
    train_step(other, batch(9))
    other.table("shop").assign([1], torch.ones(1, 2))
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    del bags
    train_step(other, batch(10))


def test_settings_are_copied_and_then_independent():
    bags = trained()
    bags.optimizer.param_groups[0]["lr"] = 0.5
    bags.state_dict_limit = "1GiB"
    other = copy.deepcopy(bags).eval()
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    assert other.state_dict_limit == 2**30
    assert bags.training
    assert not other.training
    other.optimizer.param_groups[0]["lr"] = 0.0
    other.train()
    assert bags.optimizer.param_groups[0]["lr"] == 0.5
    rows = other.table("item").lookup([1])
    train_step(other, kjt({"item": [[1]], "history": [[]], "user": [[]], "shop": [[]]}))
    assert torch.equal(other.table("item").lookup([1]), rows)


def test_a_copy_hears_the_same_scaler():
    bags = trained()
    bags.scaler = torch.amp.GradScaler("cpu")
    assert copy.deepcopy(bags).scaler is bags.scaler


def test_a_model_is_copied_whole_and_each_collection_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = trained(name="copied model")
            self.same = self.bags
            self.dense = nn.Linear(10, 1)

    model = Model()
    other = copy.deepcopy(model)
    assert other.bags is other.same
    assert other.bags.name != "copied model"
    assert_same_rows(model, other)


def test_a_copy_of_a_subclass_keeps_what_it_added():
    class Named(shoal.EmbeddingBagCollection):
        def __init__(self, tables):
            super().__init__(tables)
            self.comment = ["mine"]

    one = Named([shoal.Table("user", 3)])
    other = copy.deepcopy(one)
    assert type(other) is Named
    assert other.comment == ["mine"]
    assert other.comment is not one.comment


@pytest.mark.parametrize("attempt", [lambda bags: torch.save(bags, io.BytesIO()), copy.copy], ids=["save", "copy"])
def test_pickle_is_refused_and_says_what_to_do(attempt):
    with pytest.raises(ShoalError, match="state_dict"):
        attempt(trained())
    with pytest.raises(ShoalError, match="state_dict"):
        attempt(nn.Sequential(trained())[0])


def test_names_are_free_again_when_a_collection_is_gone():
    bags = trained(name="taken")
    with pytest.raises(shoal.errors.ConfigError, match="'taken'"):
        trained(name="taken")
    train_step(bags, batch(0))
    del bags
    trained(name="taken")


def test_a_collection_that_was_refused_keeps_no_name():
    for _ in range(2):
        try:
            shoal.EmbeddingBagCollection([shoal.Table("user", 3, pooling="none")], name="refused")
        except shoal.errors.ConfigError as error:
            assert "EmbeddingCollection" in str(error)
            shoal.EmbeddingBagCollection([shoal.Table("user", 3)], name="refused")
