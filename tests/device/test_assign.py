"""Assign on a device leaves alone what the loss did not touch, as in host memory."""

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_tables import Twins

import shoal
from shoal import Assign, Feature, Table

RULES = ["last", "first", "mean"]


def table(rule, dim=3, pooling="none", **settings):
    assign = Assign(duplicates=rule)
    return Table("t", dim, **{"pooling": pooling, "optimizer": assign, "init": shoal.Normal(0, 1), **settings})


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_whose_gradients_are_zeros(rule, pooling):
    kind = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
    features = ["a", Feature("b", mode="write"), Feature("c", mode="read")]
    other = Table("u", 5, features=["a"], pooling=pooling, dtype="bfloat16", optimizer=Assign(duplicates=rule))
    twins = Twins(table(rule, pooling=pooling, features=features), other, kind=kind)
    for step, keep in enumerate([0.5, 0.0]):
        batch = random_kjt(["a", "b", "c"], keys=9, seed=step, weighted=pooling != "none")
        if pooling != "none":
            batch.weights()[::3] = 0.0
        twins.step(batch, seed=step, keep=keep)
        twins.check()


# A row of many items is cut into pieces of 32, whose sums are added up some at a time: 4 of rows that are this wide.
TOUCHED = [(130, []), (134, [31, 32]), (131, [40, 95]), (129, [128]), (40, [33]), (3, [1]), (1, [])]


@pytest.mark.parametrize("rule", RULES)
def test_keys_whose_few_gradients_lie_in_any_of_their_pieces(rule):
    twins = Twins(table(rule, 520), kind=shoal.EmbeddingCollection)
    keys = [key for key, (count, _) in enumerate(TOUCHED) for _ in range(count)]
    gradient = torch.zeros(len(keys), 520)
    for key, (_, touched) in enumerate(TOUCHED):
        for at in touched:
            gradient[keys.index(key) + at] = torch.linspace(-1, 1, 520) * (at + 1)
    for module in (twins.host, twins.device):
        out = module(kjt({"t": [keys]}).to(module.device))["t"].values()
        out.backward(gradient.to(module.device))
    twins.check()


@pytest.mark.parametrize("rule", RULES)
def test_a_table_whose_output_is_not_in_the_loss_keeps_its_rows(rule):
    settings = {"pooling": "sum", "init": shoal.Normal(0, 1)}
    twins = Twins(table(rule, **settings), Table("u", 4, optimizer=Assign(duplicates=rule), init=shoal.Normal(0, 1)))
    before = twins.device.table("u").lookup([1, 2]).clone()
    for module in (twins.host, twins.device):
        module(kjt({"t": [[1, 1], [2]], "u": [[1], [2]]}).to(module.device))["t"].sum().backward()
    twins.check(exact=True)
    assert torch.equal(twins.device.table("u").lookup([1, 2]), before)
    assert twins.device.table("t").lookup([1, 2]).eq(1.0).all()
