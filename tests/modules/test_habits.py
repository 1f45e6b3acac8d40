"""What training loops written for other libraries do, and must not do silently wrong here."""

import copy
import gc
import threading
import warnings

import pytest
import torch
from support.batches import kjt, train_step
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import BackwardError, ConfigError, InputError, ModeWarning, NotFoundError, OptimizerWarning

BATCH = {"a": [[1, 2], [3], []], "b": [[], [5, 5], [1]]}


def bags(**settings):
    return shoal.EmbeddingBagCollection([shoal.Table("item", 4, features=["a", "b"])], **settings)


def sequences(**settings):
    return shoal.EmbeddingCollection([shoal.Table("item", 4, features=["a", "b"], pooling="none")], **settings)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = torch.nn.ModuleDict({"pooled": bags(), "each": sequences_named("other")})
        self.dense = torch.nn.Linear(4, 1)


def sequences_named(name):
    return shoal.EmbeddingCollection([shoal.Table(name, 4, features=["a", "b"], pooling="none")])


@pytest.mark.parametrize("make", [bags, sequences])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_births_without_gradients_in_train_mode_are_warned_of_once(make, mode):
    collection = make()
    with mode():
        with pytest.warns(ModeWarning, match=r"eval\(\)") as told:
            collection(kjt(BATCH))
        collection(kjt({"a": [[7]], "b": [[8]]}))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert len(collection.table("item")) == 6


def test_known_keys_eval_and_training_are_not_warned_of():
    collection = bags()
    train_step(collection, kjt(BATCH))
    with torch.no_grad():
        collection(kjt(BATCH))
        collection.eval()
        collection(kjt({"a": [[70]], "b": [[80]]}))


def test_rows_that_other_calls_made_are_no_births():
    collection = bags()
    train_step(collection, kjt(BATCH))
    state = collection.state_dict()
    with torch.no_grad():
        collection(kjt(BATCH))
        collection.table("item").assign([100, 101], torch.zeros(2, 4))
        collection(kjt(BATCH))
        collection.load_state_dict(state)
        collection(kjt(BATCH))
        collection.table("item").erase([1, 2, 3])
        with pytest.warns(ModeWarning, match="bags.eval"):
            collection(kjt({"a": [[200]], "b": [[]]}))


@pytest.mark.threads
def test_rows_that_another_thread_trains_are_no_births():
    collection, done = bags(), threading.Event()
    train_step(collection, kjt(BATCH))

    def train():
        for step in range(200):
            train_step(collection, kjt({"a": [[1000 + step]], "b": [[]]}))
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    with torch.no_grad():
        while not done.is_set():
            collection(kjt(BATCH))
    thread.join()


def test_a_filter_silences_the_warning():
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ModeWarning)
        bags()(kjt(BATCH))


def test_activation_checkpointing_is_not_warned_of():
    collection = bags()
    hook = torch.ones(1, requires_grad=True)
    out = checkpoint(lambda _: collection(kjt(BATCH)).values(), hook, use_reentrant=True)
    out.sum().backward()
    assert len(collection.table("item")) == 4


def fine_tune(collection, dense, steps, batch=BATCH):
    adam = torch.optim.SGD(dense.parameters(), 0.1)
    for _ in range(steps):
        out = collection(kjt(batch))
        out = out.values() if isinstance(out, shoal.KeyedTensor) else torch.cat([one.values() for one in out.values()])
        dense(out[:, :4]).sum().backward()
        adam.step()


@pytest.mark.parametrize("make", [bags, sequences])
def test_fine_tuning_in_eval_is_warned_of_once(make):
    collection, dense = make().eval(), torch.nn.Linear(4, 1)
    with pytest.warns(ModeWarning, match=r"bags.train\(\)") as told:
        fine_tune(collection, dense, 10)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_evaluations_without_no_grad_are_not_fine_tuning():
    collection, dense = bags(), torch.nn.Linear(4, 1)
    other, frozen = torch.nn.Linear(1, 1), shoal.EmbeddingBagCollection([shoal.Table("item", 4, optimizer=None)])
    read = shoal.EmbeddingBagCollection([shoal.Table("item", 4, features=[shoal.Feature("a", mode="read")])])
    fine_tune(frozen.eval(), dense, 5, {"item": [[1]]})
    fine_tune(read.eval(), dense, 5, {"a": [[1]]})
    for _ in range(5):
        collection.eval()
        collection(kjt(BATCH))
        fine_tune(collection.train(), dense, 3)
    adam = torch.optim.SGD(other.parameters(), 0.1)  # another model is trained after each evaluation
    for _ in range(5):
        collection.eval()(kjt(BATCH))
        collection(kjt(BATCH))
        for _ in range(2):
            other(torch.ones(1, 1)).sum().backward()
            adam.step()


