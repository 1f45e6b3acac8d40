"""Assign writes the rows whose outputs reached the loss, and leaves all others alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import assert_same_rows, kjt
from support.oracle import Oracle
from support.sweeps import examples
from support.tiered import SMALL, below, collection, outputs, skewed_kjt

import shoal
from shoal import Assign, Feature, Table

RULES = ["last", "first", "mean"]
POOLINGS = ["sum", "mean", "none"]


def born(name, dim=3, **settings):
    return Table(name, dim, **{"optimizer": Assign(), "init": shoal.Normal(0, 1), **settings})


def bags_of(*tables):
    kind = shoal.EmbeddingCollection if tables[0].pooling == "none" else shoal.EmbeddingBagCollection
    return kind(list(tables), seed=5)


def values(module, out, name):
    return out[name].values() if isinstance(module, shoal.EmbeddingCollection) else out[name]


def rows(module, table, keys):
    return module.table(table).lookup(keys)


# ---- what is left alone


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_table_whose_output_is_not_in_the_loss_keeps_its_rows(pooling):
    module = bags_of(born("a", pooling=pooling), born("b", 2, pooling=pooling))
    batch = kjt({"a": [[1], [2]], "b": [[1], [7]]})
    before = rows(module, "b", [1, 7])
    wanted = torch.randn(2, 3)
    values(module, module(batch), "a").backward(wanted)
    assert torch.equal(rows(module, "a", [1, 2]), wanted)
    assert torch.equal(rows(module, "b", [1, 7]), before)
    assert [module.table(name).stats().step for name in "ab"] == [1, 1]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_feature_that_is_not_in_the_loss_overwrites_nothing(rule, pooling):
    for used, unused in (("a", "b"), ("b", "a")):
        module = bags_of(born("t", features=["a", "b"], pooling=pooling, optimizer=Assign(duplicates=rule)))
        before = rows(module, "t", [3])
        wanted = torch.randn(2, 3)
        values(module, module(kjt({used: [[1], [2]], unused: [[2], [3]]})), used).backward(wanted)
        assert torch.equal(rows(module, "t", [1, 2]), wanted)
        assert torch.equal(rows(module, "t", [3]), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_masked_samples_write_nothing_and_do_not_count(rule, pooling, dtype):
    module = bags_of(born("t", 2, pooling=pooling, optimizer=Assign(duplicates=rule), dtype=dtype))
    before = rows(module, "t", [2])
    out = values(module, module(kjt({"t": [[1], [1], [2], [1], [1]]})), "t")
    gradient = torch.tensor([[0.0, -0.0], [1.0, 0.0], [0.0, 0.0], [4.0, 2.0], [-0.0, 0.0]])
    out.backward(gradient)
    assert rows(module, "t", [1]).tolist() == [{"first": [1, 0], "last": [4, 2], "mean": [2.5, 1]}[rule]]
    assert torch.equal(rows(module, "t", [2]), before)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("rule", RULES)
def test_a_weight_of_zero_is_no_gradient(rule, pooling):
    module = bags_of(born("t", 1, pooling=pooling, optimizer=Assign(duplicates=rule)))
    before = rows(module, "t", [2])
    batch = kjt({"t": [[1, 2], [1, 2]]}, weights={"t": [[0.0, 0.0], [2.0, 0.0]]})
    module(batch).values().backward(torch.tensor([[8.0], [16.0]]))
    assert float(rows(module, "t", [1])) == (32.0 if pooling == "sum" else 16.0)
    assert torch.equal(rows(module, "t", [2]), before)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_features_that_write_and_read_leave_alone_what_the_loss_does_not_touch(pooling):
    features = [Feature("w", mode="write"), Feature("r", mode="read")]
    module = bags_of(born("t", features=features, pooling=pooling))
    before = rows(module, "t", [2, 3])
    out = module(kjt({"w": [[1], [2]], "r": [[1], [3]]}))
    written, read = values(module, out, "w"), values(module, out, "r")
    assert not written.any()
    torch.autograd.backward([written, read], [torch.tensor([[1.0, 2.0, 3.0], [0.0] * 3]), torch.ones(2, 3)])
    assert rows(module, "t", [1]).tolist() == [[1.0, 2.0, 3.0]]
    assert torch.equal(rows(module, "t", [2, 3]), before)
    assert module.table("t").keys().tolist() == [1, 2]


def test_a_row_that_is_left_alone_keeps_its_score_and_is_not_logged(tmp_path):
    module = bags_of(born("t", 1, optimizer=Assign(max_norm=0.5)), born("u", 1, optimizer=shoal.SGD(lr=0.0)))
    with shoal.ChangeLog(tmp_path) as log:
        module(kjt({"t": [[1], [2]], "u": [[1], [2]]})).values().backward(torch.ones(2, 2))
        log.commit(module)
        left = rows(module, "t", [1])
        module(kjt({"t": [[1], [2]], "u": [[1], [2]]})).values().backward(torch.tensor([[0.0, 0.0], [3.0, 0.0]]))
        log.commit(module)
        tables = log.newest.tables
        assert (tables["t"].puts, tables["u"].puts) == (1, 2)
    assert module.table("t").scores([1, 2]).tolist() == [0.0, 1.0]
    assert module.table("u").scores([1, 2]).tolist() == [1.0, 1.0]
    assert torch.equal(rows(module, "t", [1]), left)  # max_norm did not reach it either
    again = bags_of(born("t", 1), born("u", 1, optimizer=shoal.SGD(lr=0.0)))
    shoal.recover(tmp_path, again)
    assert_same_rows(again, module)


def test_a_row_that_is_born_in_the_batch_stays_as_it_was_born():
    module = bags_of(born("t"))
    before = rows(module, "t", [1])
    out = module(kjt({"t": [[1], [2]]})).values()
    out[1].sum().backward()
    assert module.table("t").keys().tolist() == [1, 2]
    assert torch.equal(rows(module, "t", [1, 2]), torch.cat([before, torch.ones(1, 3)]))


def test_a_scaled_loss_leaves_alone_what_it_does_not_touch():
    module = bags_of(born("t", 1))
    before = rows(module, "t", [2])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module.scaler = scaler
    out = module(kjt({"t": [[1], [2]]})).values()
    scaler.scale((out * torch.tensor([[3.0], [0.0]])).sum()).backward()
    assert float(rows(module, "t", [1])) == 3.0
    assert torch.equal(rows(module, "t", [2]), before)


def test_gradients_of_an_erased_key_that_are_zeros_are_not_counted_as_dropped():
    module = bags_of(born("t", 1))
    out = module(kjt({"t": [[1], [2]]})).values()
    module.table("t").erase([1, 2])
    out.backward(torch.tensor([[0.0], [1.0]]))
    assert module.table("t").stats().counters["dropped_gradients"] == 1


def test_other_optimizers_still_take_a_step_for_every_key():
    module = bags_of(born("t", 1, optimizer=shoal.SGD(lr=0.5, decoupled_weight_decay=1.0)), born("u", 1))
    before = rows(module, "t", [1])
    module(kjt({"t": [[1]], "u": [[1]]}))["u"].sum().backward()
    assert torch.equal(rows(module, "t", [1]), before * 0.5)


# ---- the same bits


def train(module, steps, generator):
    features = ["a", "b", "c"]
    for _ in range(steps):
        outs = outputs(module(skewed_kjt(features, generator, keys=700)))
        grads = [torch.randn(out.shape, generator=generator) for out in outs]
        keep = [(torch.rand(len(out), 1, generator=generator) < 0.5) * 1.0 for out in outs]
        torch.autograd.backward(outs, [grad * kept for grad, kept in zip(grads, keep, strict=True)])


def settings_of(rule, which):
    pooling = "none" if which == "sequences" else "mean"
    shared = {"optimizer": Assign(duplicates=rule), "pooling": pooling, "init": shoal.Normal(0, 1)}
    return [
        {"name": "t", "dim": 5, "features": ["a", "b"], **shared},
        {"name": "u", "dim": 32, "features": ["c"], "dtype": "bfloat16", **shared},
    ]


@pytest.mark.parametrize("which", ["bags", "sequences"])
@pytest.mark.parametrize("rule", RULES)
def test_any_number_of_threads_gives_the_same_bits(rule, which):
    made = []
    before = shoal.get_num_threads()
    try:
        for threads in (1, 2, 7):
            shoal.set_num_threads(threads)
            made.append(collection(settings_of(rule, which), which=which))
            train(made[-1], 4, torch.Generator().manual_seed(2))
    finally:
        shoal.set_num_threads(before)
    assert_same_rows(made[0], made[1])
    assert_same_rows(made[0], made[2])


@pytest.mark.parametrize("which", ["bags", "sequences"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_below_memory_are_left_alone_too(rule, which, tmp_path):
    plain = collection(settings_of(rule, which), which=which)
    tiered = collection(settings_of(rule, which), [shoal.Dram(SMALL), below("ssd", tmp_path)], which=which)
    for module in (plain, tiered):
        train(module, 25, torch.Generator().manual_seed(4))
    assert tiered.stats()["t"].tiers[0].demotions > 0
    assert_same_rows(plain, tiered)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("which", ["bags", "sequences"])
def test_compiled_programs_leave_alone_what_the_loss_does_not_touch(which):
    torch.compiler.reset()
    plain, compiled = (collection(settings_of("last", which), which=which) for _ in range(2))

    def loss(module, batch, mask):
        a, _, c = (out * 1.0 for out in parts(module(batch)))
        return (a * mask(a)).sum() * 3 + 0 * c.sum()

    def parts(out):
        if isinstance(out, shoal.KeyedTensor):
            return [out[name] for name in out.keys()]
        return [out[name].values() for name in "abc"]

    def mask(out):
        return (torch.arange(len(out)) % 2)[:, None].to(out.dtype)

    program = torch.compile(lambda batch: loss(compiled, batch, mask), backend="aot_eager")
    for step in range(3):
        batch = kjt({"a": [[1, 2], [2, 3], [4]], "b": [[1], [5], [6]], "c": [[7 + step], [8], []]})
        loss(plain, batch, mask).backward()
        program(batch).backward()
    assert_same_rows(plain, compiled)
    fresh = collection(settings_of("last", which), which=which)
    assert torch.equal(rows(plain, "u", [7, 8]), rows(fresh, "u", [7, 8]))
    assert torch.equal(rows(plain, "t", [5, 6]), rows(fresh, "t", [5, 6]))
    torch.compiler.reset()


# ---- the oracle


@settings(max_examples=examples(40))
@given(data=st.data())
def test_masked_training_equals_the_oracle(data):
    pooling = data.draw(st.sampled_from(POOLINGS))
    mode = data.draw(st.sampled_from(["train", "read", "write"]))
    tables = [
        born(
            "one",
            data.draw(st.sampled_from([1, 3, 16, 33, 64])),
            features=["a", "b"],
            pooling=pooling,
            optimizer=Assign(duplicates=data.draw(st.sampled_from(RULES))),
        ),
        born("two", 2, features=[Feature("b", mode=mode), "c"], pooling=pooling),
    ]
    module, oracle = bags_of(*tables), Oracle(tables, 5)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(0, 4))
        names, features = ["a", "b", "c"], {}
        weighted = pooling != "none" and data.draw(st.booleans())
        for name in names:
            lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), dtype=int)
            n = int(lengths.sum())
            keys = torch.tensor(data.draw(st.lists(st.sampled_from([0, 1, -1, 2, 2**63 - 1]), min_size=n, max_size=n)))
            drawn = data.draw(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=n, max_size=n))
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            features[name] = (keys.long(), offsets, torch.tensor(drawn) if weighted else None)
        batch = shoal.KeyedJaggedTensor(
            names,
            torch.cat([features[name][0] for name in names]),
            torch.cat([features[name][2] for name in names]) if weighted else None,
            lengths=torch.cat([features[name][1].diff() for name in names]),
        )
        oracle.forward(features, training=True)
        out = module(batch)
        parts = [out[name].values() for name in out] if pooling == "none" else list(out.to_dict().values())
        grads = []
        for part in parts:
            keep = torch.rand(len(part), 1, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            grads.append(torch.where(keep, torch.randn(part.shape, generator=generator), 0.0))
        # Outputs whose gradients are all zeros are not in the loss at all, if there is another.
        used = [number for number, grad in enumerate(grads) if grad.any()] or range(len(grads))
        torch.autograd.backward([parts[number] for number in used], [grads[number] for number in used])
        oracle.backward(features, grads)
        for table in oracle.tables:
            handle, keys = module.table(table.config.name), list(table.rows)
            assert sorted(handle.keys().tolist()) == sorted(keys)
            found, scores = handle.lookup(keys), handle.scores(keys).tolist()
            for row, ours, score in zip(table.rows.values(), found, scores, strict=True):
                torch.testing.assert_close(ours, row.weights, rtol=2e-5, atol=2e-5)
                assert score == row.score
