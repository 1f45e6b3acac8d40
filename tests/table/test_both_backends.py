"""What a table promises wherever its rows are: each test runs in host memory and in device memory."""

import copy
import errno
import os

import pytest
import torch
from support.backends import HOST, ON_DEVICE
from support.inside import group_of, table_of
from support.leaving import Leaving

import shoal
from shoal import _native
from shoal.errors import CapacityError, StorageError
from shoal.storage import MemoryStorage

LR = 0.5
MANY = range(100, 160)  # keys of more rows than `small` memory has room for


@pytest.fixture(params=[HOST, ON_DEVICE], ids=lambda backend: backend.name)
def on(request):
    return request.param


@pytest.fixture(params=[(), (MemoryStorage,)], ids=["memory", "lower"])
def lower(request):
    """The tiers below memory."""
    return request.param


@pytest.fixture
def bags(on, lower):
    """One table, of little memory where it has a lower tier; its rows are born as ones."""
    return small(on, lower)


def small(on, lower, **settings):
    settings = {"init": shoal.Constant(1.0), "optimizer": shoal.SGD(lr=LR), "features": ["t"], **settings}
    return on.bags(on.table(size=on.small if lower else None, lower=lower, **settings))


def counters(bags):
    """Those of the table that are not zero."""
    bags.check()
    return {name: count for name, count in bags.table("t").stats().counters.items() if count}


def inside(bags):
    """The table itself."""
    return table_of(bags)


def is_absent(bags, key):
    """Whether a key has no row in memory."""
    table = inside(bags)
    return bool((table if hasattr(table, "is_absent") else table.below).is_absent(torch.tensor([key])))


def changes_of(bags, cursor):
    """The keys that a cursor sees; None for all."""
    with group_of(bags).writing():
        inside(bags).seal()
        seen = cursor.look()
        cursor.advance()
    return None if seen is None else seen.tolist()


def opened(bags):
    """A cursor that has seen all up to now."""
    with group_of(bags).writing():
        cursor = inside(bags).changes.open()
        inside(bags).follow_cursors()
    assert changes_of(bags, cursor) is None
    return cursor


# ---- births


def test_new_keys_are_born_in_training_and_counted_once(on, bags):
    bags.eval()
    assert bags(on.batch([1, 2], [])).values().tolist() == [[2.0] * 4, [0.0] * 4]
    assert len(bags.table("t")) == 0
    bags.train()
    on.train(bags, [5, 5, -1], [5])
    on.train(bags, [5, 7])
    assert bags.table("t").keys().tolist() == [-1, 5, 7]
    assert bags.table("t").contains(on.keys(7, 8)).tolist() == [True, False]
    assert counters(bags) == {"lookups": 8, "hits": 1, "births": 3, "steps": 2}
    assert bags.table("t").lookup(on.keys(-1, 5, 7, 9))[:, 0].tolist() == [1 - LR, 1 - 4 * LR, 1 - LR, 1.0]
    assert bags.table("t").scores(on.keys(-1, 5, 9)).nan_to_num(nan=77.0).tolist() == [0.0, 1.0, 77.0]


def test_assign_gives_birth_and_takes_the_last_of_duplicates(on, bags):
    table = bags.table("t")
    table.assign(on.keys(3, 1, 3), on.rows(10, 20, 30))
    table.assign(on.keys(1), on.rows(40))
    assert table.lookup(on.keys(1, 2, 3))[:, 0].tolist() == [40.0, 1.0, 30.0]
    assert len(table) == 2 and counters(bags) == {"births": 2}


def test_assign_keeps_the_optimizers_state_and_the_score(on, lower):
    bags = small(on, lower, optimizer=shoal.Adagrad(lr=LR))
    on.train(bags, [1])
    on.train(bags, [1])
    table = bags.table("t")
    before = [*table.state(on.keys(1)).values(), table.scores(on.keys(1))]
    table.assign(on.keys(1, 2), on.rows(5, 6))
    for one, two in zip(before, [*table.state(on.keys(1)).values(), table.scores(on.keys(1))], strict=True):
        assert torch.equal(one, two)


# ---- loads


