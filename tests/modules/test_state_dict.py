"""state_dict and load_state_dict carry rows, state, scores, keys and steps."""

import io

import pytest
import torch
from support.batches import assert_same_rows, assert_unchanged, kjt, memory, random_kjt, train_step
from torch import nn

import shoal
from shoal.errors import CapacityError, StateDictError

OPTIMIZERS = [
    shoal.SGD(lr=0.1),
    shoal.SGD(lr=0.1, momentum=0.9),
    shoal.Adagrad(lr=0.1),
    shoal.RowwiseAdagrad(lr=0.1),
    shoal.Adam(lr=0.1),
    shoal.Adam(lr=0.1, bias_correction="global"),
    shoal.AdamW(lr=0.1),
    shoal.PartialRowwiseAdam(lr=0.1),
    shoal.Ftrl(lr=0.1),
    shoal.Assign(),
    None,
]


ADAM = shoal.Adam(lr=0.1)


def collection(optimizer=ADAM, dtype="float32", pooling="sum", **settings):
    tables = [
        shoal.Table("item", 5, features=["item", "history"], optimizer=optimizer, dtype=dtype, pooling=pooling),
        shoal.Table("user", 3, pooling=pooling),
    ]
    kind = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
    return kind(tables, **settings)


def trained(steps=3, **settings):
    bags = collection(**settings)
    for step in range(steps):
        train_step(bags, random_kjt(["item", "history", "user"], seed=step), seed=step)
    return bags


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_loaded_collection_continues_bit_for_bit(optimizer, dtype):
    bags = trained(optimizer=optimizer, dtype=dtype)
    if optimizer is None:
        bags.table("item").assign([1, -5, 2**63 - 1], torch.randn(3, 5))
    other = collection(optimizer=optimizer, dtype=dtype)
    train_step(other, kjt({"item": [[99]], "history": [[98]], "user": [[97]]}))
    assert other.load_state_dict(through_a_file(bags.state_dict())) == ([], [])
    assert_same_rows(bags, other)
    for step in range(2):
        batch = random_kjt(["item", "history", "user"], keys=40, seed=10 + step)
        assert torch.equal(train_step(bags, batch, seed=step), train_step(other, batch, seed=step))
    assert_same_rows(bags, other)


def test_sequences_are_loaded_too():
    sequences = trained(pooling="none")
    other = collection(pooling="none")
    other.load_state_dict(sequences.state_dict())
    assert_same_rows(sequences, other)
    assert "embeddings.item.weight" in sequences.state_dict()


def test_entries_have_torchrec_names_and_their_types():
    state = trained(dtype="bfloat16").state_dict()
    n = len(state["embedding_bags.item.weight_id"])
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items() if ".item." in name} == {
        "embedding_bags.item.weight": ((n, 5), torch.bfloat16),
        "embedding_bags.item.weight_id": ((n, 1), torch.int64),
        "embedding_bags.item.state.exp_avg": ((n, 5), torch.float32),
        "embedding_bags.item.state.exp_avg_sq": ((n, 5), torch.float32),
        "embedding_bags.item.state.count": ((n, 1), torch.float32),
        "embedding_bags.item.score": ((n,), torch.float64),
        "embedding_bags.item.step": ((), torch.int64),
    }
    assert int(state["embedding_bags.item.step"]) == 3


def test_a_state_dict_is_a_copy():
    bags = trained()
    state = bags.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    train_step(bags, random_kjt(["item", "history", "user"]))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_keys_may_come_in_any_order_and_as_one_dimension():
    bags = trained()
    state = bags.state_dict()
    n = len(state["embedding_bags.item.score"])
    order = torch.randperm(n)
    for name, value in state.items():
        if ".item." in name and value.dim():
            state[name] = value[order]
    state["embedding_bags.item.weight_id"] = state["embedding_bags.item.weight_id"].reshape(-1)
    other = collection()
    other.load_state_dict(state)
    assert_same_rows(bags, other)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.bags = collection()
        self.sequences = shoal.EmbeddingCollection([shoal.Table("word", 4, pooling="none")])
        self.dense = nn.Linear(13, 1)


def test_a_model_with_collections_and_dense_layers():
    model, other = Model(), Model()
    train_step(model.bags, random_kjt(["item", "history", "user"]))
    train_step(model.sequences, random_kjt(["word"]))
    state = through_a_file(model.state_dict())
    assert {"before.weight", "dense.bias", "bags.embedding_bags.user.weight", "sequences.embeddings.word.score"} <= set(
        state
    )
    other.load_state_dict(state)
    assert_same_rows(model, other)


