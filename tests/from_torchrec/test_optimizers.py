"""TorchRec's optimizers and ours take the same steps."""

import warnings

import pytest
import torch
from support.batches import train_step

import shoal
from shoal.errors import CheckpointError, ConfigError, OptimizerWarning, StateWarning
from shoal.interop import dcp
from shoal.interop.torchrec import apply_optimizer_in_backward, load_optimizer_state, optimizer_of, table_of

from support.theirs import BATCH, bag_config, their_bags, theirs  # isort: skip (it skips this file without TorchRec)
import torchrec.optim as optim
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

ALL = {"a": [[0, 1, 2], [3], [4, 4]], "b": [[5], [6, 7], [8, 9, 0]]}  # every row of ten
OTHER = {"a": [[1], [], [2, 3, 3]], "b": [[], [9], []]}


def loaded(bags, reference):
    with pytest.warns(StateWarning, match="weights without keys for 'item'"):
        bags.load_state_dict(reference.state_dict())
    return bags


def assert_alike(bags, reference):
    rows = bags.table("item").lookup(torch.arange(10))
    torch.testing.assert_close(rows, reference.state_dict()["embedding_bags.item.weight"].detach())


def loss(collection, batch):
    values = collection(theirs(batch)).values()
    return (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum()


@pytest.mark.parametrize(
    ("kind", "settings", "batches"),
    [
        (optim.RowWiseAdagrad, {"lr": 0.1}, [ALL, OTHER]),
        (optim.RowWiseAdagrad, {"lr": 0.1, "eps": 0.5, "initial_accumulator_value": 0.2}, [ALL, OTHER]),
        (optim.RowWiseAdagrad, {"weight_decay": 0.3, "lr_decay": 0.0, "maximize": False}, [ALL, ALL]),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}, [ALL, ALL]),
        (torch.optim.SGD, {"lr": 0.1}, [ALL, OTHER]),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, [ALL, OTHER]),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}, [ALL, ALL]),
        (torch.optim.AdamW, {"lr": 0.1}, [ALL, ALL]),
    ],
)
def test_their_optimizer_applied_to_tables_takes_its_steps(kind, settings, batches):
    config = bag_config(num_embeddings=10)
    reference = their_bags(config)
    stepper = kind(reference.parameters(), **settings)
    bags = shoal.EmbeddingBagCollection([config])
    apply_optimizer_in_backward(kind, bags, settings)
    loaded(bags, reference)
    for batch in batches * 2:
        stepper.zero_grad()
        loss(reference, batch).backward()
        stepper.step()
        loss(bags, batch).backward()
    assert_alike(bags, reference)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
        (torch.optim.SGD, {"lr": 0.1}),
    ],
)
def test_training_goes_on_where_their_fused_optimizer_stopped(kind, settings):
    config = bag_config(num_embeddings=10)
    reference = FusedEmbeddingBagCollection([config], kind, settings, device=torch.device("cpu"))
    for batch in (ALL, OTHER):
        loss(reference, batch).backward()
    bags = loaded(shoal.EmbeddingBagCollection([config], optimizer=optimizer_of(kind, settings)), reference)
    load_optimizer_state(bags, reference.fused_optimizer().state_dict())
    for batch in (OTHER, ALL):
        loss(reference, batch).backward()
        loss(bags, batch).backward()
    assert_alike(bags, reference)


@pytest.mark.parametrize(("kind", "settings"), [(optim.RowWiseAdagrad, {"lr": 0.1}), (torch.optim.Adam, {"lr": 0.1})])
def test_training_goes_on_where_a_keyed_optimizer_stopped(kind, settings):
    config = bag_config(num_embeddings=10)
    reference = their_bags(config)
    keyed = optim.KeyedOptimizerWrapper(dict(reference.named_parameters()), lambda params: kind(params, **settings))

    def step(batch):
        keyed.zero_grad()
        loss(reference, batch).backward()
        keyed.step()

    step(ALL)
    step(ALL)
    bags = loaded(shoal.EmbeddingBagCollection([config], optimizer=optimizer_of(kind, settings)), reference)
    load_optimizer_state(bags, keyed.state_dict())
    step(ALL)
    loss(bags, ALL).backward()
    assert_alike(bags, reference)


@pytest.mark.parametrize("kind", [optim.LAMB, optim.LarsSGD, optim.PartialRowWiseLAMB, torch.optim.SparseAdam])
def test_optimizers_without_a_counterpart_are_refused(kind):
    with pytest.raises(ConfigError, match="has no counterpart"):
        optimizer_of(kind, {"lr": 0.1})