def test_frozen_rows_under_no_grad_are_not_warned_of():
    collection, dense = bags(), torch.nn.Linear(4, 1)
    adam = torch.optim.SGD(dense.parameters(), 0.1)
    for step in range(6):
        with torch.no_grad():
            out = collection.eval()(kjt(BATCH)) if step % 2 else collection.lookup(kjt(BATCH))
        dense(out.values()[:, :4]).sum().backward()
        adam.step()


def test_a_compiled_step_of_an_optimizer_is_not_in_the_way():
    collection, dense = bags().eval(), torch.nn.Linear(4, 1)
    collection(kjt(BATCH))
    adam = torch.optim.SGD(dense.parameters(), 0.1)
    dense(torch.ones(1, 4)).sum().backward()
    torch.compile(adam.step, backend="eager")()


@pytest.mark.parametrize("make", [bags, sequences])
def test_a_scaler_that_the_tables_do_not_know_is_warned_of_before_rows_change(make):
    collection, scaler = make(), torch.amp.GradScaler("cpu")
    collection(kjt(BATCH))
    before = collection.state_dict()

    def backward(scaler):
        out = collection(kjt(BATCH))
        out = out.values() if make is bags else torch.cat([one.values() for one in out.values()])
        scaler.scale(out.sum()).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", OptimizerWarning)
        with pytest.raises(OptimizerWarning, match=r"65536, .*bags.scaler = scaler"):
            backward(scaler)
    after = collection.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items() if not name.endswith("score"))
    backward(scaler)  # only once
    other = make()
    other.scaler = scaler
    collection = other
    backward(scaler)


def test_a_scaler_of_another_loss_is_not_warned_of():
    collection, scaler, other = bags(), torch.amp.GradScaler("cpu"), torch.nn.Linear(1, 1)
    for _ in range(100):
        scaler.scale(other(torch.ones(1, 1)).sum()).backward()
        out = collection(kjt(BATCH)).values()
        (out.sum() + out.square().mean()).backward()


def test_a_sum_of_scaled_losses_is_scaled():
    collection, scaler = bags(), torch.amp.GradScaler("cpu")
    out = collection(kjt(BATCH)).values()
    with pytest.warns(OptimizerWarning, match="GradScaler"):
        (scaler.scale(out.sum()) + scaler.scale(out.mean())).backward()


@pytest.mark.parametrize(
    "scaled",
    [
        lambda scaler, out: scaler.scale(out.sum()) / 4,
        lambda scaler, out: -scaler.scale(-out.sum()),
        lambda scaler, out: torch.stack([scaler.scale(out.sum()), scaler.scale(out.mean())]).mean(),
        lambda scaler, out: scaler.scale(out.sum()).squeeze(),
        lambda scaler, out: scaler.scale(out.mean().reshape(1, 1)).view(1)[0],
        lambda scaler, out: scaler.scale((out - 1.01).square().mean()),  # 1e-4
    ],
)
def test_what_is_done_to_a_scaled_loss_does_not_hide_it(scaled):
    collection, scaler = bags(), torch.amp.GradScaler("cpu")
    out = collection(kjt(BATCH)).values() + 1
    with pytest.warns(OptimizerWarning, match="GradScaler"):
        scaled(scaler, out).backward()


def test_a_scaled_loss_is_seen_through_reentrant_checkpointing():
    collection, scaler = bags(), torch.amp.GradScaler("cpu")
    hook = torch.ones(1, requires_grad=True)
    out = checkpoint(lambda _: collection(kjt(BATCH)).values() + 1, hook, use_reentrant=True)
    with pytest.warns(OptimizerWarning, match="GradScaler"):
        scaler.scale(out.sum()).backward()


