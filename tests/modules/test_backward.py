"""One backward for each forward, in any order; what may happen between the two; nothing leaks."""

import gc
import os

import pytest
import torch
from support.batches import assert_same_rows, assert_unchanged, kjt, memory, random_kjt, train_step
from support.inside import group_of, live_leases_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import BackwardError, CapacityError

BATCH = {"a": [[1, 2], [3]]}


def sgd(lr=1.0, **settings):
    return shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.SGD(lr=lr), **settings)])


def sequences():
    return shoal.EmbeddingCollection([shoal.Table("a", 4, pooling="none", optimizer=shoal.SGD(lr=1.0))])


def output(module, batch):
    out = module(kjt(batch))
    return out["a"].values() if isinstance(out, dict) else out.values()


# ---- twice


@pytest.mark.parametrize("make", [sgd, sequences])
@pytest.mark.parametrize("retain", [True, False])
def test_a_second_backward_is_refused_and_changes_nothing(make, retain):
    module = make()
    loss = output(module, BATCH).sum()
    loss.backward(retain_graph=retain)
    before = memory(module)
    with pytest.raises(BackwardError, match="one backward for each forward"):
        loss.backward()
    assert_unchanged(module, before)
    output(module, BATCH).sum().backward()


def test_a_backward_that_failed_can_be_repeated():
    bags = sgd()
    out = output(bags, BATCH)
    with pytest.raises(shoal.errors.NonFiniteError):
        out.backward(torch.full((2, 4), float("nan")), retain_graph=True)
    out.backward(torch.ones(2, 4))
    assert bags.table("a").stats().step == 1


@pytest.mark.parametrize("make", [sgd, sequences])
@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_a_gradient_of_the_gradient_is_refused(make):
    module = make()
    scale = torch.ones((), requires_grad=True)
    (output(module, BATCH) * scale).sum().backward(create_graph=True)
    with pytest.raises(BackwardError, match="one backward for each forward"):
        scale.grad.backward()
    scale.grad = None  # or it would keep the graph


def test_gradients_of_other_tensors_alone_update_no_row():
    bags = sgd()
    scale = torch.ones((), requires_grad=True)
    out = output(bags, BATCH)
    before = memory(bags)
    (gradient,) = torch.autograd.grad((out * scale).sum(), scale)
    assert torch.equal(gradient, out.detach().sum())
    assert_unchanged(bags, before)


def test_a_gradient_of_the_weights_gradient_is_refused():
    bags = sgd()
    weights = torch.ones(3, requires_grad=True)
    batch = shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    (first,) = torch.autograd.grad((bags(batch).values() ** 2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


# ---- accumulation and order


def test_each_backward_updates_when_gradients_accumulate():
    bags, dense = sgd(), nn.Linear(4, 1)
    for step in range(1, 4):
        dense(output(bags, BATCH)).sum().backward()
        assert bags.table("a").stats().step == step
    assert torch.equal(bags.table("a").scores([1]), torch.tensor([2.0], dtype=torch.float64))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_forwards_may_wait_for_their_backwards(order):
    bags, other = sgd(), sgd()
    batches = [{"a": [[1, 2], [3]]}, {"a": [[2], [4, 5]]}]
    gradients = [torch.randn(2, 4) for _ in batches]
    outs = [output(bags, batch) for batch in batches]
    for at in order:
        outs[at].backward(gradients[at])
    # SGD adds up: the order does not matter but for rounding, and forwards do not change rows.
    for at in order:
        output(other, batches[at]).backward(gradients[at])
    torch.testing.assert_close(bags.table("a").lookup(range(6)), other.table("a").lookup(range(6)), rtol=0, atol=0)
    assert bags.table("a").stats().step == 2


def test_losses_of_two_forwards_in_one_backward_are_two_steps():
    bags = sgd()
    first = bags.table("a").lookup([1])
    (output(bags, {"a": [[1]]}).sum() + output(bags, {"a": [[1]]}).sum()).backward()
    assert bags.table("a").stats().step == 2
    torch.testing.assert_close(bags.table("a").lookup([1]), first - 2)


def test_a_backward_of_a_part_of_the_output_is_the_whole_step():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 2)])
    first = bags.table("b").lookup([1])
    bags(kjt({"a": [[1]], "b": [[1]]}))["a"].sum().backward()
    assert torch.equal(bags.table("b").lookup([1]), first)
    assert [bags.table(name).stats().step for name in "ab"] == [1, 1]


