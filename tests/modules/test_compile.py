"""torch.compile gives the same rows as eager, by the same native calls."""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.batches import assert_same_rows, kjt, random_kjt
from support.inside import group_of, live_leases_of
from support.torch_private import dynamo_config
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import BackwardError, ConfigError, InputError, ModeWarning, NonFiniteError, OptimizerWarning
from shoal.table import Each, HostGroup

# Warnings that torch's own compiler gives.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.timeout(600),
]

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def calls(monkeypatch):
    """Counts the native calls of all groups."""
    counts = dict.fromkeys(("lookup", "lookup_each", "update"), 0)

    lookup, update = HostGroup.lookup, HostGroup.update

    def counted_lookup(group, request):
        counts["lookup_each" if isinstance(request.output, Each) else "lookup"] += 1
        return lookup(group, request)

    def counted_update(group, change):
        counts["update"] += 1
        return update(group, change)

    monkeypatch.setattr(HostGroup, "lookup", counted_lookup)
    monkeypatch.setattr(HostGroup, "update", counted_update)
    return counts


def counted(counts, work):
    for name in counts:
        counts[name] = 0
    work()
    return dict(counts)


class Model(nn.Module):
    """Its gradients are exact, so that generated code gives the same bits."""

    def __init__(self):
        super().__init__()
        self.bags = shoal.EmbeddingBagCollection(
            [
                shoal.Table("a", 4, features=["a", "c"], optimizer=shoal.Adam(lr=0.1), dtype="bfloat16"),
                shoal.Table("b", 3, pooling="mean"),
            ]
        )
        self.scale = nn.Parameter(torch.linspace(-1, 1, 11))

    def forward(self, batch):
        return self.bags(batch).values() * self.scale


def train(model, function, steps, weighted=False):
    outs = []
    for step in steps:
        batch = random_kjt(["a", "b", "c"], bags=3 + step % 4, keys=30, seed=step, weighted=weighted)
        out = function(batch)
        out.sum().backward()
        outs.append(out.detach())
    return outs