def test_a_product_that_is_small_beside_the_scale_is_no_scaled_loss():
    collection, scaler = bags(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    out = collection(kjt(BATCH)).values()
    (0.5 * out.square().mean()).backward()


def test_a_scale_of_one_is_not_warned_of():
    collection, scaler = bags(), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(collection(kjt(BATCH)).values().sum()).backward()


def test_a_scaler_that_scales_nothing_is_not_warned_of():
    scalers = [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")]
    collection = bags()
    scalers[0].scale(collection(kjt(BATCH)).values().sum()).backward()
    train_step(collection, kjt(BATCH))
    with pytest.warns(OptimizerWarning, match="GradScaler"):  # made early, in use late
        scalers[1].scale(collection(kjt(BATCH)).values().sum()).backward()


def test_scalers_are_looked_for_only_when_there_may_be_new_ones(monkeypatch):
    looked = []
    found = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: looked.append(len(of)) or found(*of))
    collection = bags()
    for _ in range(5):
        train_step(collection, kjt(BATCH))
    assert len(looked) <= 1
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(5):
        train_step(collection, kjt(BATCH))
    assert scaler is not None
    assert len(looked) <= 2


@pytest.mark.parametrize("make", [bags, sequences])
def test_a_lookup_is_that_of_eval_in_any_mode(make):
    collection = make()
    train_step(collection, kjt(BATCH)) if make is bags else None
    batch = kjt({"a": [[1, 9], [3], []], "b": [[], [5, 5], [10]]})
    before = collection.state_dict()
    got = collection.lookup(batch)
    assert collection.training
    assert all(torch.equal(value, before[name]) for name, value in collection.state_dict().items())
    wanted = collection.eval()(batch)
    if make is bags:
        assert not got.values().requires_grad
        assert torch.equal(got.values(), wanted.values())
    else:
        assert all(torch.equal(got[name].values(), wanted[name].values()) for name in wanted)


@pytest.mark.threads
def test_lookups_of_other_threads_while_one_trains_see_whole_steps():
    collection = shoal.EmbeddingBagCollection(
        [shoal.Table("item", 4, features=["a"], optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())]
    )
    batch = kjt({"a": [[key] for key in range(50)]})
    collection(batch)
    done = threading.Event()
    seen = []

    def serve():
        while not done.is_set():
            seen.append(collection.lookup(batch).values())

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        collection(batch).values().sum().backward()
    done.set()
    for thread in threads:
        thread.join()
    assert all(bool((values == values[0, 0]).all()) for values in seen)
    assert len(collection.table("item")) == 50


@pytest.mark.parametrize("make", [bags, sequences])
def test_features_that_no_table_has_are_ignored(make):
    one, other = make(), make()
    wide = {"x": [[9], [9, 9], []], "a": BATCH["a"], "y": [[], [8], [8]], "b": BATCH["b"]}
    for _ in range(3):
        outs = [collection(kjt(batch)) for collection, batch in ((one, BATCH), (other, wide))]
        parts = [list(out.to_dict().values()) if make is bags else [v.values() for v in out.values()] for out in outs]
        assert all(torch.equal(*pair) for pair in zip(*parts, strict=True))
        for part in parts:
            sum((tensor**2).sum() for tensor in part).backward()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_of_ignored_features_may_be_anything(bad):
    collection = bags()
    batch = shoal.KeyedJaggedTensor(
        ["x", "a", "b"], torch.tensor([9, 1, 2]), torch.tensor([bad, 1.0, 1.0]), lengths=torch.tensor([1, 1, 1])
    )
    collection(batch).values().sum().backward()
    assert collection.table("item").keys().tolist() == [1, 2]
    assert collection.table("item").stats().step == 1


def test_weights_of_float64_are_finite_as_float32():
    collection = bags()
    weights = torch.tensor([1.0, 1e39, 1.0], dtype=torch.float64)
    batch = shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    with pytest.raises(InputError, match="got inf for value 1"):
        collection(batch)
    assert len(collection.table("item")) == 0


def test_weights_of_ignored_features_get_no_gradient():
    batch = kjt({"x": [[9, 9]], "a": [[1, 2]], "b": [[3]]}, weights=0.5)
    weights = batch.weights().clone().requires_grad_()
    batch = shoal.KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=batch.lengths())
    bags()(batch).values().sum().backward()
    assert weights.grad[:2].tolist() == [0.0, 0.0]
    assert bool((weights.grad[2:] != 0).all())


