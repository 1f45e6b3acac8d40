"""A storage has one table, through copies, state dicts, forks and the end of its collection."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import table_of
from support.tiered import SMALL, collection, pair, train

import shoal
from shoal.errors import ConfigError, StorageError
from shoal.storage import MemoryStorage


def test_state_dicts_and_copies(tmp_path):
    plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    train([plain, bags], torch.Generator().manual_seed(0), 30)
    twin = copy.deepcopy(bags)
    train([plain, bags], torch.Generator().manual_seed(1), 5)
    assert_same_rows(plain, bags)
    twin.load_state_dict(plain.state_dict())
    assert_same_rows(plain, twin)
    train([plain, bags, twin], torch.Generator().manual_seed(2), 10, first=100)
    assert_same_rows(plain, twin)
    assert_same_rows(bags, twin)


@pytest.mark.parametrize("rows", [0, 30])
def test_a_copy_does_not_take_the_storage_of_the_original(rows):
    closed = []

    class Shared(MemoryStorage):
        def close(self):
            closed.append(self)

    shared = Shared(8 * 4 + 4 + 8)
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), lambda row_bytes: shared])
    train([bags], torch.Generator().manual_seed(0), rows)
    before = {name: value.clone() for name, value in bags.state_dict().items()}
    with pytest.raises(ConfigError, match="to make a storage for this table alone; got the Shared that"):
        copy.deepcopy(bags)
    gc.collect()
    assert not closed
    for name, value in bags.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_copy_does_not_overwrite_what_a_storage_has_already():
    class Remote(MemoryStorage):
        """Knows its rows by its name, however often it is opened."""

        rows = MemoryStorage(8 * 4 + 4 + 8)

        def __init__(self, row_bytes):
            super().__init__(row_bytes)
            self.__dict__ = self.rows.__dict__

    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), Remote])
    train([bags], torch.Generator().manual_seed(0), 30)
    before = {name: value.clone() for name, value in bags.state_dict().items()}
    with pytest.raises(ConfigError, match="deepcopy: wanted what makes its lowest tier to make another, empty one"):
        copy.deepcopy(bags)
    for name, value in bags.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_two_tables_do_not_share_a_storage():
    closed = []

    class Kept(MemoryStorage):
        def close(self):
            closed.append(self)

    shared = Kept(4 * 4 + 4 + 8)
    tiers = [shoal.Dram(SMALL), lambda _row_bytes: shared]
    with pytest.raises(ConfigError, match="got the Kept that table 'one' has"):
        collection([{"name": "one", "dim": 4}, {"name": "two", "dim": 4}], tiers)
    gc.collect()
    assert closed == [shared]  # the first had it, and is gone
    assert len(collection([{"name": "one", "dim": 4}], tiers).table("one")) == 0


def test_the_files_go_with_the_collection(tmp_path):
    _plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    train([bags], torch.Generator().manual_seed(0), 20)
    assert list(tmp_path.rglob("*.seg"))
    del bags
    gc.collect()
    assert not list(tmp_path.rglob("*.seg"))


def test_a_storage_of_ones_own_is_closed_and_may_hold_rows_already():
    closed = []

    class Kept(MemoryStorage):
        def flush(self):
            closed.append("flushed")

        def close(self):
            closed.append(self)

    first = collection([{"name": "t", "dim": 4}], [shoal.Dram(SMALL), Kept])
    storage = table_of(first).below.storage
    first.table("t").assign(torch.arange(1500), torch.randn(1500, 4))
    keys = storage.keys()
    rows = first.table("t").lookup(keys)
    del first
    gc.collect()
    assert closed == ["flushed", storage]
    second = collection([{"name": "t", "dim": 4}], [shoal.Dram(SMALL), lambda _row_bytes: storage])
    assert len(second.table("t")) == len(keys)
    assert torch.equal(second.table("t").lookup(keys), rows)


def test_what_makes_no_storage_is_refused():
    with pytest.raises(ConfigError, match=r"to make a shoal\.Storage; got dict"):
        collection([{"name": "t", "dim": 4}], [shoal.Dram("1MiB"), lambda _row_bytes: {}])

    class Wrong(MemoryStorage):
        def read(self, keys):
            return super().read(keys)[0].float(), None

    bags = collection([{"name": "t", "dim": 4}], [shoal.Dram("1MiB"), Wrong])
    with pytest.raises(StorageError, match=r"Wrong.read must return uint8 \[2, 28\]"):
        bags(kjt({"t": [[1, 2]]}))


def test_a_folder_has_one_owner(tmp_path):
    tables = [shoal.Table("t", 4, tiers=[shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "16MiB")])]
    bags = shoal.EmbeddingBagCollection(tables, name="one")
    del bags
    gc.collect()
    from shoal.storage import SsdStorage

    held = SsdStorage(str(tmp_path / "one" / "t"), 24, 16 << 20)
    with pytest.raises(StorageError, match=r"process \d+"):
        shoal.EmbeddingBagCollection(tables, name="one")
    held.close()
    shoal.EmbeddingBagCollection(tables, name="one")


def test_a_forked_child_leaves_the_files_alone(tmp_path):
    program = f"""
import os, sys, torch, shoal
tiers = [shoal.Dram("1MiB"), shoal.Ssd({str(tmp_path)!r}, "16MiB")]
bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4, tiers=tiers)])
bags.table("t").assign(torch.arange(30000), torch.randn(30000, 4))
wanted = bags.table("t").lookup(torch.arange(30000))
child = os.fork()
if not child:
    del bags
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(bags.table("t").lookup(torch.arange(30000)), wanted)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=500)
