"""A collection with its tables in several groups is, bit for bit, the one with all of them in one."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from support.batches import assert_same_rows, kjt, random_kjt, train_step
from support.inside import group_of, groups_of
from support.tiered import assert_equal_outputs, outputs, skewed_kjt

import shoal
from shoal.errors import BackwardError, CapacityError, ConfigError, InputError, NonFiniteError, NotFoundError
from shoal.modules import groups
from shoal.table import Update

FEATURES = ["x", "y", "z"]
# Which tables are in a group together.
SPLITS = [[[0, 1], [2]], [[2, 0], [1]], [[1], [0, 2]], [[0], [1], [2]], [[2], [0], [1]]]
KINDS = {"bags": shoal.EmbeddingBagCollection, "sequences": shoal.EmbeddingCollection}

pytestmark = pytest.mark.filterwarnings("ignore::shoal.errors.ModeWarning")


def tables(which, tiers=None, **settings):
    """Three tables of three layouts; y feeds two of them, and x one that only reads it."""
    pooling = "none" if which == "sequences" else "mean"
    return [
        shoal.Table("a", 4, features=["x", "y"], pooling=pooling, tiers=tiers, **settings),
        shoal.Table(
            "b", 3, features=["z"], pooling="none" if pooling == "none" else "sum", optimizer=shoal.Adam(lr=0.1),
            tiers=tiers,
        ),
        shoal.Table(
            "c", 6, features=["y", shoal.Feature("x", mode="read")], pooling=pooling, dtype="float16",
            optimizer=shoal.Adagrad(lr=0.1), tiers=tiers,
        ),
    ]  # fmt: skip


@pytest.fixture
def split(monkeypatch):
    """Have collections that are made from here on put their tables into these groups; None is one for all."""

    def split(numbers):
        monkeypatch.setattr(
            groups, "groups_of", lambda configs: [list(range(len(configs)))] if numbers is None else numbers
        )

    return split


@pytest.fixture
def pair(split):
    """The same collection with one group and with several."""

    def pair(which, numbers, *, tiers=(None, None), name=None, **settings):
        made = []
        for at, (some, own) in enumerate(zip((None, numbers), tiers, strict=True)):
            split(some)
            made.append(KINDS[which](tables(which, own, **settings), seed=3, name=name and f"{name}{at}"))
        split(None)
        assert [len(groups_of(one)) for one in made] == [1, len(numbers)]
        return made

    return pair


def step(modules, batch, seed=0):
    """One training step of each; their outputs are the same."""
    outs = [module(batch) for module in modules]
    assert_equal_outputs(outs)
    grads = [torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)) for one in outputs(outs[0])]
    for out in outs:
        torch.autograd.backward(outputs(out), [grad.clone() for grad in grads])


@pytest.mark.parametrize("numbers", SPLITS)
@pytest.mark.parametrize("which", KINDS)
def test_training_and_evaluation_are_the_same(which, numbers, pair):
    modules = pair(which, numbers)
    for at in range(6):
        step(modules, random_kjt(FEATURES, seed=at), at)
        assert_equal_outputs([module.lookup(random_kjt(FEATURES, keys=40, seed=at + 100)) for module in modules])
    with torch.no_grad():  # which bears rows and counts them as used
        assert_equal_outputs([module(random_kjt(FEATURES, keys=60, seed=7)) for module in modules])
    for module in modules:
        module(random_kjt(FEATURES, seed=8))  # a forward that nothing follows: its rows were used all the same
    assert_same_rows(*modules)
    one, several = (module.stats() for module in modules)
    assert list(one) == list(several)
    assert {name: (each.rows, each.step, each.counters) for name, each in one.items()} == {
        name: (each.rows, each.step, each.counters) for name, each in several.items()
    }


@pytest.mark.parametrize("numbers", SPLITS)
def test_weights_have_the_same_gradients(numbers, pair):
    modules, grads = pair("bags", numbers), []
    batch = random_kjt(FEATURES, weighted=True)
    for module in modules:
        weights = batch.weights().clone().requires_grad_()
        own = shoal.KeyedJaggedTensor(FEATURES, batch.values(), weights, lengths=batch.lengths())
        train_step(module, own)
        train_step(module.eval(), own)  # which has a backward too, for the weights
        grads.append(weights.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0
    assert_same_rows(*modules)


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_programs_are_the_same_and_know_the_collection_by_its_name(which, pair):
    torch.compiler.reset()
    modules = pair(which, SPLITS[1])

    def loss(module, batch):
        return sum((one**2).sum() for one in outputs(module(batch)))

    for module in modules:
        compiled = torch.compile(lambda batch, module=module: loss(module, batch), backend="aot_eager")
        for at in range(2):
            compiled(random_kjt(FEATURES, seed=at)).backward()
    assert_same_rows(*modules)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["memory", "ssd"])
@pytest.mark.parametrize("which", KINDS)
def test_prefetch_with_rows_below_memory_is_the_same(which, kind, pair, tmp_path):
    def below(folder):
        lowest = shoal.Ssd(tmp_path / folder, "16MiB") if kind == "ssd" else shoal.storage.MemoryStorage
        return [shoal.Dram("24KiB"), lowest]

    modules = pair(which, SPLITS[0], tiers=(below("one"), below("several")))
    generator = torch.Generator().manual_seed(5)
    batches = [skewed_kjt(FEATURES, generator) for _ in range(12)]
    loops = [shoal.prefetch(list(batches), module, depth=2) for module in modules]
    for at, (batch, _) in enumerate(zip(*loops, strict=True)):
        step(modules, batch, at)
    assert_same_rows(*modules)
    assert all(each.tiers[0].demotions for name, each in modules[1].stats().items() if name != "b")


@pytest.mark.parametrize("numbers", SPLITS[-2:])
def test_saves_are_the_same_and_load_into_either(numbers, pair, tmp_path):
    modules = pair("bags", numbers)
    others = pair("bags", numbers)
    for at in range(3):
        step(modules, random_kjt(FEATURES, seed=at), at)
    for at, module in enumerate(modules):
        shoal.save(tmp_path / f"{at}", module, step=1)
        with shoal.ChangeLog(tmp_path / f"log{at}") as log:
            log.commit(module)
            train_step(module, random_kjt(FEATURES, seed=9))
            log.commit(module)
    saved = copy.deepcopy(modules[0].state_dict())
    shoal.recover(tmp_path / "log0", others[1])
    shoal.recover(tmp_path / "log1", others[0])
    assert_same_rows(*others)
    assert_same_rows(others[0], modules[0])
    shoal.load(tmp_path / "0", others[1])
    shoal.load(tmp_path / "1", others[0])
    assert_same_rows(*others)
    others[1].load_state_dict(saved)
    assert_same_rows(others[1], modules[1])
    step([modules[0], others[1]], random_kjt(FEATURES, seed=10))


def test_copies_handles_settings_and_devices_walk_all_groups(pair, split):
    modules = pair("bags", SPLITS[1])
    step(modules, random_kjt(FEATURES))
    split(SPLITS[1])
    again = copy.deepcopy(modules[1])
    assert len(groups_of(again)) == 2
    assert_same_rows(again, modules[0])
    for module in (*modules, again):
        for group in module.optimizer.param_groups:
            group["lr"] = 0.5
        module.check()
        module.table("c").assign([7], torch.ones(1, 6))
        module.table("a").erase([1, 2])
        assert [handle.name for handle in module.tables().values()] == ["a", "b", "c"]
    step([*modules, again], random_kjt(FEATURES, seed=1))
    assert_same_rows(*modules)
    assert_same_rows(again, modules[0])
    meta = shoal.EmbeddingBagCollection(tables("bags"), seed=3, device="meta")
    assert meta.device.type == "meta"
    meta.to_empty(device="cpu")
    assert len(groups_of(meta)) == 2
    train_step(meta, random_kjt(FEATURES))


def test_an_update_keeps_to_the_rows_of_its_forward(pair):
    modules = pair("bags", SPLITS[0])
    batches = [random_kjt(FEATURES, seed=at) for at in range(4)]
    for module in modules:
        outs = [module(batch).values() for batch in batches]
        for at, out in reversed(list(enumerate(outs))):
            module.table("a").erase([at])
            out.backward(torch.full_like(out, float(at + 1)))
        with pytest.raises(BackwardError, match="applied already"):
            outs[0].backward(torch.ones_like(outs[0]))
    assert_same_rows(*modules)


# ---- gradients that are not finite


@pytest.mark.parametrize("numbers", SPLITS)
@pytest.mark.parametrize(("column", "table", "feature"), [(0, "a", "x"), (4, "a", "y"), (8, "b", "z"), (12, "c", "y")])
def test_one_group_with_infinity_stops_all(column, table, feature, numbers, pair):
    modules, texts = pair("bags", numbers, name="it"), []
    batch = kjt({"x": [[1], [2]], "y": [[3], [4]], "z": [[5], [6]]})
    step(modules, batch)
    before = copy.deepcopy(modules[0])
    grad = torch.ones(2, 23)
    grad[1, column] = float("inf")
    for module in modules:
        out = module(batch).values()
        with pytest.raises(NonFiniteError, match=f"reached '{table}' through '{feature}'") as caught:
            out.backward(grad)
        texts.append(str(caught.value).replace(module.name, ""))
        out.backward(torch.ones_like(out))  # and may be run again with others
        del out
    assert texts[0] == texts[1]
    assert_same_rows(*modules)
    assert before.table("a").stats().step == 1
    assert modules[1].table("a").stats().step == 2


@pytest.mark.parametrize("numbers", SPLITS)
def test_one_table_that_skips_skips_for_all_groups(numbers, pair):
    modules = pair("bags", numbers, optimizer=shoal.SGD(clip=shoal.Clip(nonfinite="skip")))
    batch = kjt({"x": [[1], [2]], "y": [[3], [4]], "z": [[5], [6]]})
    step(modules, batch)
    weights = [module.table("c").lookup([3, 4]) for module in modules]
    for module, before in zip(modules, weights, strict=True):
        out = module(batch).values()
        grad = torch.ones_like(out)
        grad[0, 0] = float("nan")  # of table a
        out.backward(grad)
        assert torch.equal(module.table("c").lookup([3, 4]), before)
        assert {each.counters["skipped_backwards"] for each in module.stats().values()} == {1}
    assert_same_rows(*modules)


@pytest.mark.parametrize("numbers", SPLITS)
def test_a_scaled_loss_that_overflows_in_one_group_leaves_all_as_they_were(numbers, pair):
    modules = pair("bags", numbers)
    batch = kjt({"x": [[1], [2]], "y": [[3], [4]], "z": [[5], [6]]})
    scales = []
    for module in modules:
        module.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for value in (1.0, float("inf"), 3.0):
            out = module(batch).values()
            factor = torch.ones(23)
            factor[8] = value  # of table b
            scaler.scale((out * factor).sum()).backward()
            scaler.step(module.optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**10
    assert_same_rows(*modules)


# ---- what fails on the way


def test_a_lookup_that_fails_in_one_group_leaves_no_births_and_no_uses_in_the_others(split):
    split([[0], [1]])
    made = [shoal.Table("a", 4), shoal.Table("b", 64, tiers=[shoal.Dram("2MiB")])]
    module = shoal.EmbeddingBagCollection(made)
    train_step(module, kjt({"a": [[1, 2]], "b": [[1]]}))
    train_step(module, kjt({"a": [[2]], "b": [[1]]}))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for keep in (True, False):
        with torch.set_grad_enabled(keep), pytest.raises(CapacityError, match="'b'"):
            module(kjt({"a": [[1, 2, 3, 4]], "b": [list(range(50_000))]}))
        after = module.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert module.table("a").scores([1, 2]).tolist() == [0.0, 1.0]
    train_step(module, kjt({"a": [[1, 9]], "b": [[1]]}))
    assert module.table("a").keys().tolist() == [1, 2, 9]


def test_a_batch_without_a_groups_feature_changes_nothing_in_the_others(split):
    split([[0], [1]])
    module = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 4)])
    with pytest.raises(NotFoundError, match="'b'"):
        module(kjt({"a": [[1]]}))
    assert module.table("a").stats().counters["lookups"] == 0


def test_a_backward_that_fails_in_one_group_says_so_and_can_be_run_again(pair, monkeypatch):
    modules = pair("bags", [[0, 1], [2]])
    batch = random_kjt(FEATURES)
    outs = [module(batch).values() for module in modules]
    outs[0].backward(torch.ones_like(outs[0]))
    with monkeypatch.context() as patched:

        def fail(*_):
            raise OSError("gone")

        patched.setattr(groups_of(modules[1])[1], "update", fail)
        with pytest.raises(OSError, match="gone") as caught:
            outs[1].backward(torch.ones_like(outs[1]))
    assert "came to 'a', 'b', and not to 'c'" in caught.value.__notes__[0]
    outs[1].backward(torch.ones_like(outs[1]))
    assert_same_rows(*modules)


def test_gradients_of_other_shapes_are_refused(pair):
    module = pair("bags", SPLITS[0])[1]
    batch = random_kjt(FEATURES)
    out = module(batch)
    lease = torch.tensor([next(iter(group_of(module)._leases._live))])
    change = Update(lease, batch.values(), batch.offsets(), None, [torch.ones(4, 5)], False)
    with pytest.raises(InputError, match="shapes"):
        group_of(module).update(change)
    out.values().sum().backward()


# ---- how long they live


def test_leases_end_in_every_group_as_soon_as_the_graph_is_dropped(pair):
    module = pair("bags", SPLITS[-1])[1]
    out = module(kjt({"x": [[1]], "y": [[2]], "z": [[3]]})).values()
    train_step(module, kjt({"x": [[4]], "y": [[5]], "z": [[6]]}))
    module.table("a").erase([1])
    assert module.table("b").scores([3]).tolist() == [0.0]
    assert [member.newest_lease is None for member in groups_of(module)] == [False] * 3
    del out
    # By the handle alone: the collection is not asked.
    assert all(member._leases.has_ended for member in groups_of(module))
    assert module.table("b").scores([3, 6]).tolist() == [0.0, 0.0]
    assert all(member.newest_lease is None for member in groups_of(module) if member.reading_all())


def test_the_name_is_taken_while_a_handle_lives_and_free_afterwards(split):
    split([[0], [1]])
    module = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 4)], name="taken")
    dead, handle = weakref.ref(group_of(module)), module.table("b")
    del module
    gc.collect()
    assert dead() is None
    assert len(handle) == 0
    with pytest.raises(ConfigError, match="'taken' already"):
        shoal.EmbeddingBagCollection([shoal.Table("a", 4)], name="taken")
    del handle
    split(None)
    shoal.EmbeddingBagCollection([shoal.Table("a", 4)], name="taken")


def test_a_graph_keeps_all_groups_of_a_collection_that_is_gone(pair):
    modules = pair("bags", SPLITS[1])
    handles = [list(module.tables().values()) for module in modules]
    outs = [module(random_kjt(FEATURES)).values() for module in modules]
    del modules
    gc.collect()
    for out in outs:
        out.backward(torch.ones_like(out))
    for one, other in zip(*handles, strict=True):
        assert torch.equal(one.lookup(one.keys()), other.lookup(other.keys()))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_group_may_have_its_tables_in_any_order(order, pair):
    modules = pair("bags", [list(order)[:2], list(order)[2:]])
    step(modules, random_kjt(FEATURES))
    assert_same_rows(*modules)