@contextlib.contextmanager
def no_recompilation():
    with dynamo_config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_training_is_the_same_bit_for_bit(backend, weighted, calls):
    plain, model = Model(), Model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = [], []
    eager = counted(calls, lambda: theirs.extend(train(plain, plain, range(3), weighted)))
    assert eager == {"lookup": 3, "lookup_each": 0, "update": 3}
    assert counted(calls, lambda: ours.extend(train(model, compiled, range(3), weighted))) == eager
    with no_recompilation():
        train(plain, plain, range(3, 9), weighted)
        train(model, compiled, range(3, 9), weighted)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert_same_rows(plain.bags, model.bags)
    torch.testing.assert_close(plain.scale.grad, model.scale.grad)
    assert len(live_leases_of(model.bags)) <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_is_the_same_and_changes_nothing(backend, calls):
    plain, model = Model(), Model()
    train(plain, plain, range(2))
    train(model, model, range(2))
    plain.eval(), model.eval()
    before = model.state_dict()
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def evaluate(function, steps=range(2, 5)):
        return [function(random_kjt(["a", "b", "c"], bags=step, keys=60, seed=step)) for step in steps]

    results = []
    eager = counted(calls, lambda: results.append(evaluate(plain)))
    assert eager == {"lookup": 3, "lookup_each": 0, "update": 0}
    assert counted(calls, lambda: results.append(evaluate(compiled))) == eager
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    with no_recompilation():
        evaluate(compiled, range(5, 9))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_equal_lookups_stay_two_and_both_update(backend, calls):
    def work(bags, batch):
        return bags(batch).values() + bags(batch).values()

    plain, bags = (shoal.EmbeddingBagCollection([shoal.Table("a", 4)]) for _ in range(2))
    batch = kjt({"a": [[1, 2], [3]]})
    compiled = torch.compile(work, backend=backend, fullgraph=True)
    for _ in range(2):
        eager = counted(calls, lambda: work(plain, batch).sum().backward())
        assert eager == {"lookup": 2, "lookup_each": 0, "update": 2}
        assert counted(calls, lambda: compiled(bags, batch).sum().backward()) == eager
    assert bags.table("a").stats().step == 4
    assert_same_rows(plain, bags)
    bags.eval(), plain.eval()
    eager = counted(calls, lambda: work(plain, batch))
    assert counted(calls, lambda: compiled(bags, batch)) == eager == {"lookup": 2, "lookup_each": 0, "update": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lookup_whose_result_is_not_used_still_inserts(backend, calls):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])

    def work(batch, x):
        bags(batch)
        return x + 1

    torch.compile(work, backend=backend, fullgraph=True)(kjt({"a": [[1, 2], [3]]}), torch.ones(1))
    assert len(bags.table("a")) == 3
    assert calls["lookup"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_are_compiled_too(backend, need_indices, calls):
    def make():
        return shoal.EmbeddingCollection(
            [shoal.Table("a", 4, pooling="none"), shoal.Table("b", 3, pooling="none")], need_indices=need_indices
        )

    plain, module = make(), make()
    compiled = torch.compile(module, backend=backend, fullgraph=True)

    def work(function, steps):
        for step in steps:
            out = function(random_kjt(["b", "a"], bags=3 + step, seed=step))
            (out["a"].values().sum() + 2 * out["b"].values().sum()).backward()

    eager = counted(calls, lambda: work(plain, range(3)))
    assert eager == {"lookup": 0, "lookup_each": 3, "update": 3}
    assert counted(calls, lambda: work(compiled, range(3))) == eager
    with no_recompilation():
        work(compiled, range(3, 6))
    work(plain, range(3, 6))
    assert_same_rows(plain, module)
    batch = random_kjt(["b", "a"], seed=9)
    plain.eval(), module.eval()
    for name, jagged in plain(batch).items():
        assert torch.equal(jagged.values(), compiled(batch)[name].values())
        assert torch.equal(jagged.lengths(), compiled(batch)[name].lengths())


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_get_their_gradient(backend):
    tables = [shoal.Table("a", 4, init=shoal.Normal(0, 1))]
    plain, bags = (shoal.EmbeddingBagCollection(tables) for _ in range(2))
    compiled = torch.compile(bags, backend=backend, fullgraph=True)
    for training in (True, False):
        plain.train(training), bags.train(training)
        gradients = []
        for function in (plain, compiled):
            batch = random_kjt(["a"], weighted=True)
            function_of = batch.weights().requires_grad_()
            function(batch).values().sum().backward()
            gradients.append(function_of.grad)
        assert torch.equal(*gradients)
    assert_same_rows(plain, bags)


def test_a_batch_made_inside_the_graph():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 3)])

    def work(values, lengths):
        return bags(shoal.KeyedJaggedTensor(["a", "b"], values, lengths=lengths)).values()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    for size in (2, 3, 5):
        values, lengths = torch.arange(4 * size), torch.full((2 * size,), 2)
        out = compiled(values, lengths)
        out.sum().backward()
        assert out.shape == (size, 7)
    assert bags.table("a").stats().step == 3


def test_errors_come_through_and_nothing_changes():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    out = compiled(kjt({"a": [[1, 2], [3]]})).values()
    before = bags.state_dict()
    with pytest.raises(NonFiniteError, match="'a'"):
        out.backward(torch.full((2, 4), float("nan")))
    bad = shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 9]), lengths=torch.tensor([2, 5]))
    with pytest.raises(InputError, match="sum to 7"):
        compiled(bad)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


