import pytest
import torch

import shoal
from examples.dlrm import Batch, Dlrm
from examples.hashed_bags import HashedBags

FEATURES = {"user": ["user"], "item": ["item", "history"]}


def bags_of(kind, dim=4):
    if kind == "hashed":
        return HashedBags({"user": 1000, "item": 1000}, FEATURES, dim=dim, lr=0.1, init=0.1, seed=0)
    init = shoal.Uniform(-0.1, 0.1)
    return shoal.EmbeddingBagCollection(
        [
            shoal.Table(name, dim=dim, features=features, pooling="mean", init=init)
            for name, features in FEATURES.items()
        ]
    )


def batch_of(samples=3):
    torch.manual_seed(0)
    lengths = torch.tensor([1] * (2 * samples) + list(range(samples)))
    ids = shoal.KeyedJaggedTensor(["user", "item", "history"], torch.arange(int(lengths.sum())), lengths=lengths)
    return Batch(torch.ones(samples), torch.randn(samples, 2), ids, time=0.0)


@pytest.mark.parametrize("kind", ["hashed", "shoal"])
def test_the_top_sees_the_dense_vector_and_the_dot_of_every_pair(kind):
    batch = batch_of()
    model = Dlrm(bags_of(kind), features=3, dense=2, dim=4)
    logits = model(batch)
    rows = model.bags(batch.ids).values()
    for sample in range(3):
        dense = model.bottom(batch.dense[sample])
        vectors = [dense, *rows[sample].split(4)]
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i + 1, 4)]
        torch.testing.assert_close(logits[sample], model.top(torch.cat([dense, torch.stack(dots)]))[0])


@pytest.mark.parametrize("kind", ["hashed", "shoal"])
def test_backward_updates_the_rows_and_leaves_the_dense_part_to_its_optimizer(kind):
    batch = batch_of()
    model = Dlrm(bags_of(kind), features=3, dense=2, dim=4)
    rows, dense = model.bags(batch.ids).values().detach(), [p.detach().clone() for p in model.dense_parameters()]
    model(batch).sum().backward()
    moved = (model.bags(batch.ids).values().detach() != rows).view(3, 3, 4).any(2)
    assert moved.tolist() == [[True, True, False], [True, True, True], [True, True, True]]  # the first history is empty
    assert all(torch.equal(now, then) for now, then in zip(model.dense_parameters(), dense, strict=True))
    assert all(parameter.grad is not None for parameter in model.dense_parameters())
