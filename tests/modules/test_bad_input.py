"""Bad settings and bad batches: an error of shoal.errors that says what is wrong, and nothing changed."""

import itertools

import numpy as np
import pytest
import torch
from support.batches import assert_unchanged, kjt, memory, random_kjt, train_step
from support.inside import group_of

import shoal
from shoal.errors import ConfigError, DeviceError, InputError, NotFoundError
from shoal.table import Batch, Each, Pooled, Request, Update, ops


def trained(training=True):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 3)])
    train_step(bags, random_kjt(["a", "b"]))
    return bags.train(training)


def trained_sequences(training=True):
    sequences = shoal.EmbeddingCollection([shoal.Table(name, 4, pooling="none") for name in "ab"])
    train_step(sequences, random_kjt(["a", "b"]))
    return sequences.train(training)


# ---- batches


def by_lengths(*lengths, values=(1, 2, 3, 4)):
    return shoal.KeyedJaggedTensor(["a", "b"], torch.tensor(values), lengths=torch.tensor(lengths, dtype=torch.int64))


def by_offsets(*offsets, values=(1, 2, 3, 4), dtype=torch.int64):
    return shoal.KeyedJaggedTensor(["a", "b"], torch.tensor(values), offsets=torch.tensor(offsets, dtype=dtype))


BAD_BATCHES = {
    "lengths sum to less": (by_lengths(1, 1, 1, 0), "sum to 3, and there are 4"),
    "lengths sum to more": (by_lengths(1, 1, 1, 2), "sum to 5, and there are 4"),
    "lengths sum to far more": (by_lengths(1, 1, 2**40, 1), "must sum|not decrease"),
    "a negative length": (by_lengths(1, -1, 3, 1), "bag 1 of feature number 0"),
    "a negative length at the end": (by_lengths(2, 2, 1, -1), "lengths not be negative"),
    "lengths that overflow": (by_lengths(2**62, 2**62, 2**62, 2**62), "not be negative|must sum"),
    "offsets that decrease": (by_offsets(0, 2, 1, 3, 4), "must not decrease"),
    "offsets that end early": (by_offsets(0, 1, 2, 3, 3), "must sum"),
    "offsets that begin late": (by_offsets(1, 2, 3, 4, 4), "begin at 0"),
    "narrow offsets that decrease": (by_offsets(0, 2, 1, 3, 4, dtype=torch.int32), "must not decrease"),
    "values without bags": (by_lengths(values=(1,)), "must sum"),
}


@pytest.mark.parametrize("make", [trained, trained_sequences], ids=["bags", "sequences"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_a_malformed_batch_is_refused(make, training, bad):
    module = make(training)
    before = memory(module)
    batch, message = BAD_BATCHES[bad]
    with pytest.raises(InputError, match=message if make is trained else "lengths|offsets"):
        module(batch)
    assert_unchanged(module, before)
    module(by_lengths(1, 1, 1, 1))


@pytest.mark.parametrize("make", [trained, trained_sequences], ids=["bags", "sequences"])
def test_a_batch_on_another_device_is_refused(make):
    module = make()
    before = memory(module)
    with pytest.raises(DeviceError, match=r"wanted a batch with data; its values\(\) is on meta"):
        module(kjt({"a": [[1]], "b": [[2]]}).to("meta"))
    assert_unchanged(module, before)


def test_errors_of_a_group_have_the_collections_name():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)], name="shelf/of bags")
    batches = (
        shoal.KeyedJaggedTensor(["a"], torch.tensor([1]), torch.tensor([float("nan")]), lengths=torch.tensor([1])),
        shoal.KeyedJaggedTensor(["a"], torch.tensor([1]), torch.ones(1, 2), lengths=torch.tensor([1])),
    )
    for batch in batches:
        with pytest.raises(InputError, match=r"^\[shelf/of bags\] "):
            bags(batch)


@pytest.mark.parametrize("given", [None, torch.ones(3), {"a": [1]}, "a"], ids=["None", "tensor", "dict", "str"])
def test_what_is_no_batch_is_refused(given):
    for module in (trained(), trained_sequences()):
        before = memory(module)
        with pytest.raises(InputError, match="wanted a KeyedJaggedTensor"):
            module(given)
        assert_unchanged(module, before)


def test_a_batch_without_features_is_refused():
    with pytest.raises(NotFoundError, match="the batch has no features"):
        trained()(shoal.KeyedJaggedTensor.empty())