def test_the_placeholders_are_fbgemms():
    assert optimizer_of(optim.SGD, {"lr": 0.1}) == shoal.SGD(0.1)
    assert optimizer_of(optim.Adagrad, {"learning_rate": 0.1}) == shoal.Adagrad(0.1)
    assert optimizer_of(optim.Adam, {"lr": 0.1, "beta1": 0.8, "weight_decay": 0.2}) == shoal.AdamW(
        0.1, betas=(0.8, 0.999), weight_decay=0.2, bias_correction="global"
    )
    assert optimizer_of(optim.PartialRowWiseAdam, {"lr": 0.1}) == shoal.PartialRowwiseAdam(
        0.1, bias_correction="global"
    )


def test_their_function_on_our_parameters_is_warned_of():
    bags = shoal.EmbeddingBagCollection([bag_config()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optim.apply_optimizer_in_backward(optim.RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    with pytest.warns(OptimizerWarning, match=r"'item'.*RowwiseAdagrad\(lr=0.01.*shoal.interop.torchrec") as heard:
        train_step(bags, theirs(BATCH))
    assert heard[0].filename.endswith("batches.py")  # the line that calls the collection
    train_step(bags, theirs(BATCH))  # warned once


def test_a_table_of_a_config_has_what_it_cannot_say():
    table = table_of(bag_config(), optimizer=shoal.Adam(0.1), tiers=[shoal.Dram("1MiB")], init=shoal.Zeros())
    assert (table.optimizer, table.tiers, table.init) == (shoal.Adam(0.1), (shoal.Dram("1MiB"),), shoal.Zeros())
    assert table.feature_names == ("a", "b")


class Model(torch.nn.Module):
    """Rows and dense weights, and the optimizer that TorchRec's golden script makes for the dense ones."""

    def __init__(self, with_groups=False):
        super().__init__()
        self.bags = shoal.EmbeddingBagCollection([bag_config()], optimizer=shoal.Adagrad(lr=0.1))
        self.top = torch.nn.Linear(8, 1)
        keyed = KeyedOptimizerWrapper(dict(self.named_parameters()), lambda some: torch.optim.Adam(some, lr=0.1))
        self.optimizer = CombinedOptimizer([keyed])
        self.optimizer.save_param_groups(with_groups)

    def step(self):
        self.optimizer.zero_grad()
        self.top(self.bags(theirs(BATCH)).values()).square().sum().backward()
        self.optimizer.step()


def committed(path, model):
    with shoal.ChangeLog(path) as log:
        log.commit(model, dense=model, optimizer=model.optimizer)


SAVED = {
    "save": (
        lambda path, model: shoal.save(path, model, dense=model, optimizer=model.optimizer),
        lambda path, model: shoal.load(path, model, dense=model, optimizer=model.optimizer),
    ),
    "commit": (committed, lambda path, model: shoal.recover(path, model, dense=model, optimizer=model.optimizer)),
    "dcp": (
        lambda path, model: dcp.save({"model": model, "dense": model.optimizer}, path),
        lambda path, model: dcp.load({"model": model, "dense": model.optimizer}, path),
    ),
}


@pytest.mark.parametrize("with_groups", [False, True], ids=["states", "groups"])
@pytest.mark.parametrize("how", SAVED)
def test_training_goes_on_with_their_keyed_optimizer_as_it_was(tmp_path, how, with_groups):
    save, load = SAVED[how]
    model, again = Model(with_groups), Model(with_groups)
    model.step()
    model.step()
    save(tmp_path / "saved", model)
    before = {name: value.clone() for name, value in again.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"CombinedOptimizer that has states.* Call its init_state\(\) first"):
        load(tmp_path / "saved", again)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())
    again.optimizer.init_state()
    load(tmp_path / "saved", again)
    for _ in range(2):
        model.step()
        again.step()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_keyed_optimizer_of_other_parameters_is_refused(tmp_path):
    model, other = Model(), Model()
    for one in (model, other):
        one.step()
    keyed = KeyedOptimizerWrapper({"bias": other.top.bias}, torch.optim.Adam)
    keyed.init_state()
    for name, (save, load) in SAVED.items():
        save(tmp_path / name, model)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        other.optimizer = keyed
        with pytest.raises(CheckpointError, match="Different parameter count: 1 vs 2"):
            load(tmp_path / name, other)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
