"""Tables on a device in a change log: what is committed there is had again anywhere."""

import pytest
import torch
from support.device_pairs import slow
from support.device_tables import DEVICE
from support.tiered import below, skewed_kjt

import shoal


def tiers_of(kind, folder):
    return {
        "hbm": [shoal.Hbm()],
        "dram": [shoal.Hbm("12KiB"), shoal.Dram("1MiB")],
        "ssd": [shoal.Hbm("12KiB"), shoal.Dram("24KiB"), below("ssd", str(folder))],
    }[kind]


def made(kind, folder):
    if kind == "host":
        return shoal.EmbeddingBagCollection(tables(None), seed=3, device="cpu")
    return shoal.EmbeddingBagCollection(tables(tiers_of(kind, folder)), seed=3, device=DEVICE)


def tables(tiers):
    return [
        shoal.Table("a", 5, tiers=tiers, optimizer=shoal.RowwiseAdagrad(lr=0.1)),
        shoal.Table("b", 16, tiers=tiers, optimizer=shoal.Adam(lr=0.01), dtype="bfloat16"),
    ]


def train(bags, steps):
    for step in steps:
        batch = skewed_kjt(("a", "b"), torch.Generator().manual_seed(step), bags=6, keys=200).to(bags.device)
        out = bags(batch).values()
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        out.backward(gradient.to(out.device))


def rows_of(bags):
    return {name: value.cpu().clone() for name, value in bags.state_dict().items()}


def assert_rows(bags, wanted):
    found = rows_of(bags)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("kind", ["hbm", slow("dram"), slow("ssd")])
def test_commits_of_a_device_are_recovered_there_and_on_the_host(tmp_path, kind):
    bags = made(kind, tmp_path / "one")
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        assert log.newest.tables["a"].replaces
        train(bags, [5])
        bags.table("a").erase(bags.table("a").keys()[:3])
        log.commit(bags)
        said = log.newest.tables["a"]
        assert not said.replaces
        assert 0 < said.puts < len(bags.table("a"))
        assert said.deletes == 3
        log.commit(bags)
        assert (log.newest.tables["a"].puts, log.newest.tables["b"].puts) == (0, 0)
        log.compact()
    wanted = rows_of(bags)
    host, again = made("host", None), made(kind, tmp_path / "two")
    for other in (host, again):
        assert shoal.recover(tmp_path / "log", other).version == 3
        assert_rows(other, wanted)
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(again, [7])
        log.commit(again)
        assert not log.newest.tables["a"].replaces
        log.rollback(3, again)
        assert not log.newest.tables["a"].replaces
    assert_rows(again, wanted)


@pytest.mark.parametrize("kind", ["hbm", slow("dram"), slow("ssd")])
def test_a_checkpoint_of_the_host_is_loaded_on_a_device_and_back(tmp_path, kind):
    host = made("host", None)
    train(host, range(4))
    shoal.save(tmp_path / "saved", host)
    device = made(kind, tmp_path / "two")
    shoal.load(tmp_path / "saved", device)
    assert_rows(device, rows_of(host))
    shoal.save(tmp_path / "back", device)
    again = made("host", None)
    shoal.load(tmp_path / "back", again)
    assert_rows(again, rows_of(host))