def test_sequences_whose_outputs_are_partly_used():
    module = shoal.EmbeddingCollection([shoal.Table(name, 4, pooling="none") for name in "ab"])
    rows = module.table("b").lookup([1])
    module(kjt({"a": [[1]], "b": [[1]]}))["a"].values().sum().backward()
    assert torch.equal(module.table("b").lookup([1]), rows)
    assert [module.table(name).stats().step for name in "ab"] == [1, 1]


# ---- checkpointing


class Model(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        torch.manual_seed(1)
        self.bags = shoal.EmbeddingBagCollection(
            [shoal.Table("a", 4, optimizer=shoal.Adam(lr=0.1), dtype="bfloat16"), shoal.Table("b", 3)]
        )
        self.dense = nn.Linear(7, 2)
        self.top = nn.Linear(2, 1)
        self.checkpointed = checkpointed

    def bottom(self, batch, dense):
        return torch.relu(self.dense(self.bags(batch).values()) + dense)

    def forward(self, batch, dense):
        if self.checkpointed is None:
            return self.top(self.bottom(batch, dense)).sum()
        return self.top(checkpoint(self.bottom, batch, dense, use_reentrant=self.checkpointed)).sum()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_updates_once_and_gives_the_same_rows(reentrant):
    plain, other = Model(), Model(checkpointed=reentrant)
    for step in range(4):
        batch = random_kjt(["a", "b"], seed=step)
        losses = [model(batch, torch.ones(4, 2, requires_grad=True)) for model in (plain, other)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert other.bags.table("a").stats().step == step + 1
        assert len(live_leases_of(other.bags)) <= 1
    assert_same_rows(plain, other)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_what_fails_while_a_checkpoint_is_run_again_is_not_hidden():
    bags = sgd(tiers=[shoal.Dram("4MiB")])
    again = iter([False, True])

    def bottom(x):
        out = output(bags, {"a": [list(range(10**6))]} if next(again) else BATCH)
        return out[:1] * x

    loss = checkpoint(bottom, torch.ones(1, 4, requires_grad=True), use_reentrant=False).sum()
    with pytest.raises(CapacityError, match="Dram"):
        loss.backward()


# ---- leases


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("mode", ["train", "eval with weights"])
def test_forwards_without_a_backward_do_not_leak(mode):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 64)])
    bags.train(mode == "train")
    batch = random_kjt(["a"], bags=2000, keys=500, weighted=mode != "train")
    weights = batch.weights_or_none()
    if weights is not None:
        weights.requires_grad_()
    for step in range(1000):
        out = bags(batch)
        if step == 100:
            gc.collect()
            before = resident_bytes()
    assert len(live_leases_of(bags)) <= 2
    assert resident_bytes() - before < 30 * 2**20  # a batch is over half a megabyte
    assert bags.table("a").stats().step == 0
    out.values().sum().backward()


def test_a_forward_that_is_dropped_lets_its_rows_go():
    bags = sgd()
    out = output(bags, BATCH)
    bags.table("a").erase([1])
    assert group_of(bags).newest_lease is not None
    del out
    bags.table("a").erase([99])
    assert group_of(bags).newest_lease is None


def test_a_graph_that_is_kept_after_its_backward_does_no_harm():
    bags = sgd()
    kept = []
    for _ in range(5):
        out = output(bags, BATCH)
        out.sum().backward(retain_graph=True)
        kept.append(out)
    bags.table("a").erase([1])
    output(bags, BATCH).sum().backward()
    assert bags.table("a").stats().step == 6