def loaded_by_state_dict(bags, other):
    other.load_state_dict(bags.state_dict())


def loaded_from_a_file(bags, other, folder):
    shoal.save(folder / "saved", bags)
    shoal.load(folder / "saved", other)


def recovered(bags, other, folder):
    with shoal.ChangeLog(folder / "log") as log:
        log.commit(bags)
        bags.table("t").assign(bags.table("t").keys()[:3], bags.table("t").lookup(bags.table("t").keys()[:3]) + 1)
        log.commit(bags)
    shoal.recover(folder / "log", other)


@pytest.mark.parametrize("how", [loaded_by_state_dict, loaded_from_a_file, recovered], ids=lambda how: how.__name__)
def test_rows_that_are_loaded_are_not_born(on, lower, how, tmp_path):
    bags, other = small(on, lower), small(on, lower)
    keys = on.keys(*MANY)
    bags.table("t").assign(keys, on.rows(*range(60)))
    other.table("t").assign(on.keys(1, 100), on.rows(8, 9))
    how(bags, other, *([] if how is loaded_by_state_dict else [tmp_path]))
    assert torch.equal(other.table("t").lookup(keys), bags.table("t").lookup(keys))
    assert other.table("t").keys().tolist() == list(MANY)
    assert counters(other) == {"births": 2}
    other.table("t").assign(on.keys(0), on.rows(1))
    assert counters(other) == {"births": 3}


def test_a_copy_has_no_births(on, lower):
    bags = small(on, lower if lower else ())
    bags.table("t").assign(on.keys(*MANY), on.rows(*range(60)))
    other = copy.deepcopy(bags)
    assert len(other.table("t")) == 60 and counters(other) == {}


# ---- erase, and leases


def test_erase_removes_rows_wherever_they_are(on, bags):
    table = bags.table("t")
    table.assign(on.keys(*MANY), on.rows(*range(60)))
    assert table.erase(on.keys(100, 159, 7, 100)) == 2
    assert table.erase(on.keys(100)) == 0
    assert len(table) == len(table.keys()) == 58
    assert table.lookup(on.keys(100, 101))[:, 0].tolist() == [1.0, 1.0]
    assert counters(bags) == {"births": 60, "erased": 2}
    on.train(bags, [100])
    assert counters(bags)["births"] == 61 and len(table) == 59


def test_the_gradient_of_a_row_that_is_erased_before_it_is_dropped(on, bags):
    on.train(bags, [1, 2])
    out = bags(on.batch([1, 2], [1])).values()
    table = bags.table("t")
    assert table.erase(on.keys(1)) == 1 and inside(bags).has_limbo
    table.assign(on.keys(1), on.rows(9))  # another row, in another slot
    out.sum().backward()
    del out
    assert table.lookup(on.keys(1, 2))[:, 0].tolist() == [9.0, 1 - 2 * LR]
    assert counters(bags)["dropped_gradients"] == 1 and counters(bags)["steps"] == 2
    on.train(bags, [2])  # the lease has ended
    assert not inside(bags).has_limbo
    assert len(table) == 2


def test_forwards_without_a_backward_let_their_rows_go(on, bags):
    out = bags(on.batch([1], [2])).values()
    bags.table("t").erase(on.keys(1))
    assert inside(bags).has_limbo
    del out
    assert len(bags.table("t")) == 1
    bags.table("t").erase(on.keys(3))
    assert not inside(bags).has_limbo
    assert counters(bags) == {"lookups": 2, "births": 2, "erased": 1}


# ---- changes


def test_a_cursor_sees_what_changed_once(on, bags):
    on.train(bags, [1, 2, 3])
    cursor = opened(bags)
    assert changes_of(bags, cursor) == []
    on.train(bags, [2, 4], [4])
    bags.table("t").assign(on.keys(9, 1), on.rows(1, 2))
    assert changes_of(bags, cursor) == [1, 2, 4, 9]
    bags.table("t").erase(on.keys(2, 77))
    bags.eval()
    bags(on.batch([1, 3, 5]))
    assert changes_of(bags, cursor) == [2]
    assert changes_of(bags, cursor) == []


