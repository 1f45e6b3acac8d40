"""bags.optimizer: settings per table, for schedulers and checkpoints."""

import io

import pytest
import torch
from support.batches import kjt, train_step
from torch.optim import lr_scheduler

import shoal
from shoal.errors import ConfigError, StateDictError


def collection(*optimizers):
    return shoal.EmbeddingBagCollection(
        [shoal.Table(f"t{n}", 4, optimizer=optimizer) for n, optimizer in enumerate(optimizers)]
    )


def batch(bags):
    return kjt({table: [[1, 2], [3]] for table in bags.tables()})


def moved(bags, table="t0"):
    """How far a step with a gradient of ones moves key 3 under SGD: the learning rate in use."""
    before = bags.table(table).lookup([3])
    bags(batch(bags)).values().sum().backward()
    return float((before - bags.table(table).lookup([3])).mean())


def test_a_group_for_each_table_with_its_name_and_settings():
    bags = collection(shoal.SGD(lr=0.1), shoal.Adam(lr=0.2, betas=(0.8, 0.9)), None, shoal.RowwiseAdagrad(lr=0.3))
    groups = {group["name"]: group for group in bags.optimizer.param_groups}
    assert list(groups) == ["t0", "t1", "t3"]
    assert [group["lr"] for group in groups.values()] == [0.1, 0.2, 0.3]
    assert groups["t1"]["betas"] == (0.8, 0.9)
    assert isinstance(bags.optimizer, torch.optim.Optimizer)
    assert "betas" not in groups["t0"]
    repr(bags.optimizer)


def test_a_change_takes_effect_in_the_next_backward_and_in_its_table_only():
    bags = collection(shoal.SGD(lr=0.5), shoal.SGD(lr=0.25))
    bags(batch(bags)).values().sum().backward()
    bags.optimizer.param_groups[0]["lr"] = 2.0
    assert moved(bags, "t0") == pytest.approx(2.0)
    assert moved(bags, "t1") == pytest.approx(0.25)
    out = bags(batch(bags)).values()
    before = bags.table("t0").lookup([3])
    bags.optimizer.param_groups[0]["lr"] = torch.tensor(4.0)
    out.sum().backward()
    torch.testing.assert_close(bags.table("t0").lookup([3]), before - 4)


def test_step_and_zero_grad_do_nothing():
    bags = collection(shoal.SGD(lr=0.5))
    train_step(bags, batch(bags))
    before = bags.state_dict()
    bags.optimizer.step()
    bags.optimizer.zero_grad()
    assert bags.optimizer.step(lambda: 3.0) == 3.0
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


def test_step_lr():
    bags = collection(shoal.SGD(lr=1.0), shoal.RowwiseAdagrad(lr=4.0))
    scheduler = lr_scheduler.StepLR(bags.optimizer, step_size=2, gamma=0.5)
    rates = []
    for _ in range(6):
        rates.append(moved(bags))
        scheduler.step()
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.25, 0.25])
    assert scheduler.get_last_lr() == [0.125, 0.5]


def test_lambda_lr_with_a_function_for_each_table():
    bags = collection(shoal.SGD(lr=1.0), shoal.SGD(lr=1.0))
    scheduler = lr_scheduler.LambdaLR(bags.optimizer, [lambda step: 1 / (1 + step), lambda step: 1.0])
    rates = []
    for _ in range(3):
        rates.append(moved(bags))
        bags.optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1, 1 / 2, 1 / 3])
    assert moved(bags, "t1") == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=4),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=2, cycle_momentum=False),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5, cycle_momentum=False),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)],
            milestones=[2],
        ),
    ],
    ids=["cosine", "linear", "cyclic", "one cycle", "sequential"],
)
def test_rows_follow_any_scheduler(make):
    bags = collection(shoal.SGD(lr=1.0))
    scheduler = make(bags.optimizer)
    for _ in range(4):
        assert moved(bags) == pytest.approx(bags.optimizer.param_groups[0]["lr"])
        scheduler.step()


