"""What policies keep of a row: typed columns that go where the row goes, and are refused where files have no place."""

import copy

import pytest
import torch
from support.batches import train_step
from support.tiered import SMALL, below, skewed_kjt

import shoal
from shoal.config import Column
from shoal.errors import ConfigError, StateDictError

SEEN, USES = Column("seen", 1, -1, dtype="int64"), Column("uses", 2, 0.5, dtype="float64")
BORN = ([-1], [0.5, 0.5])


class Keeps:
    """A policy that keeps when a key was seen last, and two sums of its uses."""

    columns = (SEEN, USES)


def collection(tiers=None, dtype="float32", with_columns=True):
    config = shoal.Table("t", 6, optimizer=shoal.Adam(lr=0.1), tiers=tiers, dtype=dtype)
    config = config.with_policies(Keeps()) if with_columns else config
    return shoal.EmbeddingBagCollection([config], seed=3)


def table_of(bags):
    group, number = bags.table("t").place
    return group, group.tables[number]


def count(bags, keys, step, wanted):
    """As a policy would after a backward: write the columns of the keys that it updated."""
    group, table = table_of(bags)
    keys = torch.unique(keys)
    with group.writing():
        before = table.facts(keys)
        for key, seen, uses in zip(keys.tolist(), before["seen"].tolist(), before["uses"].tolist(), strict=True):
            assert (seen, uses) == wanted.get(key, BORN), key
        slots = table.find(keys)
        assert bool((slots >= 0).all())
        seen = torch.full((len(keys), 1), (1 << 40) + step)
        uses = before["uses"] + torch.stack([keys.double().abs() / 3, torch.full((len(keys),), 1e-9).double()], dim=1)
        table.storage.write_column(SEEN, slots, seen)
        table.storage.write_column(USES, slots, uses)
    wanted |= dict(zip(keys.tolist(), zip(seen.tolist(), uses.tolist(), strict=True), strict=True))


def assert_facts(bags, wanted):
    group, table = table_of(bags)
    with group.reading():
        keys = table.keys()
        assert keys.tolist() == sorted(wanted)
        rows, found = table.rows(keys)
        assert bool(found.all())
        for facts in (table.facts(keys), table.content().facts, rows.facts):
            assert list(facts) == ["seen", "uses"]
            assert facts["seen"].tolist() == [wanted[key][0] for key in keys.tolist()]
            assert facts["uses"].tolist() == [wanted[key][1] for key in keys.tolist()]


@pytest.mark.parametrize("kind", ["memory alone", "ssd", "memory"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_go_where_their_row_goes(kind, dtype, tmp_path):
    tiers = None if kind == "memory alone" else [shoal.Dram(SMALL), below(kind, str(tmp_path))]
    bags, plain = collection(tiers, dtype), collection(None, dtype, with_columns=False)
    generator, wanted = torch.Generator().manual_seed(5), {}
    for step in range(30):
        batch = skewed_kjt(("t",), generator)
        for one in (bags, plain):
            train_step(one, batch, seed=step)
        count(bags, batch.values(), step, wanted)
        if step % 10 == 9:
            keys = torch.tensor(sorted(wanted)[::3])
            bags.table("t").erase(keys)
            plain.table("t").erase(keys)
            for key in keys.tolist():
                del wanted[key]
    assert_facts(bags, wanted)
    _group, table = table_of(bags)
    if tiers is not None:
        memory = table.stats().tiers[0]
        assert memory.promotions > 0 and memory.demotions > 0 and memory.rows < len(wanted)
    assert_facts(copy.deepcopy(bags), wanted)
    # What is a policy's changes nothing of what is trained.
    keys = torch.tensor(sorted(wanted))
    assert torch.equal(bags.table("t").lookup(keys), plain.table("t").lookup(keys))
    for name, values in bags.table("t").state(keys).items():
        assert torch.equal(values, plain.table("t").state(keys)[name]), name


def test_columns_stay_when_compaction_moves_rows():
    bags, wanted = collection(), {}
    keys = torch.arange(40_000)
    bags.table("t").assign(keys, torch.zeros(len(keys), 6))
    count(bags, keys, 1, wanted)
    gone = keys[torch.arange(len(keys)) % 20 > 0]
    group, table = table_of(bags)
    before = table.storage.bytes
    bags.table("t").erase(gone)
    for _ in range(50):
        with group.writing():
            table.compact(40_000)
    assert table.storage.bytes < before
    for key in gone.tolist():
        del wanted[key]
    assert_facts(bags, wanted)


def test_files_without_a_place_for_them_refuse_the_table(tmp_path):
    bags = collection()
    train_step(bags, skewed_kjt(("t",), torch.Generator().manual_seed(1)), seed=1)
    rows = len(bags.table("t"))
    with pytest.raises(StateDictError, match="'seen', 'uses'"):
        bags.state_dict()
    with pytest.raises(ConfigError, match=r"files hold .*'seen', 'uses'"):
        shoal.save(tmp_path / "saved", bags)
    with pytest.raises(ConfigError, match=r"files hold .*'seen', 'uses'"), shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
    assert len(bags.table("t")) == rows


def test_what_policies_remember_goes_with_a_deepcopy():
    bags = collection()
    _group, table = table_of(bags)
    table.policy_state["due"] = 7
    copied = copy.deepcopy(bags)
    assert table_of(copied)[1].policy_state == {"due": 7}
    table.policy_state["due"] = 8
    assert table_of(copied)[1].policy_state == {"due": 7}
