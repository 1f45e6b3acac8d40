import torch

import shoal
from examples.hashed_bags import HashedBags


def single(ids):
    return shoal.KeyedJaggedTensor(["item"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def hashed(rows):
    return HashedBags({"item": rows}, {"item": ["item"]}, dim=4, lr=0.1, init=0.01, seed=0)


def test_ids_that_collide_share_a_row():
    bags = hashed(1)
    before = bags(single([5]))["item"].detach()
    bags(single([9]))["item"].sum().backward()
    after = bags(single([5]))["item"].detach()
    assert (after != before).all()


def test_ids_spread_over_the_rows_however_they_are_numbered():
    bags = hashed(1000)
    for ids in (torch.arange(1000), torch.arange(1000) * 1000, -torch.arange(1000) << 40):
        distinct = len(bags(single(ids.tolist()))["item"].unique(dim=0))
        assert 580 < distinct < 680  # 1000 (1 - 1/e) = 632


def test_rows_learn_by_the_same_rule_as_shoals():
    ids = [3, -7, 3, 2**62, 12]
    bags = hashed(1 << 16)
    table = shoal.Table("item", dim=4, optimizer=shoal.RowwiseAdagrad(lr=0.1))
    ours = shoal.EmbeddingBagCollection([table], seed=1)
    ours.table("item").assign(torch.tensor(ids), bags(single(ids))["item"].detach())
    for step in range(5):
        gradient = torch.randn(len(ids), 4) * (step + 1)
        for module in (bags, ours):
            (module(single(ids))["item"] * gradient).sum().backward()
        torch.testing.assert_close(bags(single(ids))["item"], ours(single(ids))["item"])
    assert bags.row_bytes(4) == table.row_bytes