def test_a_subclass_keeps_its_own_parameters_and_modules():
    class Projected(shoal.EmbeddingBagCollection):
        def __init__(self, tables):
            super().__init__(tables)
            self.project = nn.Linear(3, 1)
            self.scale = nn.Parameter(torch.randn(1))

    one, other = (Projected([shoal.Table("user", 3)]) for _ in range(2))
    train_step(one, kjt({"user": [[1, 2], [3]]}))
    other.load_state_dict(one.state_dict())
    assert_same_rows(one, other)
    assert {"project.weight", "scale"} < set(one.state_dict())


@pytest.mark.parametrize("name", ["weight", "weight_id", "state.count", "score", "step"])
def test_a_missing_entry_is_named_and_nothing_is_loaded(name):
    state = trained().state_dict()
    del state[f"embedding_bags.item.{name}"]
    bags = trained(steps=1)
    before = memory(bags)
    with pytest.raises(StateDictError, match=rf"lacks \['embedding_bags\.item\.{name}'\]"):
        bags.load_state_dict(state)
    assert_unchanged(bags, before)


@pytest.mark.parametrize("name", ["embedding_bags.item.state.momentum", "embedding_bags.shop.weight", "extra"])
def test_an_unexpected_entry_is_named_and_nothing_is_loaded(name):
    state = trained().state_dict()
    state[name] = torch.zeros(1)
    bags = trained(steps=1)
    before = memory(bags)
    with pytest.raises(StateDictError, match=rf"unknown \['{name}'\]"):
        bags.load_state_dict(state)
    assert_unchanged(bags, before)


def test_not_strict_loads_what_is_there():
    source, bags = trained(), trained(steps=1)
    user = {name: value for name, value in bags.state_dict().items() if ".user." in name}
    state = {name: value for name, value in source.state_dict().items() if ".user." not in name}
    del state["embedding_bags.item.state.count"], state["embedding_bags.item.score"]
    state["extra"] = torch.zeros(1)
    missing, unexpected = bags.load_state_dict(state, strict=False)
    assert set(missing) == {*user, "embedding_bags.item.state.count", "embedding_bags.item.score"}
    assert unexpected == ["extra"]
    loaded = bags.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in user.items())
    assert torch.equal(loaded["embedding_bags.item.weight"], state["embedding_bags.item.weight"])
    assert torch.equal(loaded["embedding_bags.item.state.exp_avg"], state["embedding_bags.item.state.exp_avg"])
    assert not loaded["embedding_bags.item.state.count"].any()  # as rows are born


