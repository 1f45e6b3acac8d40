"""What a table keeps for logs that do not come back, and what it tells them."""

import pytest
import torch
from support.batches import kjt, train_step
from support.inside import table_of
from support.logged import assert_rows, made, recovered, rows_of, train
from support.tiered import below

import shoal
from shoal.errors import CapacityError
from shoal.table import changes

KEYS = torch.arange(20_000)


def one_table(tiers=None):
    return shoal.EmbeddingBagCollection([shoal.Table("t", 4, tiers=tiers, optimizer=shoal.SGD(lr=1.0))])


def waiting(bags):
    """Keys that a table keeps for its cursors."""
    held = table_of(bags).changes
    (base,) = held._bases.values()
    return held._listed + base.cursor.waiting


def test_keys_that_change_again_and_again_are_kept_once(tmp_path):
    bags = one_table()
    bags.table("t").assign(KEYS, torch.zeros(len(KEYS), 4))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
    for _ in range(40):
        bags.table("t").assign(KEYS, torch.randn(len(KEYS), 4))
        assert waiting(bags) <= 2 * len(KEYS) + changes._LEAST_KEYS
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        assert (log.newest.tables["t"].puts, log.newest.tables["t"].replaces) == (len(KEYS), False)


def test_rows_are_counted_once_where_a_log_follows(tmp_path):
    """Keys that come and are listed in large numbers ask how many rows there are."""
    bags = one_table()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        keys = torch.arange(changes._LEAST_KEYS + 5000)
        bags.table("t").assign(keys, torch.randn(len(keys), 4))
        assert len(bags.table("t")) == len(keys)
        log.commit(bags)
        assert len(bags.table("t")) == len(keys) == len(bags.table("t").keys())


@pytest.mark.parametrize("sealed", [False, True])
def test_keys_that_are_born_and_die_behind_a_log_do_not_pile_up(tmp_path, sealed):
    bags = one_table()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        for number in range(30):
            keys = KEYS + number * len(KEYS)
            bags.table("t").assign(keys, torch.randn(len(keys), 4))
            bags.table("t").erase(keys[100:])
            if sealed:  # by another log
                table_of(bags).seal()
            assert waiting(bags) <= 4 * changes._LEAST_KEYS
        log.commit(bags)
        assert log.newest.tables["t"].replaces
    again = one_table()
    shoal.recover(tmp_path / "log", again)
    assert_rows(again, rows_of(bags))


def test_rows_that_leave_memory_behind_a_log_are_kept_once(tmp_path):
    bags = one_table([shoal.Dram("64KiB"), below("ssd", str(tmp_path / "rows"))])
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        train_step(bags, kjt({"t": [torch.randint(0, 5000, (400,), generator=generator).tolist()]}), seed=step)
    assert waiting(bags) <= 2 * 5000 + changes._LEAST_KEYS
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        assert not log.newest.tables["t"].replaces
    again = one_table()
    shoal.recover(tmp_path / "log", again)
    assert_rows(again, rows_of(bags))


@pytest.mark.parametrize("kind", ["memory", "ssd"])
def test_an_assign_that_is_refused_is_no_change(tmp_path, kind):
    tiers = [shoal.Dram("64KiB")] if kind == "memory" else [shoal.Dram("64KiB"), shoal.Ssd(str(tmp_path), "1MiB")]
    bags = one_table(tiers)
    with shoal.ChangeLog(tmp_path / "log") as log:
        bags.table("t").assign([1, 2], torch.ones(2, 4))
        log.commit(bags)
        with pytest.raises(CapacityError):
            bags.table("t").assign(torch.arange(100_000), torch.ones(100_000, 4))
        log.commit(bags)
        assert (log.newest.tables["t"].puts, log.newest.tables["t"].deletes) == (0, 0)


def test_a_table_goes_with_its_last_user():
    """Its changes know it, and do not hold it: a table on disk has a folder to give back."""
    import gc
    import weakref

    bags = made()
    train(bags, [1])
    gc.collect()
    gc.disable()
    try:
        table = weakref.ref(table_of(bags))
        del bags
        assert table() is None
    finally:
        gc.enable()


def test_a_log_that_was_lost_is_recovered_whole(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        table_of(bags).changes.lose()
        train(bags, range(3, 5))
        log.commit(bags)
    assert_rows(recovered(tmp_path / "log")[0], rows_of(bags))
