"""bags.scaler: rows see unscaled gradients, and an overflow is skipped whole and reported."""

import pytest
import torch
from support.batches import assert_same_rows, kjt, random_kjt
from torch import nn

import shoal
from shoal.errors import ConfigError, NonFiniteError


def collection(**settings):
    return shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.SGD(lr=1.0), **settings)])


def scaled(bags, scale=1024.0, **settings):
    bags.scaler = torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    return bags.scaler


def loss_of(bags, dense=None, seed=0):
    out = bags(random_kjt(["a"], seed=seed)).values()
    return (out if dense is None else dense(out)).sum()


@pytest.mark.parametrize("dense", [False, True], ids=["tables only", "with a dense optimizer"])
def test_rows_see_unscaled_gradients(dense):
    modules = []
    for with_scaler in (False, True):
        torch.manual_seed(0)
        bags, top = collection(), nn.Linear(4, 1) if dense else None
        optimizer = torch.optim.SGD(top.parameters(), lr=0.1) if dense else None
        scaler = scaled(bags) if with_scaler else None
        for step in range(4):
            loss = loss_of(bags, top, seed=step)
            (scaler.scale(loss) if scaler else loss).backward()
            if optimizer:
                scaler.step(optimizer) if scaler else optimizer.step()
                optimizer.zero_grad()
            if scaler:
                scaler.update()
        modules.append(bags)
    assert_same_rows(*modules)  # powers of two scale exactly


@pytest.mark.parametrize("dense", [False, True], ids=["tables only", "with a dense optimizer"])
def test_an_overflow_is_skipped_whole_and_lowers_the_scale(dense):
    bags, top = collection(), nn.Linear(4, 1)
    scaler = scaled(bags)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    out = bags(kjt({"a": [[1, 2], [3]]})).values()
    rows = bags.table("a").lookup([1, 2, 3])
    loss = (out * torch.tensor([[1.0], [float("inf")]])).sum()
    if dense:
        loss = loss + top(torch.ones(1, 4)).sum()
    scaler.scale(loss).backward()
    assert torch.equal(bags.table("a").lookup([1, 2, 3]), rows)
    stats = bags.table("a").stats()
    assert (stats.step, stats.counters["skipped_backwards"]) == (0, 1)
    if dense:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    scaler.scale(loss_of(bags)).backward()
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert bags.table("a").stats().step == 1


def test_an_overflow_among_accumulated_backwards_is_remembered():
    bags = collection()
    scaler = scaled(bags)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(loss_of(bags) * factor).backward()
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert bags.table("a").stats().step == 2


def test_an_overflow_in_the_dense_part_alone_does_not_undo_rows():
    bags, top = collection(), nn.Linear(4, 1)
    scaler = scaled(bags)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    weight = top.weight.detach().clone()
    scaler.scale(loss_of(bags)).backward()
    scaler.scale(top(torch.full((1, 4), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bags.table("a").stats().step == 1
    assert torch.equal(top.weight, weight)
    assert scaler.get_scale() == 512.0


def test_the_scale_grows_when_only_tables_train():
    bags = collection()
    scaler = scaled(bags, growth_interval=2)
    for _ in range(4):
        scaler.scale(loss_of(bags)).backward()
        scaler.update()
    assert scaler.get_scale() == 4096.0


@pytest.mark.parametrize("overflow", [False, True])
def test_the_tables_optimizer_may_be_stepped_as_the_others_are(overflow):
    bags, top = collection(), nn.Linear(4, 1)
    scaler = scaled(bags)
    optimizers = [torch.optim.SGD(top.parameters(), lr=0.1), bags.optimizer]
    for _ in range(2):
        loss = loss_of(bags) * (float("inf") if overflow else 1.0) + top(torch.ones(1, 4)).sum()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (256.0 if overflow else 1024.0)
    assert bags.table("a").stats().step == (0 if overflow else 2)


def test_two_collections_under_one_scaler():
    one, other = collection(), collection()
    scaler = scaled(one)
    other.scaler = scaler
    scaler.scale(loss_of(one) + loss_of(other) * float("inf")).backward()
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert [bags.table("a").stats().step for bags in (one, other)] == [1, 0]


def test_sixteen_bit_outputs_overflow_where_the_scale_is_too_large():
    tables = [shoal.Table("a", 4, optimizer=shoal.SGD(lr=1.0))]
    bags = shoal.EmbeddingBagCollection(tables, output_dtype=torch.float16)
    scaler = scaled(bags, scale=2.0**15)
    first = bags.table("a").lookup([1])
    steps = 0
    while bags.table("a").stats().step == 0:
        scaler.scale((bags(kjt({"a": [[1]]})).values() * 4).float().sum()).backward()
        scaler.update()
        steps += 1
    assert steps == 3  # 4 * 2^15 and 4 * 2^14 are beyond float16
    assert torch.equal(bags.table("a").lookup([1]), first - 4)


def test_clip_acts_on_unscaled_gradients():
    bags = shoal.EmbeddingBagCollection(
        [shoal.Table("a", 4, optimizer=shoal.SGD(lr=1.0, clip=shoal.Clip(value=0.5)), init=shoal.Zeros())]
    )
    scaler = scaled(bags)
    scaler.scale(bags(kjt({"a": [[1], [2]]})).values() * torch.tensor([[0.25], [3.0]])).sum().backward()
    assert torch.equal(bags.table("a").lookup([1, 2]), torch.tensor([[-0.25] * 4, [-0.5] * 4]))


def test_a_scaler_that_is_off_is_as_none():
    bags = collection()
    scaler = scaled(bags, enabled=False)
    assert bags.scaler is scaler
    out = bags(kjt({"a": [[1]]})).values()
    with pytest.raises(NonFiniteError):
        scaler.scale(out.sum() * float("nan")).backward()
    scaler.update()


def test_it_can_be_taken_away_and_must_be_a_scaler():
    bags = collection()
    scaled(bags)
    bags.scaler = None
    assert bags.scaler is None
    first = bags.table("a").lookup([1])
    bags(kjt({"a": [[1]]})).values().sum().backward()
    assert torch.equal(bags.table("a").lookup([1]), first - 1)
    with pytest.raises(ConfigError, match="GradScaler"):
        bags.scaler = 1024.0


def test_tables_without_settings_take_a_scaler_too():
    bags = shoal.EmbeddingBagCollection(
        [shoal.Table("a", 2, optimizer=shoal.Assign()), shoal.Table("b", 2, optimizer=None)]
    )
    scaler = scaled(bags)
    out = bags(kjt({"a": [[1]], "b": [[1]]})).values()
    scaler.scale(out.sum() * 3).backward()
    scaler.update()
    assert torch.equal(bags.table("a").lookup([1]), torch.tensor([[3.0, 3.0]]))
