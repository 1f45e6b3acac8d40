"""Training against the oracle: forward, backward and state, over odd dims, empty bags, repeated and extreme keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import Oracle
from support.sweeps import examples

import shoal
from shoal.modules import KeyedJaggedTensor

KEYS = st.one_of(
    st.integers(-3, 6),
    st.sampled_from([0, -1, -(2**63), 2**63 - 1, 2**31, -(2**31), 2**32]),
    st.integers(-(2**63), 2**63 - 1),
)
OPTIMIZERS = {
    "sgd": shoal.SGD(lr=0.3),
    "sgd-l2": shoal.SGD(lr=0.3, weight_decay=0.1),
    "sgd-decoupled": shoal.SGD(lr=0.3, decoupled_weight_decay=0.1),
    "momentum": shoal.SGD(lr=0.3, momentum=0.9),
    "nesterov": shoal.SGD(lr=0.3, momentum=0.9, nesterov=True),
    "adagrad": shoal.Adagrad(lr=0.3, initial=0.1),
    "rowwise": shoal.RowwiseAdagrad(lr=0.3),
    "rowwise-decay": shoal.RowwiseAdagrad(lr=0.3, weight_decay=0.1, decoupled_weight_decay=0.2, initial=0.5),
    "adam": shoal.Adam(lr=0.1, weight_decay=0.05),
    "adam-global": shoal.Adam(lr=0.1, bias_correction="global"),
    "adamw": shoal.AdamW(lr=0.1, weight_decay=0.1),
    "partial-adam": shoal.PartialRowwiseAdam(lr=0.1),
    "partial-adam-global": shoal.PartialRowwiseAdam(lr=0.1, bias_correction="global", decoupled_weight_decay=0.1),
    "ftrl": shoal.Ftrl(lr=0.3, l1=0.01, l2=0.1, beta=0.2),
    "clip-value": shoal.SGD(lr=0.3, clip=shoal.Clip(value=0.5)),
    "clip-norm": shoal.Adagrad(lr=0.3, clip=shoal.Clip(norm=0.5)),
    "clip-both": shoal.SGD(lr=0.3, clip=shoal.Clip(value=0.5, norm=0.7)),
    "max-norm": shoal.SGD(lr=0.3, max_norm=0.4),
    "assign-last": shoal.Assign(),
    "assign-first": shoal.Assign(duplicates="first"),
    "assign-mean": shoal.Assign(duplicates="mean"),
}
INITS = [shoal.Uniform(-0.5, 0.5), shoal.Normal(0.1, 0.3), shoal.Zeros(), shoal.Constant(0.25)]


@st.composite
def batches(draw, names, weighted):
    """Keys, offsets and weights of every feature; the same number of bags in each."""
    bags = draw(st.integers(0, 4))
    batch = {}
    for name in names:
        lengths = draw(st.lists(st.integers(0, 4), min_size=bags, max_size=bags))
        n = sum(lengths)
        keys = torch.tensor(draw(st.lists(KEYS, min_size=n, max_size=n)), dtype=torch.int64)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        weights = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 2.0]), min_size=n, max_size=n)))
        batch[name] = (keys, offsets, weights if weighted else None)
    return batch


def to_kjt(batch, names, index_dtype):
    lengths = torch.cat([batch[name][1].diff() for name in names]) if names else torch.empty(0, dtype=torch.int64)
    weights = torch.cat([batch[name][2] for name in names]) if batch[names[0]][2] is not None else None
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat([batch[name][0] for name in names]),
        lengths=lengths.to(index_dtype),
        weights=weights,
    )


def close(ours, theirs, dtype):
    # 16-bit rows: sums that differ in their last float32 bit may round to neighbours.
    tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def compare(collection, oracle):
    for table in oracle.tables:
        handle = collection.table(table.config.name)
        assert sorted(handle.keys().tolist()) == sorted(table.rows)
        if not table.rows:
            continue
        keys = torch.tensor(list(table.rows))
        close(handle.lookup(keys), torch.stack([row.weights for row in table.rows.values()]), table.config.dtype)
        for name, values in handle.state(keys).items():
            close(values, torch.stack([row.state[name] for row in table.rows.values()]), table.config.dtype)
        assert handle.scores(keys).tolist() == [row.score for row in table.rows.values()]
        assert handle.stats().step == table.step


def run_steps(collection, oracle, steps, names, index_dtype, data):
    pooled = isinstance(collection, shoal.EmbeddingBagCollection)
    for training in steps:
        weighted = pooled and data.draw(st.booleans())
        batch = data.draw(batches(names, weighted))
        collection.train(training)
        features = to_kjt(batch, data.draw(st.permutations(names)), index_dtype)
        weights = features.weights_or_none()
        if weights is not None:
            weights.requires_grad_()
        wanted = oracle.forward(batch, training)
        result = collection(features)
        ours = list(result.to_dict().values()) if pooled else [jagged.values() for jagged in result.values()]
        for out, reference, table in zip(
            ours, wanted, [t for t in oracle.tables for _ in t.config.features], strict=True
        ):
            close(out, reference, table.config.dtype)
        if not training:
            compare(collection, oracle)
            continue
        grads = [torch.randn(out.shape) for out in ours]
        if pooled:
            result.values().backward(torch.cat(grads, dim=1))
        else:
            torch.autograd.backward(ours, grads)
        weight_grads = oracle.backward(batch, grads)
        if weights is not None:
            named = {name: weight_grads.get(name, torch.zeros(len(batch[name][0]))) for name in names}
            close(weights.grad, torch.cat([named[name] for name in features.keys()]), "bfloat16")
        compare(collection, oracle)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=examples(12))
@given(data=st.data())
def test_pooled_training_equals_the_oracle(name, dtype, data):
    seed = data.draw(st.sampled_from([0, 7, 2**64 - 1]))
    tables = [
        shoal.Table(
            "one",
            data.draw(st.sampled_from([1, 3, 4, 16, 17, 35])),
            features=["a", "b"],
            pooling=data.draw(st.sampled_from(["sum", "mean"])),
            optimizer=OPTIMIZERS[name],
            init=data.draw(st.sampled_from(INITS)),
            missing=data.draw(st.sampled_from(["init", "zero"])),
            dtype=dtype,
        ),
        shoal.Table(
            "two",
            data.draw(st.sampled_from([2, 64, 129])),
            features=[shoal.Feature("c", data.draw(st.sampled_from(["train", "read", "write"]))), "d"],
            optimizer=shoal.SGD(lr=0.1),
            init=shoal.Normal(0, 0.5),
        ),
    ]
    collection = shoal.EmbeddingBagCollection(tables, seed=seed)
    steps = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    run_steps(
        collection,
        Oracle(tables, seed),
        steps,
        ["a", "b", "c", "d"],
        data.draw(st.sampled_from([torch.int32, torch.int64])),
        data,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_sequence_training_equals_the_oracle(name, data):
    tables = [
        shoal.Table(
            "one",
            data.draw(st.sampled_from([1, 5, 16, 33])),
            features=["a", "b"],
            pooling="none",
            optimizer=OPTIMIZERS[name],
            init=data.draw(st.sampled_from(INITS)),
            dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        ),
        shoal.Table("two", 7, features=["c"], pooling="none", optimizer=shoal.SGD(lr=0.1)),
    ]
    collection = shoal.EmbeddingCollection(tables, seed=3)
    steps = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    run_steps(collection, Oracle(tables, 3), steps, ["a", "b", "c"], torch.int64, data)
