"""What comes from TorchRec, as far as that can be tried without it; tests/from_torchrec has the rest."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.batches import kjt, train_step
from torch import nn

import shoal
from shoal.errors import ConfigError, OptimizerWarning, StateDictError, StateWarning, StorageError, WeightsWarning
from shoal.interop.torchrec import apply_optimizer_in_backward, load_optimizer_state, optimizer_of, table_of

BATCH = {"a": [[1, 2], [3]]}
RowWiseAdagrad = type("RowWiseAdagrad", (), {"__module__": "torchrec.optim.rowwise_adagrad"})


def config(name="t", **settings):
    """What a collection sees of a TorchRec config."""
    pooling = SimpleNamespace(value="SUM")
    return SimpleNamespace(
        **{
            "name": name,
            "embedding_dim": 4,
            "num_embeddings": 100,
            "feature_names": ["a"],
            "pooling": pooling,
            **settings,
        }
    )


def bags(*configs, **settings):
    return shoal.EmbeddingBagCollection(list(configs) or [config()], **settings)


# ---- per-sample weights


def plain_and_weighted(made, **settings):
    return made(kjt(BATCH)).values(), made(kjt(BATCH, weights=2.0, **settings)).values()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("call", ["forward", "lookup", "compiled"])
def test_weights_that_nobody_spoke_of_are_ignored_as_by_torchrec_and_warned_of_once(call):
    made = bags(optimizer=shoal.SGD(0.1))
    made(kjt(BATCH))
    look = {"forward": made, "lookup": made.lookup, "compiled": torch.compile(made, backend="eager")}[call]
    plain = look(kjt(BATCH)).values()
    with pytest.warns(WeightsWarning, match=r"is_weighted= was not given.*is_weighted=True to use them") as told:
        weighted = [look(kjt(BATCH, weights=2.0)).values() for _ in range(3)]
    assert len(told) == 1
    assert call == "compiled" or told[0].filename == __file__
    assert all(torch.equal(one, plain) for one in weighted)
    assert not made.is_weighted()


def test_weights_that_are_ignored_do_not_reach_the_update():
    one, other = bags(optimizer=shoal.SGD(0.1)), bags(optimizer=shoal.SGD(0.1))
    with pytest.warns(WeightsWarning):
        train_step(one, kjt(BATCH, weights=2.0))
    train_step(other, kjt(BATCH))
    assert torch.equal(one.table("t").lookup([1, 2, 3]), other.table("t").lookup([1, 2, 3]))


@pytest.mark.parametrize(("said", "factor"), [(True, 2.0), (False, 1.0)])
def test_weights_that_were_spoken_of_are_not_warned_of(said, factor):
    made = bags(optimizer=shoal.SGD(0.1), is_weighted=said)
    insists = [{"weights": 1.0}] if said else [{}]
    plain = made(kjt(BATCH, **insists[0])).values()
    assert torch.equal(made(kjt(BATCH, weights=2.0)).values(), factor * plain)
    assert made.is_weighted() == said


def test_weights_are_used_where_all_tables_are_our_own():
    plain, weighted = plain_and_weighted(shoal.EmbeddingBagCollection([shoal.Table("t", 4, features=["a"])]))
    assert torch.equal(weighted, 2 * plain)


def test_weights_are_ignored_where_one_table_is_a_config_and_in_what_is_made_of_the_collection():
    table = shoal.Table("own", 4, features=["a"])
    made = bags(config(), table, optimizer=shoal.SGD(0.1), device="meta").to_empty(device="cpu")
    for one in (made, copy.deepcopy(made)):
        with pytest.warns(WeightsWarning):
            plain, weighted = plain_and_weighted(one)
        assert torch.equal(weighted, plain)


# ---- optimizers


def test_a_collection_names_what_configs_cannot():
    tiers = [shoal.Dram("1MiB")]
    made = bags(config(), optimizer=shoal.Adam(0.1), tiers=tiers, init=shoal.Zeros())
    assert made._configs[0] == table_of(config(), optimizer=shoal.Adam(0.1), tiers=tiers, init=shoal.Zeros())
    train_step(made, kjt(BATCH))
    assert "exp_avg" in made.table("t").state([1])
    rows = shoal.EmbeddingCollection([config(pooling=None)], optimizer=None)
    assert rows._configs[0].optimizer is None


def test_tables_beside_configs_keep_their_own():
    table = shoal.Table("own", 4, features=["a"], optimizer=shoal.SGD(0.5))
    made = bags(config(), table, optimizer=shoal.Adam(0.1))
    assert [one.optimizer for one in made._configs] == [shoal.Adam(0.1), shoal.SGD(0.5)]


@pytest.mark.parametrize(
    "given", [{"optimizer": shoal.SGD(0.1)}, {"optimizer": None}, {"tiers": [shoal.Dram()]}, {"init": shoal.Zeros()}]
)
def test_tables_alone_name_their_own(given):
    (name,) = given
    for kind, pooling in ((shoal.EmbeddingBagCollection, "sum"), (shoal.EmbeddingCollection, "none")):
        with pytest.raises(ConfigError, match=f"{name}=: wanted only for tables that are TorchRec configs"):
            kind([shoal.Table("t", 4, pooling=pooling)], **given)


def test_training_without_a_named_optimizer_is_warned_of_once():
    made = bags()
    made.eval()(kjt(BATCH))  # nothing is trained yet
    with pytest.warns(OptimizerWarning, match=r"TorchRec configs 't'.*RowwiseAdagrad\(lr=0.01"):
        train_step(made.train(), kjt(BATCH))
    train_step(made, kjt(BATCH))


def test_the_optimizer_that_is_told_has_the_settings_of_now():
    made = bags()
    made.optimizer.param_groups[0]["lr"] = 0.1
    with pytest.warns(OptimizerWarning, match=r"RowwiseAdagrad\(lr=0.1\)"):
        train_step(made, kjt(BATCH))


@pytest.mark.parametrize(
    "make", [lambda: bags(optimizer=shoal.SGD(0.1)), lambda: bags(optimizer=None), lambda: bags(table_of(config()))]
)
def test_who_names_it_hears_nothing(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(make(), kjt(BATCH)) if make()._configs[0].optimizer else make()(kjt(BATCH))


def test_a_table_is_no_torchrec_config():
    table = shoal.Table("t", 4)
    assert table.embedding_dim == 4
    with pytest.raises(ConfigError, match=r"dataclasses\.replace"):
        table_of(table)


def test_overrides_win_and_unknown_ones_are_refused():
    odd = config(init_fn=nn.init.xavier_uniform_, data_type=SimpleNamespace(value="INT8"))
    table = table_of(odd, init=shoal.Zeros(), dtype="float16", pooling="mean", features=["x"], buckets=8)
    assert (table.dtype, table.pooling, table.feature_names, table.buckets) == ("float16", "mean", ("x",), 8)
    with pytest.raises(ConfigError, match="Did you mean 'optimizer'"):
        table_of(config(), optimiser=shoal.SGD(0.1))


def test_settings_are_the_classes_own():
    assert optimizer_of(RowWiseAdagrad) == shoal.RowwiseAdagrad(0.01, eps=1e-10)
    assert optimizer_of(
        RowWiseAdagrad, {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.2, "initial_accumulator_value": 0.3}
    ) == shoal.RowwiseAdagrad(0.1, eps=1e-4, weight_decay=0.2, initial=0.3)
    assert optimizer_of(torch.optim.Adam, {"fused": True}) == shoal.Adam(1e-3, bias_correction="global")
    assert optimizer_of(torch.optim.AdamW) == shoal.AdamW(1e-3, weight_decay=0.01, bias_correction="global")
    assert optimizer_of(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}) == shoal.SGD(
        0.5, momentum=0.9, nesterov=True
    )
    assert optimizer_of(torch.optim.Adagrad) == shoal.Adagrad(0.01, eps=1e-10)
    assert optimizer_of(shoal.SGD(0.1)) == shoal.SGD(0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (RowWiseAdagrad, {"lr_decay": 0.1}, "lr_decay only as 0; got lr_decay=0.1"),
        (RowWiseAdagrad, {"max_gradient": 1.0}, "got max_gradient=1.0"),
        (RowWiseAdagrad, {"lr": -1.0}, "lr"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad only as False"),
        (torch.optim.RMSprop, {}, "has no counterpart"),
        (shoal.SGD(0.1), {"lr": 0.2}, "wanted none with"),
    ],
)
def test_settings_without_a_counterpart_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        optimizer_of(kind, settings)


def test_an_optimizer_is_applied_before_the_first_row():
    made, other = bags(name="applied", seed=3), bags(optimizer=shoal.RowwiseAdagrad(0.1, eps=1e-10), seed=3)
    apply_optimizer_in_backward(RowWiseAdagrad, nn.Sequential(made), {"lr": 0.1})
    assert made.name == "applied"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(train_step(made, kjt(BATCH)), train_step(other, kjt(BATCH)))
    assert made.optimizer.param_groups[0]["lr"] == 0.1


def test_it_is_refused_behind_the_first_row_and_beside_a_scheduler():
    made = bags(optimizer=shoal.SGD(0.1))
    train_step(made, kjt(BATCH))
    with pytest.raises(ConfigError, match="wanted tables without rows"):
        apply_optimizer_in_backward(RowWiseAdagrad, made, {"lr": 0.1})
    made = bags(optimizer=shoal.SGD(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1)
    with pytest.raises(ConfigError, match="make schedulers after it"):
        apply_optimizer_in_backward(RowWiseAdagrad, made, {"lr": 0.1})
    assert scheduler.optimizer is made.optimizer


def test_parameters_are_not_taken_for_rows():
    made = bags()
    for params in (made.parameters(), [], nn.Sequential()):
        with pytest.raises(ConfigError, match=r"Give the collection in place of its parameters\(\)"):
            apply_optimizer_in_backward(RowWiseAdagrad, params, {"lr": 0.1})
    with pytest.raises(ConfigError, match="Give the collections alone"):
        apply_optimizer_in_backward(RowWiseAdagrad, nn.Sequential(made, nn.Linear(2, 2)), {"lr": 0.1})
    with pytest.raises(ConfigError, match="got Parameter"):
        apply_optimizer_in_backward(RowWiseAdagrad, nn.Linear(2, 2).parameters(), {"lr": 0.1})


def test_rows_stay_outside_of_parameters():
    made = bags(optimizer=shoal.SGD(0.1))
    assert list(made.parameters()) == []
    assert all(not isinstance(value, nn.Parameter) for value in made.state_dict().values())


# ---- state


def loaded(made, weight, prefix="", **settings):
    with pytest.warns(StateWarning, match="weights without keys for 't'") as heard:
        made.load_state_dict({f"{prefix}embedding_bags.t.weight": weight}, **settings)
    assert len(heard) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_weights_without_keys_are_rows_from_zero(strict):
    weight = torch.randn(5, 4)
    made = bags(optimizer=shoal.RowwiseAdagrad(0.1, initial=0.25))
    train_step(made, kjt({"a": [[77]]}))
    loaded(made, weight, strict=strict)
    assert made.table("t").keys().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(made.table("t").lookup(torch.arange(5)), weight)
    assert made.table("t").state([3])["sum"].tolist() == [[0.25]]
    model = nn.ModuleDict({"bags": bags(optimizer=shoal.SGD(0.1))})
    loaded(model, weight, "bags.", strict=strict)
    assert torch.equal(model["bags"].table("t").lookup(torch.arange(5)), weight)
    train_step(model["bags"], kjt(BATCH))


def test_sequences_load_them_too():
    rows = shoal.EmbeddingCollection([config(pooling=None)], optimizer=shoal.SGD(0.1))
    with pytest.warns(StateWarning):
        rows.load_state_dict({"embeddings.t.weight": torch.ones(3, 4)})
    assert len(rows.table("t")) == 3


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(5, 3), r"must have the shape \(5, 4\)"),
        (torch.zeros(5), "must be .n, dim."),
        (torch.zeros(5, 4, dtype=torch.float16), "must be torch.float32; got torch.float16"),
        (torch.full((5, 4), torch.nan), "must be finite"),
        ([[0.0] * 4], "must be a tensor"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weight, message):
    made = bags(optimizer=shoal.SGD(0.1))
    train_step(made, kjt(BATCH))
    with pytest.raises(StateDictError, match=message):
        made.load_state_dict({"embedding_bags.t.weight": weight}, strict=False)
    assert len(made.table("t")) == 3


def test_a_dict_of_ours_without_its_keys_is_still_incomplete():
    made = bags(optimizer=shoal.SGD(0.1))
    train_step(made, kjt(BATCH))
    state = made.state_dict()
    del state["embedding_bags.t.weight_id"]
    with pytest.raises(StateDictError, match="lacks"):
        made.load_state_dict(state)


STATES = {
    "rowwise": (shoal.RowwiseAdagrad(0.1), {"t.momentum1": torch.arange(5.0)}, {"sum": [[1.0], [3.0]]}),
    "fused": (shoal.RowwiseAdagrad(0.1), {"t.weight.momentum_1": torch.arange(5.0)}, {"sum": [[1.0], [3.0]]}),
    "adagrad": (
        shoal.Adagrad(0.1),
        {"t.momentum1": torch.arange(5.0)[:, None].repeat(1, 4)},
        {"sum": [[1.0] * 4, [3.0] * 4]},
    ),
    "adam": (
        shoal.Adam(0.1),
        {
            "t.momentum1": -torch.arange(5.0)[:, None].repeat(1, 4),
            "t.exp_avg_sq": torch.arange(5.0)[:, None].repeat(1, 4),
            "t.iter": torch.tensor(9),
        },
        {"exp_avg": [[-1.0] * 4, [-3.0] * 4], "exp_avg_sq": [[1.0] * 4, [3.0] * 4], "count": [[9.0], [9.0]]},
    ),
    "partial": (
        shoal.PartialRowwiseAdam(0.1, bias_correction="global"),
        {"exp_avg": torch.zeros(5, 4), "exp_avg_sq": torch.arange(5.0), "step": 9},
        {"exp_avg_sq": [[1.0], [3.0]]},
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_their_optimizer_state_becomes_the_rows(case):
    optimizer, entries, wanted = STATES[case]
    made = bags(optimizer=optimizer)
    loaded(made, torch.randn(5, 4))
    before = made.table("t").lookup(torch.arange(5))
    load_optimizer_state(made, {"state": {"sparse.embedding_bags.t.weight": entries}})
    state = made.table("t").state([1, 3])
    assert {name: state[name].tolist() for name in wanted} == wanted
    assert torch.equal(made.table("t").lookup(torch.arange(5)), before)
    assert made.stats()["t"].step == (9 if len(entries) == 3 else 0)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({}, "wanted one entry of the table 't'"),
        ({"t.weight": {}}, "wanted a tensor for 'sum'"),
        ({"t.weight": {"t.momentum1": torch.zeros(5, 4)}}, r"wanted momentum1 of \[n, 1\]; got \(5, 4\)"),
        ({"t.weight": {"t.momentum1": torch.zeros(4)}}, r"wanted keys from 0 to 3.*got \[4\]"),
        ({"t.weight": {"t.momentum1": -torch.ones(5)}}, "not negative"),
    ],
)
def test_state_that_does_not_fit_is_refused(states, message):
    made = bags(optimizer=shoal.RowwiseAdagrad(0.1, initial=0.5))
    loaded(made, torch.randn(5, 4))
    with pytest.raises(StateDictError, match=message):
        load_optimizer_state(made, {"state": states})
    assert made.table("t").state([1])["sum"].tolist() == [[0.5]]


def test_adam_wants_the_number_of_its_steps():
    made = bags(optimizer=shoal.Adam(0.1))
    loaded(made, torch.randn(5, 4))
    with pytest.raises(StateDictError, match="wanted the number of steps"):
        load_optimizer_state(made, {"t.weight": {"exp_avg": torch.zeros(5, 4), "exp_avg_sq": torch.zeros(5, 4)}})


@pytest.mark.parametrize("on_meta", [False, True])
def test_an_optimizer_is_applied_to_tables_with_a_disk_whose_handles_are_alive(tmp_path, on_meta):
    tables = [shoal.Table("t", 4, tiers=[shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "64MiB")])]
    made = shoal.EmbeddingBagCollection(tables, name="on disk", device="meta" if on_meta else None)
    if on_meta:
        made.to_empty(device="cpu")
    handle = made.table("t")
    apply_optimizer_in_backward(torch.optim.Adam, made, {"lr": 0.1})
    train_step(made, kjt({"t": [[1, 2]]}))
    assert made.table("t").keys().tolist() == [1, 2]
    assert set(made.table("t").state([1])) >= {"exp_avg", "exp_avg_sq"}
    with pytest.raises(ConfigError, match="made anew"):
        len(handle)


def test_a_collection_whose_tables_cannot_be_made_anew_says_so(tmp_path, monkeypatch):
    tables = [shoal.Table("t", 4, tiers=[shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "64MiB")])]
    made = shoal.EmbeddingBagCollection(tables, name="no disk")

    def fail(*given):
        raise StorageError("[t] no disk.")

    monkeypatch.setattr("shoal.modules.groups.open_group", fail)
    with pytest.raises(StorageError, match="no disk"):
        apply_optimizer_in_backward(torch.optim.Adam, made, {"lr": 0.1})
    with pytest.raises(ConfigError, match="made anew"):
        made(kjt({"t": [[1, 2]]}))


def test_a_frozen_table_stays_frozen():
    frozen, other = shoal.Table("t", 4, optimizer=None), shoal.Table("u", 4)
    made = shoal.EmbeddingBagCollection([frozen, other])
    apply_optimizer_in_backward(RowWiseAdagrad, made, {"lr": 0.1})
    assert [config.optimizer for config in made.embedding_bag_configs()] == [
        None,
        shoal.RowwiseAdagrad(0.1, eps=1e-10),
    ]
    with pytest.raises(ConfigError, match="wanted a table that trains"):
        apply_optimizer_in_backward(RowWiseAdagrad, shoal.EmbeddingBagCollection([frozen]), {"lr": 0.1})
