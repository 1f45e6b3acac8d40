"""What may happen between a forward on the device and its backward."""

import copy
import gc

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, Twins, assert_alike, on_device, outputs, placed, train
from support.inside import live_leases_of, tables_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal import Table
from shoal.errors import BackwardError

BATCH = {"a": [[1, 2], [3]]}


def sgd(lr=1.0, **settings):
    return on_device(Table("a", 4, optimizer=shoal.SGD(lr=lr), **settings))


def output(module, batch=BATCH):
    return module(kjt(batch).to(module.device)).values()


@pytest.mark.parametrize("retain", [True, False])
def test_a_second_backward_is_refused_and_changes_nothing(retain):
    bags = sgd()
    loss = output(bags).sum()
    loss.backward(retain_graph=retain)
    before = bags.state_dict()
    with pytest.raises(BackwardError, match="one backward for each forward"):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    output(bags).sum().backward()
    assert bags.table("a").stats().step == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_forwards_may_wait_for_their_backwards(order):
    twins = Twins(Table("a", 4, optimizer=shoal.Adagrad(lr=0.1)), Table("b", 3))
    batches = [random_kjt(["a", "b"], seed=seed) for seed in (0, 1)]
    for module in (twins.host, twins.device):
        outs = [outputs(module(placed(batch, module.device)))[0] for batch in batches]
        for at in order:
            outs[at].sum().backward()
    twins.check()
    assert twins.device.table("a").stats().step == 2


def test_losses_of_two_forwards_in_one_backward_are_two_steps():
    bags = sgd()
    first = bags.table("a").lookup([1])
    (output(bags, {"a": [[1]]}).sum() + output(bags, {"a": [[1]]}).sum()).backward()
    assert bags.table("a").stats().step == 2
    torch.testing.assert_close(bags.table("a").lookup([1]), first - 2)


def test_forwards_without_a_backward_score_their_rows():
    twins = Twins(Table("a", 4), Table("b", 3, optimizer=shoal.Adam(lr=0.1)))
    batches = [random_kjt(["a", "b"], seed=seed, keys=8) for seed in range(4)]
    for module in (twins.host, twins.device):
        train(module, batches[0])
        module(placed(batches[1], module.device))  # dropped: its end is noted at the next call
        with torch.no_grad():
            module(placed(batches[2], module.device))
        train(module, batches[3])
    twins.check()


def test_a_part_of_the_output_is_the_whole_step():
    twins = Twins(Table("a", 4), Table("b", 2))
    for module in (twins.host, twins.device):
        module(kjt({"a": [[1]], "b": [[1]]}).to(module.device))["a"].sum().backward()
    twins.check()


def test_sequences_whose_outputs_are_partly_used():
    twins = Twins(Table("a", 4, pooling="none"), Table("b", 4, pooling="none"), kind=shoal.EmbeddingCollection)
    for module in (twins.host, twins.device):
        module(kjt({"a": [[1]], "b": [[1, 2]]}).to(module.device))["b"].values().sum().backward()
    twins.check()


# ---- erasing


def test_a_row_erased_between_forward_and_backward_learns_nothing():
    twins = Twins(Table("a", 4, optimizer=shoal.SGD(lr=1.0)))
    for module in (twins.host, twins.device):
        out = output(module)
        assert module.table("a").erase([2, 3]) == 2
        out.sum().backward()
    twins.check()
    twins.device.check()
    assert [stats.counters["dropped_gradients"] for stats in twins.each(lambda m: m.table("a").stats())] == [2, 2]


def test_a_row_erased_and_born_again_before_the_backward_learns_nothing():
    twins = Twins(Table("a", 4, optimizer=shoal.SGD(lr=1.0)))
    for module in (twins.host, twins.device):
        out = output(module)
        module.table("a").erase([2])
        output(module, {"a": [[2, 4]]})
        out.sum().backward()
        output(module, {"a": [[5, 6, 2]]}).sum().backward()
    twins.check()


def test_a_forward_before_a_load_has_no_backward():
    bags = sgd()
    out = output(bags)
    bags.load_state_dict(bags.state_dict())
    with pytest.raises(BackwardError, match="loaded"):
        out.sum().backward()
    output(bags).sum().backward()


def test_nothing_is_kept_after_the_graph_is_gone():
    bags = sgd()
    for _ in range(3):
        output(bags)
    gc.collect()
    bags.table("a").erase([1])
    assert not live_leases_of(bags)
    assert not any(table.has_limbo for table in tables_of(bags))


# ---- compared with torch


class Model(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(1)
        self.bags = on_device(Table("a", 4, optimizer=shoal.Adam(lr=0.1)), Table("b", 3))
        self.top = nn.Linear(7, 1).to(DEVICE)
        self.checkpointed = checkpointed

    def bottom(self, batch):
        return torch.relu(self.bags(batch).values())

    def forward(self, batch):
        bottom = checkpoint(self.bottom, batch, use_reentrant=False) if self.checkpointed else self.bottom(batch)
        return self.top(bottom).sum()


def test_checkpointing_updates_once_and_gives_the_same_rows():
    plain, other = Model(False), Model(True)
    for step in range(2):
        batch = random_kjt(["a", "b"], seed=step).to(DEVICE)
        for model in (plain, other):
            model(batch).backward()
    wanted = plain.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())
    assert other.bags.table("a").stats().step == 2


def test_a_copy_lives_on_its_own():
    bags = on_device(Table("a", 4, optimizer=shoal.Adam(lr=0.1)), Table("b", 3, dtype="float16"))
    train(bags, random_kjt(["a", "b"]))
    bags.optimizer.param_groups[0]["lr"] = 0.5
    other = copy.deepcopy(bags)
    before = bags.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    train(other, random_kjt(["a", "b"], seed=1), seed=1)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    train(bags, random_kjt(["a", "b"], seed=1), seed=1)
    after = bags.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in other.state_dict().items())
    assert other.device == bags.device


def test_a_gradient_scaler_unscales_and_skips():
    bags, plain = sgd(), sgd()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=100)
    bags.scaler = scaler
    scaler.scale(output(bags).sum()).backward()
    scaler.step(bags.optimizer)
    scaler.update()
    output(plain).sum().backward()
    before = bags.table("a").lookup([1, 2, 3])
    assert torch.equal(before, plain.table("a").lookup([1, 2, 3]))
    scaler.scale(output(bags).sum() * float("inf")).backward()
    scaler.step(bags.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    stats = bags.table("a").stats()
    assert (stats.step, stats.counters["skipped_backwards"]) == (1, 1)
    assert torch.equal(bags.table("a").lookup([1, 2, 3]), before)
    assert bags.table("a").stats().step == 1
    bags.check()


def test_gradients_of_sequences_may_lie_anyhow():
    tables = [Table("a", 4, pooling="none"), Table("b", 4, pooling="none")]
    modules = [on_device(*tables, kind=shoal.EmbeddingCollection), shoal.EmbeddingCollection(tables, seed=7)]
    for module in modules:
        outs = module(placed(random_kjt(["a", "b"], bags=8), module.device))
        tensors = [jagged.values() for jagged in outs.values()]
        grads = [torch.arange(float(one.numel())).view(4, -1).t().to(one.device) for one in tensors]
        assert not any(grad.is_contiguous() for grad in grads)
        torch.autograd.backward(tensors, grads)
    assert_alike(*modules)