def test_rows_that_leave_memory_or_come_back_are_no_change_of_their_own(on):
    bags = small(on, (MemoryStorage,))
    table = bags.table("t")
    table.assign(on.keys(*MANY), on.rows(*range(60)))
    cursor = opened(bags)
    on.train(bags, [100])
    table.assign(on.keys(*MANY[10:]), on.rows(*range(50)))
    bags.eval()
    for key in MANY:
        bags(on.batch([key]))
    assert changes_of(bags, cursor) == [100, *MANY[10:]]


def test_a_load_may_change_all_rows(on, bags):
    bags.table("t").assign(on.keys(1, 2), on.rows(1, 2))
    cursor = opened(bags)
    bags.load_state_dict(bags.state_dict())
    assert changes_of(bags, cursor) is None
    assert changes_of(bags, cursor) == []


# ---- statistics


def test_tables_and_tiers_count_what_is_done(on):
    bags = small(on, (MemoryStorage,), optimizer=shoal.SGD(lr=LR, clip=shoal.Clip(nonfinite="skip")))
    table = bags.table("t")
    assert counters(bags) == {}
    for first in range(100, 160, 6):
        on.train(bags, [*range(first, first + 6), 100])
    stats = table.stats()
    memory, below = stats.tiers
    assert (stats.rows, stats.step) == (60, 10)
    assert counters(bags) == {"lookups": 70, "hits": 9, "births": 60, "steps": 10}
    assert (memory.name, below.name) == (on.tier.__name__, "MemoryStorage")
    assert memory.rows < 60 and below.rows < 60 and memory.rows + below.rows >= 60
    assert 0 < memory.bytes <= memory.budget_bytes == stats.budget_bytes
    assert stats.bytes == memory.bytes == stats.index_bytes + stats.storage_bytes
    assert memory.hits + memory.misses == 70 and memory.hits <= 9
    assert memory.promotions == below.hits == 9 - memory.hits  # key 100, as often as it had left
    assert memory.demotions >= below.rows
    assert memory.dirty <= memory.rows and memory.pinned == 0
    assert below.budget_bytes is None and below.index_bytes == 0
    assert below.bytes == below.rows * (4 * 4 + 8)
    assert below.written_bytes == memory.demotions * (4 * 4 + 8)
    assert below.reads and below.writes and not below.failures and not below.ahead_bytes


def test_rows_of_live_leases_are_pinned(on):
    bags = small(on, (MemoryStorage,))
    on.train(bags, [1, 2, 3])
    out = bags(on.batch([1, 2])).values()
    assert bags.table("t").stats().tiers[0].pinned == 2
    out.sum().backward()
    del out
    assert bags.table("t").stats().tiers[0].pinned == 0


def test_a_skipped_backward_is_counted_and_changes_nothing(on, lower):
    bags = small(on, lower, optimizer=shoal.SGD(lr=LR, clip=shoal.Clip(nonfinite="skip")))
    on.train(bags, [1, 2])
    before = bags.table("t").lookup(on.keys(1, 2))
    (bags(on.batch([1, 2])).values() * float("nan")).sum().backward()
    assert torch.equal(bags.table("t").lookup(on.keys(1, 2)), before)
    told = counters(bags)
    assert told.get("skipped_backwards", 0) + told.get("skipped_rows", 0) > 0


# ---- tiers, and rows that are lost


