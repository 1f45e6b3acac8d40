"""Collections on torch's meta device: settings without a place for rows."""

import copy

import pytest
import torch
from support.batches import kjt, train_step
from torch import nn

import shoal
from shoal.errors import ConfigError, DeviceError

BATCH = {"a": [[1, 2], [3]]}


def on_meta(**settings):
    return shoal.EmbeddingBagCollection([shoal.Table("a", 4)], device=torch.device("meta"), **settings)


def test_it_has_settings_and_no_rows():
    bags = on_meta()
    assert bags.device == torch.device("meta")
    assert "rows=0" in repr(bags)
    assert len(bags.table("a")) == 0
    assert bags.state_dict()["embedding_bags.a.weight"].shape == (0, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda bags: bags(kjt(BATCH)),
        lambda bags: bags.eval()(kjt(BATCH)),
        lambda bags: bags.table("a").assign([1], torch.zeros(1, 4)),
        lambda bags: bags.table("a").erase([1]),
        lambda bags: bags.table("a").lookup([1]),
        lambda bags: bags.load_state_dict(shoal.EmbeddingBagCollection([shoal.Table("a", 4)]).state_dict()),
        lambda bags: bags.optimizer,
    ],
)
def test_what_needs_rows_is_refused_and_says_what_to_do(use):
    bags = on_meta()
    with pytest.raises(DeviceError, match=r"to_empty\(device='cpu'\)"):
        use(bags)
    bags.to_empty(device="cpu").train()
    train_step(bags, kjt(BATCH))


def test_sequences_too():
    rows = shoal.EmbeddingCollection([shoal.Table("a", 4, pooling="none")], device="meta")
    with pytest.raises(DeviceError, match="to_empty"):
        rows(kjt(BATCH))
    assert len(rows.to_empty(device="cpu")(kjt(BATCH))["a"].values()) == 3


@pytest.mark.parametrize("move", [lambda model: model.to_empty(device="cpu"), lambda model: model.to("cpu")])
def test_it_becomes_real_with_its_model_and_keeps_its_name_and_seed(move):
    bags = on_meta(name="made on meta", seed=7)
    model = nn.Sequential(bags)
    move(model)
    assert (bags.name, bags.device) == ("made on meta", torch.device("cpu"))
    other = shoal.EmbeddingBagCollection([shoal.Table("a", 4)], seed=7)
    for _ in range(2):
        assert torch.equal(train_step(bags, kjt(BATCH)), train_step(other, kjt(BATCH)))
    torch.optim.lr_scheduler.StepLR(bags.optimizer, 1)


def test_its_tiers_are_opened_when_it_becomes_real(tmp_path):
    table = shoal.Table("a", 4, tiers=[shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "16MiB")])
    bags = shoal.EmbeddingBagCollection([table], device="meta")
    assert not list(tmp_path.iterdir())
    bags.to_empty(device="cpu")
    assert [tier.name for tier in bags.stats()["a"].tiers] == ["Dram", "Ssd"]


def test_handles_of_before_are_refused():
    bags = on_meta()
    handle = bags.table("a")
    bags.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=r"made anew since. Call table\(\) again"):
        len(handle)
    assert len(bags.table("a")) == 0


def test_casts_are_refused_there_too_and_moves_within_meta_are_none():
    bags = on_meta()
    with pytest.raises(ConfigError, match="rows keep their type"):
        bags.half()
    assert bags.to("meta").device.type == "meta"


def test_a_device_that_is_not_there_leaves_it_on_meta():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bags = on_meta()
    with pytest.raises(DeviceError):
        bags.to_empty(device="cuda")
    assert bags.device.type == "meta"
    bags.to_empty(device="cpu")


def test_a_copy_is_on_meta():
    assert copy.deepcopy(on_meta()).device.type == "meta"


def test_a_live_collection_does_not_go_there():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    train_step(bags, kjt(BATCH))
    with pytest.raises(DeviceError, match="would drop their rows"):
        bags.to("meta")
    with pytest.raises(DeviceError, match="would drop their rows"):
        nn.Sequential(bags).to_empty(device="meta")
    bags.to_empty(device="cpu")  # it is there: rows stay
    assert len(bags.table("a")) == 3


def test_an_optimizer_is_applied_there():
    from shoal.interop.torchrec import apply_optimizer_in_backward

    bags = on_meta()
    apply_optimizer_in_backward(torch.optim.SGD, bags, {"lr": 0.5})
    assert bags.device.type == "meta"
    assert bags.to_empty(device="cpu").optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.gpu
def test_it_becomes_real_on_a_gpu():
    bags = on_meta(seed=7)
    nn.Sequential(bags).to_empty(device="cuda")
    other = shoal.EmbeddingBagCollection([shoal.Table("a", 4)], seed=7)
    assert bags.device == torch.device("cuda:0")
    out = bags(kjt(BATCH).to("cuda"))
    out.values().sum().backward()
    assert torch.equal(out.values().detach().cpu(), other(kjt(BATCH)).values().detach())
    bags.check()
    assert len(bags.table("a")) == 3
