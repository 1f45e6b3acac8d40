"""Forwards on the device: births, missing keys, shapes and types of a batch, growth."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, Twins, here, on_device, placed
from support.inside import device_rows_of

import shoal
from shoal import Table
from shoal.table.device.group import DeviceGroup

EXTREME = [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), -(2**63) + 1]
INITS = [shoal.Uniform(-0.3, 0.7), shoal.Normal(0.5, 2.0), shoal.Zeros(), shoal.Constant(0.1)]


def equal_outputs(twins, batch):
    """Both outputs to the bit, on the host."""
    outs = [module(placed(batch, module.device)).values().detach().cpu() for module in (twins.host, twins.device)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("init", INITS, ids=lambda init: type(init).__name__)
def test_rows_are_born_to_the_bit(init, dtype):
    twins = Twins(Table("a", 7, init=init, dtype=dtype))
    batch = kjt({"a": [[key] for key in EXTREME]})
    foretold = twins.device.table("a").lookup(here(*EXTREME))
    equal_outputs(twins, batch)
    assert twins.device.table("a").keys().tolist() == sorted(EXTREME)
    twins.check(exact=True)
    assert torch.equal(twins.device.table("a").lookup(here(*EXTREME)), foretold)


def test_tables_of_all_initialisers_are_born_in_one_collection():
    twins = Twins(*(Table(type(init).__name__, 4, init=init) for init in INITS))
    equal_outputs(twins, kjt({type(init).__name__: [[key] for key in EXTREME] for init in INITS}))
    twins.check(exact=True)


@settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), seed=st.integers(0, 2**64 - 1))
def test_any_key_and_seed_give_birth_to_the_bit(keys, seed):
    twins = Twins(Table("u", 3), Table("n", 5, init=shoal.Normal(0, 1), dtype="bfloat16"), seed=seed)
    equal_outputs(twins, kjt({"u": [[key] for key in keys], "n": [[key] for key in keys]}))
    twins.check(exact=True)


@pytest.mark.parametrize("missing", ["init", "zero"])
@pytest.mark.parametrize("kind", [shoal.EmbeddingBagCollection, shoal.EmbeddingCollection])
def test_missing_keys_in_eval(kind, missing):
    pooling = "sum" if kind is shoal.EmbeddingBagCollection else "none"
    twins = Twins(
        Table("a", 4, pooling=pooling, missing=missing, init=shoal.Normal(0, 1), dtype="bfloat16"),
        Table("b", 3, pooling=pooling, missing=missing, init=shoal.Constant(1.0)),
        kind=kind,
    )
    batch = kjt({"a": [[1, 2, 3], [], [2**63 - 1]], "b": [[-1], [5, 5], [6]]})
    twins.evaluate(batch)
    twins.step(kjt({"a": [[1, 2], [7], []], "b": [[5], [], [9]]}))
    twins.evaluate(batch)
    twins.check()
    assert twins.device.table("a").keys().tolist() == [1, 2, 7]


def test_missing_keys_of_weighted_means():
    twins = Twins(Table("a", 4, pooling="mean", init=shoal.Normal(0, 1)))
    twins.step(random_kjt(["a"], keys=10, weighted=True))
    outs = twins.evaluate(random_kjt(["a"], bags=6, keys=40, seed=1, weighted=True))
    assert not outs[1].values().isnan().any()


def test_evaluation_gives_weights_their_gradient():
    twins = Twins(Table("a", 4, pooling="mean", init=shoal.Normal(0, 1)), Table("b", 3, missing="zero"))
    twins.step(random_kjt(["a", "b"], keys=10, weighted=True))
    for module in (twins.host, twins.device):
        module.eval()
    twins.step(random_kjt(["a", "b"], keys=30, seed=1, weighted=True))
    twins.check()


# ---- batches


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_both_widths(dtype, lengths_dtype, by):
    twins = Twins(Table("a", 4), Table("b", 3))
    batch = {"a": [[1, -2], [3]], "b": [[], [-(2**31), 2**31 - 1]]}
    ours = kjt(batch, dtype=dtype, lengths_dtype=lengths_dtype, by=by).to(DEVICE)
    twins.device(ours).values().sum().backward()
    twins.host(kjt(batch)).values().sum().backward()
    twins.check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_both_widths_in_sequences(dtype):
    tables = [Table("a", 4, pooling="none"), Table("b", 3, pooling="none")]
    twins = Twins(*tables, kind=shoal.EmbeddingCollection)
    batch = {"b": [[], [-(2**31), 2**31 - 1]], "a": [[1, -2], [3]]}
    for module, one in ((twins.host, kjt(batch)), (twins.device, kjt(batch, dtype=dtype, lengths_dtype=dtype))):
        out = module(one.to(module.device))
        (out["a"].values().sum() + out["b"].values().sum()).backward()
    twins.check()


@pytest.mark.parametrize("kind", [shoal.EmbeddingBagCollection, shoal.EmbeddingCollection])
@pytest.mark.parametrize(
    "batch",
    [{"a": [], "b": []}, {"a": [[], []], "b": [[], []]}, {"a": [[1], []], "b": [[], []]}],
    ids=["no bags", "empty bags", "an empty feature"],
)
def test_batches_with_little_in_them_count_as_steps(kind, batch):
    pooling = "mean" if kind is shoal.EmbeddingBagCollection else "none"
    twins = Twins(Table("a", 4, pooling=pooling), Table("b", 3, pooling=pooling), kind=kind)
    twins.evaluate(kjt(batch))
    twins.step(kjt(batch))
    twins.check()
    assert twins.device.table("b").stats().step == 1


def test_the_order_of_the_batch_does_not_matter():
    twins = Twins(Table("x", 4, features=["a", "b"]), Table("y", 3, features=["c", "a"]))
    orders = (["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"])
    for step, names in enumerate(orders):
        twins.step(random_kjt(names, seed=step), seed=step)
    twins.check()


def test_tensors_that_are_not_contiguous():
    twins = Twins(Table("a", 4), Table("b", 3))
    wide = torch.tensor([[1, 2, 3, 5, 5], [0] * 5]).t()
    lengths = torch.tensor([2, 9, 1, 9, 0, 9, 2, 9])[::2]
    weights = torch.arange(10.0).reshape(5, 2)[:, 1]
    for module in (twins.host, twins.device):
        parts = [tensor.to(module.device) for tensor in (wide[:, 0], weights, lengths)]
        out = module(shoal.KeyedJaggedTensor(["a", "b"], *parts[:2], lengths=parts[2])).values()
        out.backward(torch.arange(14.0).reshape(7, 2).t().to(module.device))
    twins.check()


def test_batches_that_begin_anywhere_in_memory():
    # Views of larger tensors: kernels must not take them to be aligned.
    twins = Twins(Table("a", 4))
    for module in (twins.host, twins.device):
        values = torch.tensor([9, 1, 2, 3], device=module.device)[1:]
        weights = torch.tensor([9.0, 1.0, 2.0, 3.0], device=module.device)[1:]
        lengths = torch.tensor([9, 2, 1], device=module.device)[1:]
        batch = shoal.KeyedJaggedTensor(["a"], values, weights, lengths=lengths)
        gradient = torch.arange(9.0, device=module.device)[1:].reshape(2, 4)
        module(batch).values().backward(gradient)
    twins.check()


def test_a_batch_on_another_device_is_refused():
    if DEVICE == "cpu":
        pytest.skip("there is no other device")
    bags = on_device(Table("a", 4))
    with pytest.raises(shoal.errors.DeviceError, match="Move the batch"):
        bags(kjt({"a": [[1]]}))


# ---- growth


def test_an_index_grows_over_several_doublings():
    twins = Twins(Table("a", 2), Table("b", 1, optimizer=None))
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for step in range(5):
        keys = torch.randint(-(2**63), 2**63 - 1, (20 << step,), generator=generator)
        twins.step(kjt({"a": [keys.tolist()], "b": [[1]]}), seed=step)
        sizes.append(twins.device.table("a").stats().index_bytes)
    twins.check()
    assert len(twins.device.table("a")) == 20 * 31
    assert len(set(sizes)) >= 3


def test_rows_spread_over_many_slabs(monkeypatch):
    original = DeviceGroup.__init__

    def with_small_slabs(self, name, configs, seed, device, slab_bits=3):
        original(self, name, configs, seed, device, slab_bits)

    monkeypatch.setattr(DeviceGroup, "__init__", with_small_slabs)
    twins = Twins(Table("a", 3), Table("b", 3), Table("c", 5))
    for step in range(3):
        twins.step(random_kjt(["a", "b", "c"], bags=6, keys=60, seed=step), seed=step)
    twins.check()
    assert device_rows_of(twins.device).storage.slab_bits == 3
    assert device_rows_of(twins.device).storage._slab_count > 8


def test_a_table_that_is_emptied_and_filled_takes_the_same_slots_again():
    bags = on_device(Table("a", 4))
    keys = list(range(40))
    for _ in range(3):
        bags(kjt({"a": [keys]}).to(DEVICE)).values().sum().backward()
        assert bags.table("a").erase(keys) == 40
    bags.check()
    assert len(device_rows_of(bags).storage._memory) == 1
    assert len(bags.table("a")) == 0


def test_tables_are_more_than_a_program_counts():
    names = [f"t{number}" for number in range(70)]
    lengths = here(*[number % 3 for number in range(70)])
    values = torch.arange(int(lengths.sum()), device=DEVICE)
    for kind, pooling in ((shoal.EmbeddingCollection, "none"), (shoal.EmbeddingBagCollection, "sum")):
        bags = on_device(*(Table(name, 2, pooling=pooling) for name in names), kind=kind)
        bags(shoal.KeyedJaggedTensor(names, values, lengths=lengths))
        counted = [bags.table(name).stats().counters for name in names]
        assert [one["lookups"] for one in counted] == [one["births"] for one in counted] == lengths.tolist()
        assert [one["hits"] for one in counted] == [0] * 70


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_features_that_no_table_has_are_ignored(pooling):
    kind = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
    tables = [Table("i", 4, features=["a", "b"], pooling=pooling), Table("j", 3, features=["a"], pooling=pooling)]
    narrow = {"a": [[1, 2], [3], []], "b": [[], [5, 5], [1]]}
    wide = {"x": [[9], [9, 9], []], "b": narrow["b"], "y": [[], [8], [8]], "a": narrow["a"]}
    host, device = kind(tables, seed=7), on_device(*tables, kind=kind)
    for _ in range(3):
        outs = []
        for module, batch in ((host, narrow), (device, wide)):
            out = module(placed(kjt(batch), module.device))
            parts = {name: part.values() for name, part in out.items()} if pooling == "none" else out.to_dict()
            sum((part**2).sum() for part in parts.values()).backward()
            outs.append({name: part.detach().cpu() for name, part in parts.items()})
        torch.testing.assert_close(outs[0], outs[1])
    for table in "ij":
        assert torch.equal(host.table(table).keys(), device.table(table).keys().cpu())
