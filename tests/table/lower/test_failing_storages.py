"""Storages of users that fail: nothing is lost that they did not lose, and the table goes on."""

import threading

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import staged_batches_of, table_of
from support.leaving import Leaving
from support.tiered import SMALL, collection, train

import shoal
from shoal.storage import MemoryStorage


def test_a_storage_of_the_users_that_fails_is_not_said_to_have_lost_rows():
    bags, below = moody()
    train([bags], torch.Generator().manual_seed(0), 30)
    assert bags.table("t").unreadable().tolist() == []
    below.storage.fails = "read"
    with pytest.raises(OSError, match="EIO"):
        bags.table("t").unreadable()


class Moody(MemoryStorage):
    """A storage that fails where it is told to."""

    fails = ""

    def _may_fail(self, what):
        if what == self.fails:
            raise OSError(5, "EIO")

    def read(self, keys):
        self._may_fail("read")
        return super().read(keys)

    def write(self, keys, rows):
        self._may_fail("write")
        super().write(keys, rows)

    def erase(self, keys):
        count = super().erase(keys)  # it has done it, and says that it has not
        self._may_fail("erase")
        return count


def moody():
    bags = collection([{"name": "t", "dim": 6}], [shoal.Dram(SMALL), Moody])
    return bags, table_of(bags).below


def test_an_erase_that_fails_half_way_loses_nothing_later():
    plain = collection([{"name": "t", "dim": 6}])
    bags, below = moody()
    train([plain, bags], torch.Generator().manual_seed(0), 30)
    keys = plain.table("t").keys()[::3]
    held = table_of(bags).find(keys) >= 0
    below.storage.fails = "erase"
    with pytest.raises(OSError, match="EIO"):
        bags.table("t").erase(keys)
    below.storage.fails = ""
    assert bags.table("t").contains(keys[held]).all()  # what was in memory is still there, and now all there is
    assert len(bags.table("t")) == len(bags.table("t").keys())
    for module in (plain, bags):
        module.table("t").erase(keys)
    train([plain, bags], torch.Generator().manual_seed(1), 30)
    assert_same_rows(plain, bags)


def test_eval_lookups_that_fail_leave_nothing_behind():
    bags, below = moody()
    train([bags], torch.Generator().manual_seed(0), 30)
    below.storage.fails = "read"
    for _ in range(3):
        with pytest.raises(OSError, match="EIO") as raised, torch.no_grad():
            bags.eval()(kjt({"t": [list(range(100))]}))
        assert raised.value.__notes__ == ["[table 't'] raised by its lowest tier: Moody.read."]
    assert not below._staged


def test_a_clear_that_fails_leaves_no_way_to_rows_that_are_gone():
    tables = [{"name": name, "dim": 4} for name in ("x", "y")]
    plain, bags = collection(tables), collection(tables, [shoal.Dram(SMALL), Moody])
    for first in range(0, 3000, 100):
        batch = kjt({name: [range(first, first + 100)] for name in ("x", "y")})
        for module in (plain, bags):
            module(batch).values().sum().backward()
    table_of(bags, 1).below.storage.fails = "erase"
    with pytest.raises(OSError, match="EIO") as raised:
        bags.load_state_dict(plain.state_dict())
    note = raised.value.__notes__[-1]
    assert note.startswith("[table 'y'] it was being loaded, and could not be emptied, and may have lost rows.")
    assert note.endswith("'x' did load.")
    table_of(bags, 1).below.storage.fails = ""
    assert len(bags.table("y")) == len(bags.table("y").keys()) < 3000
    for first in range(0, 3000, 100):  # x is loaded, and everything goes on
        batch = kjt({name: [range(first, first + 100)] for name in ("x", "y")})
        outs = [module(batch) for module in (plain, bags)]
        assert torch.equal(*[out["x"] for out in outs])
        outs[0].values().sum().backward()
        outs[1].values().sum().backward()
    bags.load_state_dict(plain.state_dict())
    assert_same_rows(plain, bags)