@pytest.mark.parametrize("make", [bags, sequences])
def test_strict_features_refuses_what_no_table_has(make):
    collection = make(strict_features=True)
    with pytest.raises(NotFoundError, match="no table has the feature 'x'"):
        collection(kjt({"x": [[9]], "a": [[1]], "b": [[2]]}))
    assert len(collection.table("item")) == 0
    collection(kjt({"a": [[1]], "b": [[2]]}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    collection = bags()
    weights = torch.tensor([1.0, bad, 1.0])
    batch = shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    with pytest.raises(InputError, match=r"must be finite; got .* for value 1 of the batch"):
        collection(batch)
    assert len(collection.table("item")) == 0


def test_finite_weights_whose_sum_is_not_are_taken():
    weights = torch.full((3,), 3e38)
    batch = shoal.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    bags()(batch)


def test_another_param_group_is_refused():
    optimizer = bags().optimizer
    with pytest.raises(ConfigError, match="no other param group"):
        copy.deepcopy(optimizer).add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="no other param group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.param_groups) == 1
    assert len(copy.deepcopy(optimizer).param_groups) == 1


@pytest.mark.parametrize("make", [bags, sequences])
def test_a_graph_keeps_its_tables_alive(make):
    collection = make()
    table = collection.table("item")
    out = collection(kjt(BATCH))
    out = out.values() if make is bags else torch.cat([part.values() for part in out.values()])
    before = table.lookup([1])
    del collection, table
    gc.collect()
    out.sum().backward()
    assert before.shape == (1, 4)


def test_a_graph_updates_its_own_tables_where_the_name_is_taken_anew():
    def looked_up():
        return bags(name="habits")(kjt(BATCH)).values()

    out = looked_up()
    gc.collect()
    with pytest.raises(ConfigError, match="name must be free"):  # its graph is alive
        bags(name="habits")
    out.sum().backward()
    del out
    bags(name="habits")


@pytest.mark.parametrize("make", [bags, sequences])
def test_a_loss_that_had_its_backward_does_not_keep_the_tables(make):
    collection = make(name="cell")
    out = collection(kjt(BATCH))
    loss = (out.values() if make is bags else torch.cat([one.values() for one in out.values()])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardError, match="one backward for each forward"):
        loss.backward()
    del collection, out
    make(name="cell")


def test_a_name_is_free_again_once_only_a_cycle_holds_it():
    first = bags(name="cycle")
    first.me = [first]
    gc.disable()
    try:
        del first
        bags(name="cycle")
    finally:
        gc.enable()


def test_a_name_that_is_taken_says_what_to_do():
    first = bags(name="taken")
    with pytest.raises(ConfigError, match="delete it"):
        bags(name="taken")
    assert len(first.table("item")) == 0


def test_collections_inside_a_model_are_saved_loaded_committed_and_recovered(tmp_path):
    model = Model()
    train_step(model.sparse["pooled"], kjt(BATCH))
    shoal.save(tmp_path / "saved", model)
    other = Model()
    shoal.load(tmp_path / "saved", other)
    assert torch.equal(other.sparse["pooled"].table("item").keys(), model.sparse["pooled"].table("item").keys())
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(model)
    third = Model()
    shoal.recover(tmp_path / "log", torch.nn.Sequential(third))
    wanted = model.sparse["pooled"].state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in third.sparse["pooled"].state_dict().items())


def test_prefetch_finds_the_collections_of_a_model():
    model = Model()
    batches = [kjt(BATCH) for _ in range(3)]
    assert [batch is given for batch, given in zip(shoal.prefetch(batches, model), batches, strict=True)] == [True] * 3


def test_a_model_without_collections_is_refused(tmp_path):
    with pytest.raises(InputError, match="Linear without any"):
        shoal.save(tmp_path / "saved", torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="wanted an EmbeddingBagCollection"):
        shoal.prefetch([], torch.nn.Linear(1, 1))


def test_prefetch_says_what_it_got_and_not_what_that_holds():
    model = Model()
    pooled = model.sparse["pooled"]
    table = next(iter(pooled.tables().values()))
    others = (None, "x", [], [model, 3], torch.nn.Sequential(torch.nn.Linear(1, 1)), model.parameters(), Model)
    got = ("NoneType.", "str.", "list without any.", "int.", "Sequential without any.", "generator.", "type.")
    one = "TableHandle, one table: give"
    for given, what in zip((*others, table, [pooled, table]), (*got, one, one), strict=True):
        with pytest.raises(ConfigError, match=rf"holds some; got {what}"):
            shoal.prefetch([], given)


@pytest.mark.parametrize("make", [bags, sequences])
def test_configs_count_the_rows_so_far(make):
    collection = make()
    (config,) = collection.embedding_bag_configs() if make is bags else collection.embedding_configs()
    assert config == collection._configs[0]
    assert config.num_embeddings == 0
    train_step(collection, kjt(BATCH))
    assert config.num_embeddings == len(collection.table("item")) == 4
    again = copy.deepcopy(config)
    assert again == config
    assert not hasattr(again, "num_embeddings")
    assert not hasattr(shoal.Table("item", 4), "num_embeddings")
    name = collection.name
    del collection  # a config does not keep the tables alive
    make(name=name)
    assert config.num_embeddings == 0