def test_a_second_backward_is_refused():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    loss = compiled(kjt({"a": [[1, 2], [3]]})).values().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert bags.table("a").stats().step == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_of_one_backward_keep_their_order(backend):
    def work(bags, one, other):
        return bags(one).values() * 3 + bags(other).values() + bags(one).values() * 2

    plain, bags = (shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.Adam(lr=0.1))]) for _ in range(2))
    compiled = torch.compile(work, backend=backend, fullgraph=True)
    for step in range(3):
        batches = [random_kjt(["a"], seed=seed) for seed in (step, step + 10)]
        for function, module in ((work, plain), (compiled, bags)):
            function(module, *batches).sum().backward()
    assert bags.table("a").stats().step == 9
    assert_same_rows(plain, bags)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_inside_the_graph(backend, calls):
    # Generated code gives the memory of offsets, which it computes, to others before the backward.
    def make():
        torch.manual_seed(0)
        bags, dense = shoal.EmbeddingBagCollection([shoal.Table("a", 4, dtype="bfloat16")]), nn.Linear(4, 4)

        def bottom(batch):
            return torch.relu(dense(bags(batch).values()))

        return bags, lambda batch: checkpoint(bottom, batch, use_reentrant=False).sum()

    (plain, work), (bags, same) = make(), make()
    compiled = torch.compile(same, backend=backend, fullgraph=True)
    for step in range(3):
        batch = random_kjt(["a"], bags=4, seed=step)
        eager = counted(calls, lambda batch=batch: work(batch).backward())
        assert eager == {"lookup": 2, "lookup_each": 0, "update": 1}
        # A compiler may keep what the lookup gave (torch 2.11) or look it up again (2.13), but not update twice.
        graph = counted(calls, lambda batch=batch: compiled(batch).backward())
        assert graph == eager | {"lookup": graph["lookup"]}
        assert graph["lookup"] in (1, 2)
    assert_same_rows(plain, bags)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_forwards_may_wait_for_their_backwards(order, backend):
    plain, bags = (shoal.EmbeddingBagCollection([shoal.Table("a", 4)]) for _ in range(2))
    compiled = torch.compile(bags, backend=backend, fullgraph=True)
    batches = [kjt({"a": [[1, 2], [3]]}), kjt({"a": [[2], [4, 5]]})]
    for function in (plain, compiled):
        outs = [function(batch).values() for batch in batches]
        for at in order:
            outs[at].sum().backward()
    assert_same_rows(plain, bags)


def test_forwards_without_a_backward_keep_nothing():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    for _ in range(50):
        compiled(kjt({"a": [[1, 2], [3]]}))
    assert len(live_leases_of(bags)) <= 2


def test_settings_change_without_a_recompilation():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.SGD(lr=1.0))])
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    batch = kjt({"a": [[1], [2]]})
    compiled(batch).values().sum().backward()
    before = bags.table("a").lookup([1])
    bags.optimizer.param_groups[0]["lr"] = 4.0
    with no_recompilation():
        compiled(batch).values().sum().backward()
    torch.testing.assert_close(bags.table("a").lookup([1]), before - 4)


def test_rows_that_come_and_go_without_a_recompilation():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    compiled(kjt({"a": [[1, 2], [3]]})).values().sum().backward()
    with no_recompilation():
        bags.table("a").erase([1])
        bags.load_state_dict(bags.state_dict())
        compiled(kjt({"a": [[5, 6], [7]]})).values().sum().backward()
    assert bags.table("a").keys().tolist() == [2, 3, 5, 6, 7]


@pytest.mark.filterwarnings("ignore::shoal.errors.ModeWarning")
def test_the_operators_pass_torchs_own_checks():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 3)])
    sequences = shoal.EmbeddingCollection([shoal.Table("a", 4, pooling="none"), shoal.Table("b", 3, pooling="none")])
    batch = random_kjt(["a", "b"])
    token = torch.zeros(1)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    common = (bags.name, token, ["a", "b"], batch.values(), batch.offsets())
    for training in (True, False):
        arguments = (*common, None, 7, training, False, torch.float32)
        torch.library.opcheck(torch.ops.shoal.lookup.default, arguments, test_utils=tests)
        counts = batch.length_per_key()
        size = 4 * counts[0] + 3 * counts[1]
        arguments = (sequences.name, *common[1:], counts, size, training, False, torch.float32)
        torch.library.opcheck(torch.ops.shoal.lookup_each.default, arguments, test_utils=tests)


