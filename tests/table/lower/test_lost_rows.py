"""Disks that fail and files that are damaged: lost rows are named, and can be erased."""

import os
import threading

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import table_of
from support.tiered import SMALL, assert_equal_outputs, backward, collection, pair, skewed_kjt, train

import shoal
from shoal import _native
from shoal.errors import StorageError


@pytest.fixture
def faults():
    yield _native.inject_fault
    _native.clear_faults()


@pytest.mark.parametrize(("call", "error", "says"), [
    (_native.FileCall.write, 28, "No space left"),
    (_native.FileCall.write, 5, "Input/output"),
    (_native.FileCall.read, 5, "Input/output"),
    (_native.FileCall.open, 13, "Permission denied"),
])  # fmt: skip
def test_training_goes_on_once_a_disk_works_again(call, error, says, faults, tmp_path):
    plain = collection([{"name": "t", "dim": 8}])
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), shoal.Ssd(tmp_path, "512KiB")])  # files are short
    train([plain, bags], torch.Generator().manual_seed(0), 10)
    generator = torch.Generator().manual_seed(1)
    failed = 0
    for step in range(30):
        batch = skewed_kjt(("t",), generator)
        faults(call, "", error, 0, 1)
        try:
            out = bags(batch)
        except StorageError as raised:
            assert says in str(raised) and str(tmp_path) in str(raised)
            failed += 1
            _native.clear_faults()
            out = bags(batch)
        _native.clear_faults()
        wanted = plain(batch)
        assert_equal_outputs([wanted, out], step)
        backward(wanted, step)
        backward(out, step)
    assert failed
    assert_same_rows(plain, bags)


def test_a_damaged_block_costs_its_own_rows_only(tmp_path):
    plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    rows = torch.randn(2000, 8)
    for module in (plain, bags):
        module.table("t").assign(torch.arange(2000), rows)
    segment = largest(tmp_path)
    flip(segment)
    table, lost = bags.table("t"), []
    for key in range(2000):
        try:
            assert torch.equal(table.lookup([key])[0], rows[key])
        except StorageError as error:
            assert segment.name in str(error) and "block at 4096" in str(error)
            lost.append(key)
    assert 1 <= len(lost) <= 100
    with pytest.raises(StorageError, match="checksum"):
        bags(kjt({"t": [lost]}))
    assert table.erase(lost) == len(lost) == plain.table("t").erase(lost)
    for module in (plain, bags):
        backward(module(kjt({"t": [lost]})), 0)
    assert_same_rows(plain, bags)


def flip(segment, at=5000):
    with segment.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def largest(folder):
    return max(folder.rglob("*.seg"), key=lambda path: path.stat().st_size)


def cut(segment):
    os.truncate(segment, 0)


def fail_reads(segment):
    _native.inject_fault(_native.FileCall.read, f"/{segment.name}", 5, 0, 1 << 40)


DAMAGES = pytest.mark.parametrize("damage", [cut, flip, fail_reads], ids=["cut", "flipped", "EIO"])


@DAMAGES
def test_a_lookup_names_all_that_it_cannot_read_and_goes_on_without_them(damage, faults, tmp_path):
    plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    rows = torch.randn(3000, 8)
    for module in (plain, bags):
        module.table("t").assign(torch.arange(3000), rows)
    damage(largest(tmp_path))
    generator = torch.Generator().manual_seed(0)
    failed = 0
    for step in range(40):
        batch = skewed_kjt(("t",), generator, keys=3000)
        before = bags.stats()["t"].counters
        try:
            out = bags(batch)
        except StorageError as error:
            failed += 1
            assert error.table == "t" and torch.equal(error.keys, torch.unique(error.keys))
            assert torch.isin(error.keys, batch.values()).all()
            assert bags.stats()["t"].counters == before
            for module in (plain, bags):
                assert module.table("t").erase(error.keys) == len(error.keys)
            out = bags(batch)  # nothing else is wrong with it
        wanted = plain(batch)
        assert_equal_outputs([wanted, out], step)
        backward(wanted, step)
        backward(out, step)
    assert failed
    for module in (plain, bags):
        module.table("t").erase(bags.table("t").unreadable())
    assert_same_rows(plain, bags)