# ---- between forward and backward


def test_erase_drops_the_gradient_and_counts_it():
    bags = sgd()
    out = output(bags, {"a": [[1, 2], [1]]})
    rows = bags.table("a").lookup([2])
    assert bags.table("a").erase([1]) == 1
    assert bags.table("a").keys().tolist() == [2]
    out.sum().backward()
    assert bags.table("a").keys().tolist() == [2]
    assert torch.equal(bags.table("a").lookup([2]), rows - 1)
    assert bags.table("a").stats().counters["dropped_gradients"] == 1


def test_a_key_that_comes_back_after_an_erase_gets_a_fresh_row():
    bags = sgd()
    born = bags.table("a").lookup([1])
    train_step(bags, kjt({"a": [[1]]}))
    assert not torch.equal(bags.table("a").lookup([1]), born)
    out = output(bags, {"a": [[1]]})
    bags.table("a").erase([1])
    again = output(bags, {"a": [[1]]})
    assert torch.equal(again.detach(), born)
    out.sum().backward()  # the gradient of the row that was erased does not reach the new one
    assert torch.equal(bags.table("a").lookup([1]), born)
    again.sum().backward()
    assert torch.equal(bags.table("a").lookup([1]), born - 1)


def test_a_slot_is_used_again_only_when_its_lease_has_ended():
    bags = sgd()
    out = output(bags, {"a": [[1]]})
    bags.table("a").erase([1])
    # These would take the slot of key 1, were it free, and get its gradient.
    bags(kjt({"a": [list(range(10, 20))]}))
    rows = bags.table("a").lookup(range(10, 20))
    out.sum().backward()
    assert torch.equal(bags.table("a").lookup(range(10, 20)), rows)
    del out
    storage = bags.table("a").stats().storage_bytes
    bags(kjt({"a": [[30]]}))
    assert bags.table("a").stats().storage_bytes == storage


def test_assign_between_the_two_is_what_the_update_lands_on():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.SGD(lr=1.0, momentum=0.5))])
    train_step(bags, kjt({"a": [[1]]}))
    momentum = bags.table("a").state([1])["momentum"]
    out = output(bags, {"a": [[1]]})
    bags.table("a").assign([1], torch.full((1, 4), 7.0))
    assert torch.equal(bags.table("a").state([1])["momentum"], momentum)
    out.sum().backward()
    moved = 0.5 * momentum + 1
    torch.testing.assert_close(bags.table("a").state([1])["momentum"], moved)
    torch.testing.assert_close(bags.table("a").lookup([1]), 7.0 - moved)


def test_evaluation_between_the_two_sees_rows_as_they_are():
    bags = sgd()
    out = output(bags, BATCH)
    bags.eval()
    assert torch.equal(output(bags, BATCH), out.detach())
    bags.train()
    out.sum().backward()
    assert bags.table("a").stats().step == 1


def test_train_and_eval_belong_to_the_forward_not_to_the_backward():
    bags = sgd()
    out = output(bags, BATCH)
    bags.eval()
    out.sum().backward()
    assert bags.table("a").stats().step == 1


def test_an_unused_forward_is_a_use_of_its_keys():
    bags = sgd()
    for _ in range(3):
        train_step(bags, kjt({"a": [[1]]}))
    out = output(bags, {"a": [[2], [1]]})
    del out
    output(bags, {"a": [[5]]})
    assert bags.table("a").scores([1, 2, 5]).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("module", [sgd, sequences])
def test_saved_tensors_may_be_copied_by_hooks(module):
    module = module()
    first = module.table("a").lookup([1, 2, 3])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone().numpy(), torch.from_numpy):
        out = output(module, BATCH)
    gc.collect()
    out.sum().backward()
    torch.testing.assert_close(module.table("a").lookup([1, 2, 3]), first - 1)
    assert module.table("a").stats().step == 1