def test_rows_below_are_as_those_in_memory(on):
    whole, bags = small(on, ()), small(on, (MemoryStorage,))
    for step in range(8):
        keys = [(7 * step + 11 * n) % 60 + 100 for n in range(6)]
        outs = [one(on.batch(keys, keys[:2])).values() for one in (whole, bags)]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()
    assert bags.table("t").stats().tiers[1].rows
    for one, two in zip(whole.state_dict().values(), bags.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_a_table_is_whole_again_once_its_lost_rows_are_erased(on, tmp_path):
    bags = small(on, (shoal.Ssd(tmp_path, "16MiB"),))
    table = bags.table("t")
    table.assign(on.keys(*MANY), on.rows(*range(60)))
    assert table.unreadable().tolist() == []
    lost = [key for key in MANY if is_absent(bags, key)]
    kept = [key for key in MANY if key not in lost]
    before = counters(bags)
    for segment in tmp_path.rglob("*.seg"):
        os.truncate(segment, 0)
    with pytest.raises(StorageError) as raised:
        on.train(bags, [*lost[:2], 1])
    assert (raised.value.table, raised.value.keys.tolist()) == ("t", lost[:2])
    assert raised.value.keys.device == bags.device
    assert counters(bags) == before  # nothing changed
    assert table.unreadable().tolist() == lost
    assert table.erase(table.unreadable()) == len(lost)
    assert table.keys().tolist() == kept and len(table) == len(kept)
    on.train(bags, [*lost[:2], 1])
    assert counters(bags)["births"] == 63
    assert table.lookup(on.keys(*lost[:2], *kept))[:, 0].tolist() == [1 - LR] * 2 + [key - 100.0 for key in kept]
    assert table.unreadable().tolist() == []
    assert table.stats().tiers[1].failures > 0


def test_rows_are_counted_again_once_a_storage_is_back_that_failed_in_an_erase(on):
    bags = small(on, (Leaving,))
    table, storage = bags.table("t"), inside(bags).lowest.storage
    table.assign(on.keys(*MANY), on.rows(*range(60)))
    keys = on.keys(*MANY[:30])
    storage.is_leaving = True
    with pytest.raises(ConnectionError, match="lost in the middle"):
        table.erase(keys)
    with pytest.raises(ConnectionError, match="gone"):
        len(table)
    storage.is_leaving = storage.is_gone = False
    assert len(table) == len(table.keys()) == table.stats().rows
    assert counters(bags).get("erased", 0) == 60 - len(table)
    table.erase(keys)
    assert len(table) == len(table.keys()) == 30
    assert counters(bags)["erased"] == 30


def test_no_row_leaves_memory_that_could_not_be_written(on, tmp_path):
    bags = small(on, (shoal.Ssd(tmp_path, "16MiB"),))
    on.train(bags, [1, 2, 3])
    _native.inject_fault(_native.FileCall.write, "", errno.ENOSPC, 0, 1)
    try:
        with pytest.raises(StorageError):
            bags.table("t").assign(on.keys(*MANY), on.rows(*range(60)))
    finally:
        _native.clear_faults()
    assert bags.table("t").lookup(on.keys(1, 2, 3))[:, 0].tolist() == [1 - LR] * 3
    bags.table("t").assign(on.keys(*MANY), on.rows(*range(60)))
    assert len(bags.table("t")) == 63
    assert bags.table("t").lookup(on.keys(1, 2, 3, 100, 159))[:, 0].tolist() == [1 - LR] * 3 + [0.0, 59.0]


# ---- room


def test_a_table_without_room_says_so_and_stays_as_it_was(on):
    bags = on.bags(on.table(size=on.small, init=shoal.Constant(1.0)))
    table = bags.table("t")
    table.assign(on.keys(1, 2), on.rows(1, 2))
    with pytest.raises(CapacityError, match=f"{on.tier.__name__}.*Raise it in Table"):
        table.assign(on.keys(*range(1000)), on.rows(*range(1000)))
    assert table.keys().tolist() == [1, 2] and counters(bags) == {"births": 2}
    other = on.bags(on.table(init=shoal.Constant(1.0)))
    other.table("t").assign(on.keys(*range(1000)), on.rows(*range(1000)))
    with pytest.raises(CapacityError, match=f"1000 rows take .*{on.tier.__name__}"):
        bags.load_state_dict(other.state_dict())
    assert table.lookup(on.keys(1, 2))[:, 0].tolist() == [1.0, 2.0]


def test_a_full_lower_tier_takes_no_births(on, tmp_path):
    bags = small(on, (shoal.Ssd(tmp_path, "1MiB"),))
    most = inside(bags).lowest.capacity
    with pytest.raises(CapacityError, match=f"more than the {most} that its lowest"), group_of(bags).writing():
        inside(bags).require_more(most + 1)
    with pytest.raises(CapacityError, match="Nothing was loaded"), group_of(bags).writing():
        inside(bags).require_room(most + 1)
