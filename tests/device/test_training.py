"""Steps of tables in device memory against the same tables in host memory."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, Twins, assert_alike, on_device, train
from support.inside import device_rows_of

import shoal
from shoal import Clip, Feature, Table

OPTIMIZERS = {
    "SGD": shoal.SGD(lr=0.1),
    "momentum": shoal.SGD(lr=0.1, momentum=0.9),
    "nesterov": shoal.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": shoal.Adagrad(lr=0.1),
    "RowwiseAdagrad": shoal.RowwiseAdagrad(lr=0.1),
    "Adam": shoal.Adam(lr=0.1),
    "Adam, global": shoal.Adam(lr=0.1, bias_correction="global"),
    "AdamW": shoal.AdamW(lr=0.1, weight_decay=0.5),
    "PartialRowwiseAdam": shoal.PartialRowwiseAdam(lr=0.1),
    "PartialRowwiseAdam, global": shoal.PartialRowwiseAdam(lr=0.1, bias_correction="global"),
    "Ftrl": shoal.Ftrl(lr=0.1, l1=0.5, l2=0.1, beta=0.5),
    "Assign first": shoal.Assign(duplicates="first"),
    "Assign last": shoal.Assign(duplicates="last"),
    "Assign mean": shoal.Assign(duplicates="mean"),
}
LIMITS = {
    "clip to a value": shoal.SGD(lr=0.1, clip=Clip(value=0.5)),
    "clip to a norm": shoal.Adagrad(lr=0.1, clip=Clip(norm=0.5)),
    "clip to both": shoal.Adam(lr=0.1, clip=Clip(value=0.5, norm=0.7)),
    "max_norm": shoal.RowwiseAdagrad(lr=0.5, max_norm=0.1),
    "Assign, max_norm": shoal.Assign(max_norm=0.1),
    "decay": shoal.SGD(lr=0.1, weight_decay=0.5),
    "decoupled decay": shoal.SGD(lr=0.1, momentum=0.5, decoupled_weight_decay=0.5),
    "decay of Adam": shoal.Adam(lr=0.1, weight_decay=0.5),
    "decays": shoal.PartialRowwiseAdam(lr=0.1, weight_decay=0.5, decoupled_weight_decay=0.5),
    "all": shoal.RowwiseAdagrad(
        lr=0.1, clip=Clip(value=1.0, norm=2.0), weight_decay=0.1, decoupled_weight_decay=0.1, max_norm=0.5
    ),
}
DIMS = (1, 3, 8, 33, 130, 260)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), *LIMITS.values()], ids=[*OPTIMIZERS, *LIMITS])
def test_every_optimizer_does_what_it_does_in_host_memory(optimizer):
    twins = Twins(Table("t", 5, features=["a", "b"], optimizer=optimizer, init=shoal.Normal(0, 0.3)))
    for step in range(3):
        twins.step(random_kjt(["a", "b"], keys=12, seed=step), seed=step)
    twins.check()


@pytest.mark.parametrize("optimizer", LIMITS.values(), ids=LIMITS)
def test_gradients_that_are_rounded_products_are_finite(optimizer):
    """A third of a gradient is rounded; a kernel that multiplies again, and finds a difference, must not wonder."""
    twins = Twins(Table("t", 3, pooling="mean", optimizer=optimizer))
    for step in range(2):
        twins.step(kjt({"t": [[1, 2, 3], [4, 5, 6, 7, 8, 9], [1, 1, 2]]}, weights=0.3), seed=step)
        twins.check()


def test_tables_of_many_optimizers_and_dims_train_in_one_collection():
    kinds = ["Adam", "Ftrl", "Assign mean", "momentum", "PartialRowwiseAdam", "RowwiseAdagrad"]
    tables = [Table(kind, dim, optimizer=OPTIMIZERS[kind]) for kind, dim in zip(kinds, DIMS, strict=True)]
    twins = Twins(*tables)
    for step in range(2):
        twins.step(random_kjt(kinds, bags=2, keys=6, seed=step), seed=step)
    twins.check()


@pytest.mark.parametrize("dim", DIMS)
def test_rows_of_any_width_train(dim):
    twins = Twins(Table("a", dim, optimizer=shoal.Adam(lr=0.1), init=shoal.Normal(0, 1)))
    for step in range(2):
        twins.step(random_kjt(["a"], bags=3, keys=6, seed=step), seed=step)
    twins.check()


# ---- features


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_pooling_and_weights(pooling, is_weighted):
    twins = Twins(Table("t", 5, features=["a", "b"], pooling=pooling, init=shoal.Normal(0, 1)))
    for step in range(2):
        twins.step(random_kjt(["a", "b"], keys=12, seed=step, weighted=is_weighted), seed=step)
    twins.check()


def test_poolings_and_weights_meet_in_one_collection():
    twins = Twins(
        Table("x", 4, features=["a", "b"], pooling="mean", init=shoal.Normal(0, 1)),
        Table("y", 4, features=["b"], init=shoal.Normal(0, 1)),
        Table("z", 3, features=["c", "a"], pooling="mean", init=shoal.Normal(0, 1)),
    )
    for step in range(2):
        twins.step(random_kjt(["c", "a", "b"], seed=step, weighted=True), seed=step)
    twins.check()


def test_sequences_train():
    twins = Twins(
        Table("x", 4, features=["a", "b"], pooling="none"),
        Table("y", 3, pooling="none", optimizer=shoal.Adam(lr=0.1)),
        kind=shoal.EmbeddingCollection,
    )
    for step in range(2):
        twins.step(random_kjt(["b", "y", "a"], seed=step), seed=step)
    twins.check()


def test_sequences_whose_outputs_lie_as_the_batch_does():
    twins = Twins(
        Table("x", 4, pooling="none"), Table("y", 4, pooling="none"), kind=shoal.EmbeddingCollection
    )  # fmt: skip
    for step in range(2):
        twins.step(random_kjt(["x", "y"], seed=step), seed=step)
    twins.check()
    twins.evaluate(random_kjt(["x", "y"], keys=40, seed=9))


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_modes_and_features_that_feed_several_tables(pooling):
    read, write = Feature("r", mode="read"), Feature("w", mode="write")
    kind = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
    twins = Twins(
        Table("x", 4, features=["a", read, write], pooling=pooling, optimizer=shoal.SGD(lr=0.5)),
        Table("y", 3, features=[Feature("a", mode="read"), "r"], pooling=pooling),
        Table("z", 4, features=[Feature("a", mode="write"), write], pooling=pooling, optimizer=shoal.Adagrad(lr=0.1)),
        Table("fixed", 2, features=["a"], pooling=pooling, optimizer=None),
        kind=kind,
    )
    for step in range(2):
        twins.step(random_kjt(["a", "r", "w"], keys=10, seed=step), seed=step)
    twins.check()


def test_a_table_all_of_whose_features_read_is_left_alone():
    twins = Twins(Table("x", 4, features=[Feature("a", mode="read")]), Table("y", 4))
    twins.step(random_kjt(["a", "y"]))
    twins.check()
    assert [len(twins.device.table(name)) > 0 for name in "xy"] == [False, True]


# ---- types


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bits_are_rounded_as_in_host_memory(dtype):
    # Gradients and learning rates of few bits: sums are exact, and so every bit must agree.
    twins = Twins(
        Table("a", 5, dtype=dtype, optimizer=shoal.SGD(lr=2**-9), init=shoal.Normal(0, 1)),
        Table("b", 3, dtype=dtype, optimizer=shoal.Assign(), init=shoal.Zeros()),
        Table("c", 3, optimizer=shoal.SGD(lr=2**-9)),
    )
    for step in range(3):
        batch = random_kjt(["a", "b", "c"], keys=12, seed=step)
        outs, _batches = twins.forward(batch)
        gradient = torch.randint(-50, 50, (4, 11)) / 64
        for out in outs:
            out.values().backward(gradient.to(out.values().device))
    twins.check(exact=True)


@pytest.mark.parametrize("optimizer", [shoal.Adam(lr=0.1), shoal.RowwiseAdagrad(lr=0.1, max_norm=1.0)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bits_train(dtype, optimizer):
    twins = Twins(Table("a", 5, dtype=dtype, optimizer=optimizer, init=shoal.Normal(0, 1)))
    for step in range(2):
        twins.step(random_kjt(["a"], keys=12, seed=step), seed=step)
    twins.check()


@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [shoal.EmbeddingBagCollection, shoal.EmbeddingCollection])
def test_outputs_of_16_bits(kind, output_dtype):
    pooling = "sum" if kind is shoal.EmbeddingBagCollection else "none"
    twins = Twins(
        Table("a", 5, pooling=pooling, dtype="bfloat16"), Table("b", 3, pooling=pooling), kind=kind,
        output_dtype=output_dtype,
    )  # fmt: skip
    twins.step(random_kjt(["a", "b"]))
    twins.evaluate(random_kjt(["a", "b"], keys=60, seed=1))
    twins.check()


# ---- repeated keys


@pytest.mark.parametrize(
    ("dim", "reduction"), [(3, "sum"), (3, "first"), (3, "last"), (3, "mean"), (130, "sum"), (130, "last")]
)
def test_a_key_that_fills_many_chunks_is_one_row(dim, reduction):
    optimizer = shoal.SGD(lr=0.01) if reduction == "sum" else shoal.Assign(duplicates=reduction)
    twins = Twins(Table("a", dim, optimizer=optimizer))
    many = 300 if dim == 3 else 70
    twins.step(kjt({"a": [[1] * 20, [5, 1, 1, 2], [2] * 40, [5] * many, [], [1, 3, 4, -9]]}))
    twins.check()


def test_a_key_that_fills_many_chunks_of_16_bit_rows():
    twins = Twins(
        Table("a", 3, dtype="bfloat16", optimizer=shoal.SGD(lr=2**-4)),
        Table("b", 5, dtype="bfloat16", optimizer=shoal.SGD(lr=2**-4)),
    )
    batch = {"a": [[1] * 200, [2, 3], [1, 2]], "b": [[1], [1] * 90, [1, 7]]}
    for step in range(2):
        outs, _batches = twins.forward(kjt(batch))
        gradient = torch.randint(-20, 20, (3, 8), generator=torch.Generator().manual_seed(step)) / 16
        for out in outs:
            out.values().backward(gradient.to(out.values().device))
    twins.check(exact=True)


@pytest.mark.parametrize("total", [63, 64, 65, 128])
def test_rows_that_end_where_chunks_do(total):
    twins = Twins(Table("a", 20, optimizer=shoal.SGD(lr=0.1)))
    twins.step(kjt({"a": [list(range(total - 3)), [500, 500, 500]]}))
    twins.check()
    twins.step(kjt({"a": [[3] * (total - 1), [4]]}))
    twins.check()


# ---- settings


def test_a_scheduler_reaches_the_device():
    twins = Twins(Table("a", 3, optimizer=shoal.SGD(lr=0.1)), Table("b", 3, optimizer=shoal.Adam(lr=0.1)))
    for step in range(3):
        for module in (twins.host, twins.device):
            for group in module.optimizer.param_groups:
                group["lr"] = 0.5 / (step + 1)
        if step == 2:
            for module in (twins.host, twins.device):
                module.optimizer.param_groups[0]["weight_decay"] = 0.25
                module.optimizer.param_groups[1]["betas"] = (0.0, 0.5)
        twins.step(random_kjt(["a", "b"], seed=step), seed=step)
    twins.check()


def test_equal_runs_give_equal_bits():
    def run():
        bags = on_device(
            Table("x", 33, features=["a", "b"], optimizer=shoal.Adam(lr=0.1)),
            Table("y", 5, features=["a"], dtype="bfloat16", pooling="mean"),
        )
        outs = [train(bags, random_kjt(["a", "b"], bags=8, keys=6, seed=step), step) for step in range(2)]
        return bags, torch.cat(outs)

    (one, first), (other, second) = run(), run()
    assert torch.equal(first, second)
    assert_alike(one, _on_cpu(other), exact=True)


def test_the_host_remembers_no_more_steps_than_it_can_hear_of():
    bags = on_device(Table("a", 2))
    device_rows_of(bags).index.reserve({0: 10_000})
    rows = device_rows_of(bags)
    rows.storage.grow(0, 10_000)
    for place in range(2):
        rows.room.set_fit(place, 10_000)  # so much room that it is never asked
    for step in range(20):
        train(bags, kjt({"a": [[step]]}))
    assert rows.room.remembered() <= rows.ledger.copies + 1
    bags.check()
    assert bags.table("a").keys().tolist() == list(range(20))


@pytest.mark.parametrize("optimizer", [shoal.Adam(lr=0.1), shoal.SGD(lr=0.1)])
def test_what_a_row_learns_does_not_depend_on_where_it_lies(optimizer):
    def made():
        return on_device(Table("a", 6, optimizer=optimizer), Table("b", 9, optimizer=optimizer))

    def batch(step):  # rows of one item, of some, and of several pieces
        repeated = {"a": [[5] * 40 + [6] * 3, [7, 5, 8, -1] * 9 + [5] * 60], "b": [[1, 2] * 20, [3 + step]]}
        return kjt(repeated)

    one, other = made(), made()
    train(one, kjt({"a": [[8, 3, 7, 6, -1, 5]], "b": [[2, 4, 1, 3]]}), 0)
    other.load_state_dict(one.state_dict())  # other slots
    for step in range(2):
        assert torch.equal(train(one, batch(step), step), train(other, batch(step), step))
    assert_alike(one, _on_cpu(other), exact=True)


class _on_cpu:
    """A module whose state dict is read on the host."""

    def __init__(self, module):
        self._module = module

    def state_dict(self):
        return {name: value.cpu() for name, value in self._module.state_dict().items()}


# ---- sweeps

_INITS = st.sampled_from([shoal.Normal(0, 1), shoal.Uniform(-1, 2), shoal.Constant(0.5), shoal.Zeros()])
_KEYS = st.sampled_from([0, 1, -1, 2, 3, 50, 2**63 - 1, -(2**63), 10**18])


@st.composite
def _collections(draw):
    pooling = draw(st.sampled_from([["none"], ["sum", "mean"]]))
    features = ["a", "b", "c"][: draw(st.integers(1, 3))]
    tables = []
    for number in range(draw(st.integers(1, 3))):
        modes = draw(st.lists(st.sampled_from(["train", "read", "write"]), min_size=len(features), max_size=3))
        chosen = [Feature(name, mode=mode) for name, mode in zip(features, modes, strict=False)]
        tables.append(
            Table(
                f"t{number}",
                draw(st.sampled_from([1, 3, 8, 17])),
                features=chosen,
                pooling=draw(st.sampled_from(pooling)),
                optimizer=draw(st.sampled_from([*OPTIMIZERS.values(), *LIMITS.values(), None])),
                init=draw(_INITS),
            )
        )
    kind = shoal.EmbeddingCollection if pooling == ["none"] else shoal.EmbeddingBagCollection
    return tables, kind, features


@st.composite
def _batches(draw, features):
    bags = draw(st.integers(0, 3))
    keys = {name: [draw(st.lists(_KEYS, max_size=5)) for _ in range(bags)] for name in features}
    weights = None
    if draw(st.booleans()):
        weights = {
            name: [[draw(st.sampled_from([1.0, 0.5, -2.0])) for _ in bag] for bag in keys[name]] for name in keys
        }
    return kjt(keys, weights=weights)


def _whatever(data, steps):
    tables, kind, features = data.draw(_collections())
    twins = Twins(*tables, kind=kind)
    for step in range(steps):
        batch = data.draw(_batches(features))
        if data.draw(st.booleans(), label="evaluate first"):
            twins.evaluate(batch)
        twins.step(batch, seed=step, keep=data.draw(st.sampled_from([1.0, 0.5]), label="keep"))
        twins.check()


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_whatever_is_configured_agrees_with_host_memory(data):
    _whatever(data, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # Triton's interpreter takes seconds an example
@settings(max_examples=150, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_whatever_is_configured_agrees_with_host_memory_for_longer(data):
    _whatever(data, 4)


@pytest.mark.parametrize("duplicates", ["first", "last"])
def test_a_row_takes_its_gradients_in_the_order_of_its_tables_features(duplicates):
    twins = Twins(Table("t", 2, features=["a", "b"], optimizer=shoal.Assign(duplicates=duplicates)))
    twins.step(kjt({"b": [[2]], "a": [[2]]}))
    twins.check()


def test_the_order_of_features_holds_where_one_feeds_several_tables():
    assign = shoal.Assign(duplicates="last")
    twins = Twins(Table("w", 2, features=["a"]), Table("t", 2, features=["a", "b"], optimizer=assign))
    twins.step(kjt({"a": [[2]], "b": [[2]]}))
    twins.check()


def test_a_feature_that_reads_sees_keys_that_another_brings_in_the_same_batch():
    reads = [Feature("reads", mode="read"), "brings"]
    twins = Twins(Table("item", 2, features=reads, missing="zero", init=shoal.Constant(1.0)))
    out = twins.device(kjt({"reads": [[7], [8]], "brings": [[7], []]}).to(DEVICE))
    assert out["reads"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