# Tensors that no KeyedJaggedTensor holds, but which a compiled program or another library may hand to the op.
@pytest.mark.parametrize(
    ("values", "offsets", "weights", "message"),
    [
        (torch.ones(2), torch.tensor([0, 1, 2]), None, "int32 or int64; got torch.float32"),
        (torch.ones(2, dtype=torch.int16), torch.tensor([0, 1, 2]), None, "int32 or int64; got torch.int16"),
        (torch.tensor([1, 2]), torch.tensor([0.0, 1.0, 2.0]), None, "int32 or int64"),
        (torch.ones(2, 1, dtype=torch.int64), torch.tensor([0, 1, 2]), None, r"values must be \[n\]"),
        (torch.tensor([1, 2]), torch.tensor([[0, 1, 2]]), None, "offsets"),
        (torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64), None, "offsets"),
        (torch.tensor([1, 2]), torch.tensor([0, 2]), None, "2 features must have equally many bags"),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 2]), torch.ones(3), "one float for each of the 2 values"),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 2]), torch.ones(2, 2), "one float for each of the 2 values"),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 2]), torch.ones(2, dtype=torch.int64), "one float for each"),
    ],
)
def test_malformed_tensors_are_refused(values, offsets, weights, message):
    bags = trained()
    before = memory(bags)
    with pytest.raises(InputError, match=message):
        batch = Batch(["a", "b"], values, offsets, weights)
        ops.lookup(bags.name, torch.zeros(1), Request(batch, Pooled(7), torch.float32, True, False))
    assert_unchanged(bags, before)


def test_weights_with_more_than_one_dimension_are_refused():
    bags = trained()
    before = memory(bags)
    batch = shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), torch.ones(2, 3), lengths=torch.tensor([1, 1]))
    with pytest.raises(InputError, match="one float for each"):
        bags(batch)
    assert_unchanged(bags, before)


def test_offsets_that_were_overwritten_before_the_backward_are_refused():
    bags = trained()
    offsets = torch.tensor([0, 1, 2, 3, 4])
    out = bags(shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), offsets=offsets)).values()
    rows = bags.state_dict()
    offsets[2] = 100
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert all(torch.equal(value, rows[name]) for name, value in bags.state_dict().items())


def test_offsets_that_were_overwritten_unseen_are_refused_too():
    bags = trained()
    offsets = torch.tensor([0, 1, 2, 3, 4])
    out = bags(shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), offsets=offsets)).values()
    rows = bags.state_dict()
    offsets.numpy()[2] = 100
    with pytest.raises(InputError, match="offsets"):
        out.sum().backward()
    assert all(torch.equal(value, rows[name]) for name, value in bags.state_dict().items())


# ---- settings


@pytest.mark.parametrize("kind", [shoal.EmbeddingBagCollection, shoal.EmbeddingCollection])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tables": []}, "non-empty list of Table"),
        ({"tables": "a"}, "non-empty list of Table"),
        ({"tables": None}, "non-empty list of Table"),
        ({"tables": ["a"]}, "Table values; got 'a'"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"output_dtype": torch.float64}, "output_dtype"),
        ({"output_dtype": "float32"}, "output_dtype"),
        ({"device": "nowhere"}, "device must be"),
        ({"device": 1.5}, "device must be"),
        ({"lr": 0.1}, "unknown 'lr'"),
        ({"sede": 1}, "Did you mean 'seed'"),
    ],
)
def test_a_bad_setting_is_refused(kind, settings, message):
    pooling = "none" if kind is shoal.EmbeddingCollection else "sum"
    with pytest.raises(ConfigError, match=message):
        kind(**{"tables": [shoal.Table("a", 4, pooling=pooling)], **settings})


def test_missing_tables_are_refused():
    with pytest.raises(ConfigError, match="missing a required argument: 'tables'"):
        shoal.EmbeddingBagCollection()


def test_a_single_table_is_refused_and_two_of_one_name():
    table = shoal.Table("a", 4)
    with pytest.raises(ConfigError, match="non-empty list"):
        shoal.EmbeddingBagCollection(table)
    with pytest.raises(ConfigError, match="'a' more than once"):
        shoal.EmbeddingBagCollection([table, shoal.Table("a", 5, features=["b"])])


def test_pooling_belongs_to_bags_and_none_to_sequences():
    with pytest.raises(ConfigError, match=r"'a' must have pooling 'sum' or 'mean'.*EmbeddingCollection"):
        shoal.EmbeddingBagCollection([shoal.Table("a", 4, pooling="none")])
    with pytest.raises(ConfigError, match=r"'a' must have pooling 'none'.*EmbeddingBagCollection"):
        shoal.EmbeddingCollection([shoal.Table("a", 4)])


def test_a_taken_name_is_refused_with_what_frees_it_in_a_notebook():
    bags = shoal.EmbeddingBagCollection([shoal.Table("one", 4)], name="taken")
    with pytest.raises(
        ConfigError, match=r"called 'taken' already\. .* %xdel bags deletes results that the notebook keeps"
    ):
        shoal.EmbeddingBagCollection([shoal.Table("one", 4)], name="taken")
    del bags
    shoal.EmbeddingBagCollection([shoal.Table("one", 4)], name="taken")