def test_reduce_on_plateau():
    bags = collection(shoal.SGD(lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(bags.optimizer, patience=0, factor=0.5)
    for _ in range(3):
        scheduler.step(1.0)
    assert moved(bags) == pytest.approx(0.25)


@pytest.mark.parametrize("optimizer", [shoal.Adam(lr=0.1), shoal.SGD(lr=0.1, momentum=0.9)], ids=["betas", "momentum"])
def test_one_cycle_changes_the_momentum_too(optimizer):
    bags = collection(optimizer, optimizer)
    scheduler = lr_scheduler.OneCycleLR(bags.optimizer, max_lr=1.0, total_steps=5)
    for _ in range(4):
        train_step(bags, batch(bags))
        scheduler.step()
    group = bags.optimizer.param_groups[1]
    assert (group["betas"][0] if "betas" in group else group["momentum"]) == pytest.approx(0.95)


def test_a_list_that_is_changed_in_place_is_used_as_one_that_is_assigned():
    changed, assigned = (collection(shoal.Adam(lr=0.1)) for _ in range(2))
    changed.optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    for bags in (changed, assigned):
        for _ in range(2):
            train_step(bags, batch(bags))
    changed.optimizer.param_groups[0]["betas"][0] = 0.1
    assigned.optimizer.param_groups[0]["betas"] = (0.1, 0.999)
    assert moved(changed) == moved(assigned)


def test_a_param_group_without_its_name_trains():
    bags = collection(shoal.SGD(lr=1.0))
    del bags.optimizer.param_groups[0]["name"]
    assert moved(bags) == pytest.approx(1.0)


def test_momentum_that_was_changed_is_used():
    bags = collection(shoal.SGD(lr=1.0, momentum=0.9))
    assert moved(bags) == pytest.approx(1.0)
    bags.optimizer.param_groups[0]["momentum"] = 0.25
    assert moved(bags) == pytest.approx(1.25)


def test_assign_has_no_settings_to_schedule():
    bags = collection(shoal.Assign(), shoal.SGD(lr=1.0))
    scheduler = lr_scheduler.StepLR(bags.optimizer, step_size=1)
    train_step(bags, batch(bags))
    scheduler.step()
    assert [group["name"] for group in bags.optimizer.param_groups] == ["t1"]
    alone = collection(shoal.Assign())
    train_step(alone, batch(alone))
    with pytest.raises(ConfigError, match="nothing to schedule"):
        _ = alone.optimizer


def test_the_state_dict_carries_settings_through_a_file():
    bags = collection(shoal.SGD(lr=1.0), shoal.Adam(lr=0.1))
    scheduler = lr_scheduler.StepLR(bags.optimizer, step_size=1, gamma=0.5)
    bags(batch(bags)).values().sum().backward()
    scheduler.step()
    file = io.BytesIO()
    torch.save({"optimizer": bags.optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = collection(shoal.SGD(lr=1.0), shoal.Adam(lr=0.1))
    again = lr_scheduler.StepLR(other.optimizer, step_size=1, gamma=0.5)
    other.optimizer.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["scheduler"])
    assert moved(other) == pytest.approx(0.5)
    again.step()
    assert moved(other) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "others",
    [
        (shoal.Adam(), shoal.SGD()),
        (shoal.SGD(),),
        (shoal.SGD(), shoal.Adam(), shoal.SGD()),
        (shoal.SGD(), shoal.RowwiseAdagrad()),
    ],
)
def test_settings_of_other_tables_are_refused(others):
    bags = collection(shoal.SGD(lr=0.5), shoal.Adam(lr=0.25))
    with pytest.raises(StateDictError, match=r"'t0' \(.*lr"):
        bags.optimizer.load_state_dict(collection(*others).optimizer.state_dict())
    assert [group["lr"] for group in bags.optimizer.param_groups] == [0.5, 0.25]


def test_dense_and_sparse_optimizers_side_by_side():
    bags, dense = collection(shoal.SGD(lr=1.0)), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(dense.parameters(), lr=0.1), bags.optimizer]
    schedulers = [lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1) for optimizer in optimizers]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        dense(bags(batch(bags)).values()).sum().backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert bags.table("t0").stats().step == 3