# ---- graphs and their tables


CONFIG = {"name": "item", "embedding_dim": 4, "num_embeddings": 10, "feature_names": ["a", "b"]}
CONFIG |= {"pooling": SimpleNamespace(value="SUM")}
TWO = {"a": [[1, 2], [3], []], "b": [[], [5, 5], [1]]}


def pooling(**settings):
    return shoal.EmbeddingBagCollection([shoal.Table("item", 4, features=["a", "b"])], **settings)


def sequences(**settings):
    return shoal.EmbeddingCollection([shoal.Table("item", 4, features=["a", "b"], pooling="none")], **settings)


def compiled_loss(collection):
    out = torch.compile(collection, backend="aot_eager", fullgraph=True)(kjt(TWO))
    return (out.values() if isinstance(out, shoal.KeyedTensor) else out["a"].values()).sum()


@pytest.mark.parametrize("make", [pooling, sequences])
def test_a_compiled_graph_keeps_its_tables_alive(make, calls):
    collection = make(name="compiled")
    group = weakref.ref(group_of(collection))
    loss = compiled_loss(collection)
    del collection
    torch.compiler.reset()  # compiled code keeps its module
    gc.collect()
    with pytest.raises(ConfigError, match="name must be free"):
        make(name="compiled")
    counts = counted(calls, loss.backward)
    assert counts["update"] == 1
    del loss
    gc.collect()
    assert group() is None
    make(name="compiled")


@pytest.mark.parametrize("make", [pooling, sequences])
def test_a_compiled_graph_keeps_tables_alive_that_are_in_a_cycle(make, calls):
    collection = make(name="cycle")
    collection.me = [collection]
    loss = compiled_loss(collection)
    del collection
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(ConfigError, match="name must be free"):
        make(name="cycle")
    once = make is pooling  # sequences are compiled with buffers that a backward uses up
    assert counted(calls, functools.partial(loss.backward, retain_graph=once))["update"] == 1
    if once:
        with pytest.raises(BackwardError, match="Run the forward again"):
            loss.backward()
    del loss
    gc.collect()
    make(name="cycle")


def test_a_compiled_graph_that_is_dropped_lets_its_tables_go():
    collection = pooling(name="dropped")
    loss = compiled_loss(collection)
    del collection
    torch.compiler.reset()
    gc.collect()
    del loss
    gc.collect()
    pooling(name="dropped")


def test_a_stale_compiled_graph_trains_no_other_tables():
    first = pooling(name="stale")
    loss = compiled_loss(first)
    first.load_state_dict(first.state_dict())  # its forwards are void
    del first
    torch.compiler.reset()
    gc.collect()
    second = pooling(name="stale")
    second(kjt(TWO))
    before = second.table("item").lookup([1, 2, 3])
    with pytest.raises(BackwardError, match="Run the forward again"):
        loss.backward()
    assert torch.equal(second.table("item").lookup([1, 2, 3]), before)


# ---- warnings


def test_births_without_gradients_are_warned_of():
    collection = pooling()
    compiled = torch.compile(collection, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        with pytest.warns(ModeWarning, match=r"bags.eval\(\)") as told:
            compiled(kjt(TWO))
        compiled(kjt({"a": [[7]], "b": [[8]]}))
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_scaler_that_the_tables_do_not_know_is_warned_of():
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(compiled_loss(pooling()))
    with pytest.warns(OptimizerWarning, match="GradScaler"):
        loss.backward()


def test_an_optimizer_that_was_not_named_is_warned_of():
    collection = shoal.EmbeddingBagCollection([SimpleNamespace(**CONFIG)])
    with pytest.warns(OptimizerWarning, match="no optimizer was named"):
        compiled_loss(collection)