def test_an_unknown_table_is_named():
    with pytest.raises(NotFoundError, match="has the tables 'a', 'b'; got 'c'"):
        trained().table("c")


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1, np.int64(3)])
def test_any_seed_of_64_bits_is_taken(seed):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)], seed=seed)
    assert bags.table("a").lookup([1]).abs().max() <= 0.01


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_any_name_of_the_cpu_is_taken(device):
    assert shoal.EmbeddingBagCollection([shoal.Table("a", 4)], device=device).device == torch.device("cpu")


# ---- tensors that do not belong together


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"grads": [torch.ones(1, 7)]}, "shapes"),
        ({"grads": [torch.ones(2, 4)]}, "shapes"),
        ({"grads": []}, "shapes"),
        ({"grads": [torch.ones(2, 7, dtype=torch.int64)]}, "floats"),
        ({"weights": torch.ones(1)}, "one float for each"),
        ({"values": torch.ones(4)}, "int32 or int64"),
        ({"values": torch.arange(3)}, "of its forward"),
        ({"offsets": torch.tensor([0, 2, 4])}, "of its forward|equally many"),
        ({"offsets": torch.tensor([0, 1, 1, 2, 4])}, "of its forward"),
    ],
)
def test_the_update_operator_wants_the_tensors_of_its_forward(change, match):
    bags = trained()
    batch = by_lengths(1, 1, 1, 1)
    token = torch.zeros(1)
    group = bags.name
    keyed = Batch(["a", "b"], batch.values(), batch.offsets())
    _, lease = ops.lookup(group, token, Request(keyed, Pooled(7), torch.float32, True, True))
    before = memory(bags)
    given = {
        "lease": lease,
        "values": batch.values(),
        "offsets": batch.offsets(),
        "weights": None,
        "grads": [torch.ones(2, 7)],
        "weight_gradient": False,
    }
    with pytest.raises(InputError, match=match):
        ops.update(group, token, Update(**(given | change)))
    assert_unchanged(bags, before)
    ops.update(group, token, Update(**given))


def test_outputs_of_another_type_are_refused():
    bags = trained()
    batch = by_lengths(1, 1, 1, 1)
    with pytest.raises(InputError, match="float64"):
        keyed = Batch(["a", "b"], batch.values(), batch.offsets())
        ops.lookup(bags.name, torch.zeros(1), Request(keyed, Pooled(7), torch.float64, True, False))


def test_the_operator_of_the_other_kind_of_tables_is_refused():
    batch = by_lengths(1, 1, 1, 1)
    bags, sequences = trained(), trained_sequences()
    token, keyed = torch.zeros(1), Batch(["a", "b"], batch.values(), batch.offsets(), counts=[2, 2])
    with pytest.raises(InputError, match="call lookup_each"):
        ops.lookup(sequences.name, token, Request(keyed, Pooled(8), torch.float32, False, False))
    with pytest.raises(InputError, match="its tables pool"):
        ops.lookup(bags.name, token, Request(keyed, Each(14), torch.float32, False, False))


class Foreign:
    """A batch of another library, as far as it is looked at."""

    def __init__(self, batch, **other):
        self._batch = batch
        self._other = other

    def __getattr__(self, name):
        return (lambda: self._other[name]) if name in self._other else getattr(self._batch, name)


def test_counts_that_offsets_contradict_are_refused():
    module = trained_sequences()
    before = memory(module)
    with pytest.raises(InputError, match="Do not change a batch's tensors"):
        module(Foreign(by_lengths(2, 1, 1, 0), length_per_key=[1, 3]))
    assert_unchanged(module, before)


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        ({"offsets": torch.arange(5, device="meta")}, DeviceError, "offsets.. is on meta"),
        ({"weights_or_none": torch.ones(4, device="meta")}, DeviceError, "weights_or_none.. is on meta"),
        ({"values": None}, InputError, "must be a tensor; got NoneType"),
        ({"offsets": [0, 1, 2, 3, 4]}, InputError, "must be a tensor; got list"),
        ({"keys": ["a", "a"]}, InputError, "each feature of the batch once"),
    ],
)
def test_what_is_wrong_with_a_foreign_batch_is_said(other, error, match):
    bags = trained()
    before = memory(bags)
    with pytest.raises(error, match=match):
        bags(Foreign(by_lengths(1, 1, 1, 1), **other))
    assert_unchanged(bags, before)


def test_outputs_of_the_same_name_are_refused_at_once():
    tables = [shoal.Table("a", 4, features=["x", "x@b"]), shoal.Table("b", 4, features=["x"])]
    with pytest.raises(ConfigError, match="'x@b'"):
        shoal.EmbeddingBagCollection(tables)


def test_orders_of_features_are_not_remembered_for_ever():
    names = list("abcdefgh")
    bags = shoal.EmbeddingBagCollection([shoal.Table(name, 2) for name in names])
    for order in itertools.islice(itertools.permutations(names), 200):
        bags(shoal.KeyedJaggedTensor(list(order), torch.arange(8), lengths=torch.ones(8, dtype=torch.int64)))
    assert len(group_of(bags)._plans) <= 64