def test_a_fill_that_fails_while_a_batch_is_staged_leaves_no_way_to_rows_that_are_gone():
    plain, new = collection([{"name": "t", "dim": 6}]), collection([{"name": "t", "dim": 6}])
    bags, below = moody()
    batches = [kjt({"t": [range(first, first + 100)]}) for first in range(0, 3000, 100)]
    for batch in batches:
        for module in (plain, bags):
            module(batch).values().sum().backward()
    staged = []
    write = below.storage.write

    def stage_and_fail(*_arguments):
        staged.append(bags.stage(batches[0]))
        finder = threading.Thread(target=staged[0].find, args=(1,))
        finder.start()
        finder.join()
        raise OSError(28, "ENOSPC")

    below.storage.write = stage_and_fail
    with pytest.raises(OSError, match="ENOSPC"):
        bags.load_state_dict(plain.state_dict())
    below.storage.write = write
    assert staged and not staged_batches_of(bags)
    for batch in batches:
        outs = [module(batch).values() for module in (new, bags)]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()
    keys = torch.arange(3000)
    assert torch.equal(new.table("t").lookup(keys), bags.table("t").lookup(keys))


def test_a_load_that_fails_leaves_an_empty_table_and_says_so():
    plain = collection([{"name": "t", "dim": 6}])
    bags, below = moody()
    train([plain, bags], torch.Generator().manual_seed(0), 40)
    below.storage.fails = "write"
    with pytest.raises(OSError, match="EIO") as raised:
        bags.load_state_dict(plain.state_dict())
    assert "is empty now. Load it again" in raised.value.__notes__[-1]
    below.storage.fails = ""
    assert len(bags.table("t")) == len(bags.table("t").keys()) == 0
    bags.load_state_dict(plain.state_dict())
    assert_same_rows(plain, bags)


@pytest.mark.parametrize("also", ["", "erase"])
def test_a_load_that_fails_leaves_tables_that_it_did_not_reach(also):
    """`also`: the table cannot be emptied then, either."""
    tables = [{"name": name, "dim": 4} for name in ("x", "y", "z")] + [{"name": "m", "dim": 4, "tiers": None}]
    plain, bags = collection(tables), collection(tables, [shoal.Dram(SMALL), Moody])
    names = ("x", "y", "z", "m")
    for first in range(0, 2000, 100):
        bags(kjt({name: [range(first, first + 100)] for name in names})).values().sum().backward()
        plain(kjt({name: [range(first, first + 50)] for name in names})).values().sum().backward()
    before = bags.state_dict()
    storage = table_of(bags, 1).below.storage
    write = storage.write

    def refuse(*_arguments):
        storage.fails = also
        raise OSError(28, "ENOSPC")

    storage.write = refuse
    with pytest.raises(OSError, match="ENOSPC") as raised:
        bags.load_state_dict(plain.state_dict())
    what = "could not be emptied, and may have lost rows" if also else "is empty now"
    assert raised.value.__notes__[-1] == (
        f"[table 'y'] it was being loaded, and {what}. Load it again. 'm', 'x' did load. 'z' stayed as before."
    )
    storage.write, storage.fails = write, ""
    after, loaded = bags.state_dict(), plain.state_dict()
    for name, value in after.items():
        table = name.split(".")[1]
        if table != "y":
            assert torch.equal(value, before[name] if table == "z" else loaded[name]), name
    assert len(bags.table("y")) == len(bags.table("y").keys())
    assert also or not len(bags.table("y"))
    bags.load_state_dict(plain.state_dict())
    assert_same_rows(plain, bags)


def test_rows_are_counted_again_once_a_storage_is_back_that_went_in_an_erase():
    bags = collection([{"name": "t", "dim": 6}], [shoal.Dram(SMALL), Leaving])
    for first in range(0, 2000, 100):
        bags(kjt({"t": [range(first, first + 100)]})).values().sum().backward()
    table, storage = bags.table("t"), table_of(bags).below.storage
    keys = torch.arange(0, 1000)
    for _ in range(2):  # the second time what the first one did is not known yet
        storage.is_leaving = True
        with pytest.raises(ConnectionError, match="lost in the middle"):
            table.erase(keys)
        with pytest.raises(ConnectionError, match="gone"):
            len(table)
        storage.is_leaving = storage.is_gone = False
    stats = table.stats()
    assert stats.rows == len(table) == len(table.keys()) < 2000
    assert stats.counters["erased"] == 2000 - len(table)
    table.erase(keys)
    assert len(table) == len(table.keys()) == 1000
    assert table.stats().counters["erased"] == 1000