def test_a_model_names_what_its_collections_lack():
    model, state = Model(), Model().state_dict()
    del state["bags.embedding_bags.item.weight"], state["dense.bias"]
    state["bags.embedding_bags.item.size"] = state["before.weight"]
    with pytest.raises(RuntimeError, match="Missing key") as raised:
        model.load_state_dict(state)
    assert "bags.embedding_bags.item.weight" in str(raised.value)
    assert "bags.embedding_bags.item.size" in str(raised.value)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["bags.embedding_bags.item.weight", "dense.bias"]
    assert unexpected == ["bags.embedding_bags.item.size"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", ["score", "step", "state.sum"])
def test_weights_and_state_without_keys_are_refused(strict, other):
    bags = shoal.EmbeddingBagCollection([shoal.Table("item", 4)])
    train_step(bags, kjt({"item": [[1, 2]]}))
    state = {name: bags.state_dict()[f"embedding_bags.item.{name}"] for name in ("weight", other)}
    before = bags.state_dict()
    for module, prefix in ((bags, ""), (nn.ModuleDict({"bags": bags}), "bags.")):
        given = {f"{prefix}embedding_bags.item.{name}": value for name, value in state.items()}
        with pytest.raises(StateDictError, match="weight"):
            module.load_state_dict(given, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


@pytest.mark.parametrize("weight", [torch.zeros(3, 4, device="meta"), torch.zeros(3, 4).to_sparse()])
def test_weights_without_data_are_refused(weight):
    bags = shoal.EmbeddingBagCollection([shoal.Table("item", 4)])
    with pytest.raises(StateDictError, match="dense tensor with data"):
        bags.load_state_dict({"embedding_bags.item.weight": weight})
    assert len(bags.table("item")) == 0


def spoiled(state, name, change):
    state = dict(state)
    state[f"embedding_bags.{name}"] = change(state[f"embedding_bags.{name}"].clone())
    return state


def with_nan(values):
    values[1] = float("nan")
    return values


def with_infinity(values):
    values[0] = float("inf")
    return values


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("user.weight", lambda t: t[:, :2], r"shape \(\d+, 3\); got \(\d+, 2\)"),
        ("user.weight", lambda t: t[1:], "shape"),
        ("user.weight", lambda t: t.half(), "must be torch.float32; got torch.float16"),
        ("user.weight", with_nan, "finite"),
        ("user.weight", with_infinity, "finite"),
        ("user.weight", lambda t: t.tolist(), "must be a tensor; got list"),
        ("user.weight_id", lambda t: t.int(), "must be torch.int64"),
        ("user.weight_id", lambda t: t.expand(-1, 2), r"\[n, 1\] or \[n\]"),
        ("user.weight_id", lambda t: t[0, 0], r"\[n, 1\] or \[n\]"),
        ("user.weight_id", lambda t: t.index_fill(0, torch.tensor([1]), int(t[0])), "each key once"),
        ("user.state.sum", lambda t: t.double(), "must be torch.float32"),
        ("user.state.sum", lambda t: t[:, 0], "shape"),
        ("user.state.sum", with_nan, "finite"),
        ("user.score", lambda t: t.float(), "must be torch.float64"),
        ("user.score", lambda t: t[:-1], "shape"),
        ("user.score", with_nan, "finite"),
        ("user.step", lambda t: t.double(), "must be torch.int64"),
        ("user.step", lambda t: t - 100, "not negative"),
        ("user.step", lambda t: t.repeat(2), "one number"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_entry_is_named_and_nothing_is_loaded(name, change, message, strict):
    bags = trained(steps=1)
    before = memory(bags)
    with pytest.raises(StateDictError, match=message) as raised:
        bags.load_state_dict(spoiled(trained().state_dict(), name, change), strict=strict)
    assert f"embedding_bags.{name}" in str(raised.value)
    assert_unchanged(bags, before)


def test_above_the_limit_it_raises_and_names_the_limit():
    bags = trained()
    bags.state_dict_limit = "1KiB"
    with pytest.raises(StateDictError, match="state_dict_limit is 1KiB"):
        bags.state_dict()
    bags.state_dict_limit = 2**20
    bags.state_dict()
    with pytest.raises(shoal.errors.ConfigError, match="state_dict_limit"):
        bags.state_dict_limit = "much"


def test_content_that_does_not_fit_the_budget_is_refused_and_nothing_is_loaded():
    full = shoal.EmbeddingBagCollection([shoal.Table("small", 4), shoal.Table("user", 64)])
    train_step(full, kjt({"small": [[7]], "user": [list(range(20_000))]}))
    bags = shoal.EmbeddingBagCollection([shoal.Table("small", 4), shoal.Table("user", 64, tiers=[shoal.Dram("4MiB")])])
    train_step(bags, kjt({"small": [[1, 2]], "user": [[3]]}))
    before = memory(bags)
    with pytest.raises(CapacityError, match="Dram"):
        bags.load_state_dict(full.state_dict())
    assert_unchanged(bags, before)
    train_step(bags, kjt({"small": [[1, 2]], "user": [[3]]}))


def test_a_forward_from_before_the_load_cannot_go_backward():
    bags = trained()
    out = bags(random_kjt(["item", "history", "user"]))
    state = bags.state_dict()
    bags.load_state_dict(state)
    with pytest.raises(shoal.errors.BackwardError, match="loaded"):
        out.values().sum().backward()
    assert all(torch.equal(value, state[name]) for name, value in bags.state_dict().items())


def test_erased_rows_are_not_saved():
    bags = trained()
    keys = bags.table("item").keys()
    bags.table("item").erase(keys[:2])
    assert torch.equal(bags.state_dict()["embedding_bags.item.weight_id"][:, 0], keys[2:])


@pytest.mark.parametrize("column", ["exp_avg_sq", "count"])
def test_state_that_cannot_be_negative_is_refused(column):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.Adam())])
    bags(kjt({"a": [[1, 2]]})).values().sum().backward()
    state = bags.state_dict()
    state[f"embedding_bags.a.state.{column}"][1, 0] = -1.0
    with pytest.raises(StateDictError, match="must not be negative"):
        bags.load_state_dict(state)