@DAMAGES
def test_a_table_is_whole_again_once_what_is_unreadable_is_erased(damage, faults, tmp_path):
    plain, bags = pair("ssd", tmp_path / "rows", [{"name": "t", "dim": 8}])
    train([plain, bags], torch.Generator().manual_seed(0), 100)
    table = bags.table("t")
    assert table.unreadable().tolist() == []
    before = bags.stats()["t"]
    damage(largest(tmp_path))
    keys = table.keys()
    held = keys[table_of(bags).find(keys) >= 0]
    lost = table.unreadable()
    assert lost.dtype == torch.int64 and 0 < len(lost) < len(keys) and torch.equal(lost, torch.unique(lost))
    assert not torch.isin(lost, held).any()  # of what memory has, nothing is lost
    after = bags.stats()["t"]
    assert (after.rows, after.counters) == (before.rows, before.counters)
    assert (after.tiers[1].hits, after.tiers[1].misses) == (before.tiers[1].hits, before.tiers[1].misses)
    with pytest.raises(StorageError) as raised:
        bags.state_dict()
    assert torch.equal(raised.value.keys, lost)
    with pytest.raises(StorageError):
        shoal.save(tmp_path / "saved", bags)
    for module in (plain, bags):
        assert module.table("t").erase(lost) == len(lost)
    assert table.unreadable().tolist() == []
    assert_same_rows(plain, bags)
    shoal.save(tmp_path / "saved", bags)
    _native.clear_faults()  # or what is written next would not be read either
    # Rows whose copy below is damaged leave memory, too, and come back.
    train([plain, bags], torch.Generator().manual_seed(1), 60, first=100)
    assert table.unreadable().tolist() == []
    assert_same_rows(plain, bags)


def test_rows_in_memory_whose_copy_is_known_to_be_damaged_are_written_anew(tmp_path):
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), shoal.Ssd(tmp_path, "16MiB")])
    table = bags.table("t")
    rows = torch.randn(3000, 8)
    table.assign(torch.arange(3000), rows)
    with torch.no_grad():
        bags.eval()(kjt({"t": [range(50)]}))  # come up, and are as below
    for segment in tmp_path.rglob("*.seg"):
        cut(segment)
    lost = table.unreadable()
    assert len(lost) and not torch.isin(torch.arange(50), lost).any()
    assert table.erase(lost) == len(lost)
    new = torch.arange(10_000, 12_000)
    table.assign(new, torch.zeros(len(new), 8))  # the others leave
    assert (table_of(bags).find(torch.arange(50)) < 0).any()
    assert torch.equal(table.lookup(range(50)), rows[:50])


def test_of_several_tables_each_has_its_own_error_and_is_whole_again(tmp_path):
    names = ("x", "y", "z")
    plain, bags = pair("ssd", tmp_path, [{"name": name, "dim": 4} for name in names])
    train([plain, bags], torch.Generator().manual_seed(0), 60, names)
    for name in ("y", "z"):
        cut(largest(next(tmp_path.rglob(f"{name}/"))))
    batch = kjt({name: [plain.table(name).keys().tolist()[::5]] for name in names})
    seen = []
    while True:
        try:
            out = bags(batch)
            break
        except StorageError as error:
            seen.append(error.table)
            for module in (plain, bags):
                module.table(error.table).erase(error.keys)
    assert sorted(seen) == ["y", "z"]
    wanted = plain(batch)
    assert_equal_outputs([wanted, out])
    backward(wanted, 0)
    backward(out, 0)
    assert bags.table("x").unreadable().tolist() == []
    for name in names:
        lost = bags.table(name).unreadable()
        for module in (plain, bags):
            assert module.table(name).erase(lost) == len(lost)
    train([plain, bags], torch.Generator().manual_seed(1), 20, names, first=60)
    assert_same_rows(plain, bags)


def test_nothing_is_unreadable_while_rows_come_leave_and_are_erased(tmp_path):
    plain = collection([{"name": "t", "dim": 8}])
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), shoal.Ssd(tmp_path, "512KiB")])  # files are short
    looks, ends = [], threading.Event()

    def look():
        while not ends.is_set():
            looks.append(bags.table("t").unreadable().tolist())

    looker = threading.Thread(target=look)
    looker.start()
    try:
        generator = torch.Generator().manual_seed(0)
        for step in range(60):
            train([plain, bags], generator, 1, first=step)
            if step % 10 == 9:
                for module in (plain, bags):
                    module.table("t").erase(range(step, 2000, 7))
    finally:
        ends.set()
        looker.join()
    assert looks and not any(looks)
    assert_same_rows(plain, bags)
