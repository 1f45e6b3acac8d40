"""A table with tiers below its memory is the table that it would be with memory enough."""

import copy
import gc
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import assert_same_rows, kjt, train_step
from support.inside import staged_batches_of, table_of
from support.sweeps import examples
from support.tiered import SMALL, assert_equal_outputs, below, collection, outputs, skewed_kjt

import shoal
from shoal import _native
from shoal.errors import CapacityError, ConfigError, StorageError
from shoal.storage import MemoryStorage
from shoal.table.host import residency

KINDS = ("ssd", "memory")
OPTIMIZERS = [
    shoal.SGD(lr=0.1, momentum=0.9),
    shoal.Adagrad(lr=0.1),
    shoal.RowwiseAdagrad(lr=0.1),
    shoal.Adam(lr=0.1),
    shoal.AdamW(lr=0.1),
    shoal.PartialRowwiseAdam(lr=0.1),
    shoal.Ftrl(lr=0.1),
    shoal.Assign(),
]


def pair(kind, folder, tables, memory=SMALL, **settings):
    """The same collection with and without enough memory."""
    return collection(tables, **settings), collection(tables, [shoal.Dram(memory), below(kind, folder)], **settings)


def tier(bags, number, table="t"):
    return bags.stats()[table].tiers[number]


def backward(out, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = outputs(out)
    torch.autograd.backward(tensors, [torch.randn(tensor.shape, generator=generator) for tensor in tensors])


def train(collections, generator, steps, features=("t",), first=0):
    for step in range(first, first + steps):
        batch = skewed_kjt(features, generator)
        outs = [bags(batch) for bags in collections]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_optimizer_trains_the_same_rows(optimizer, dtype, tmp_path):
    plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 7, "optimizer": optimizer, "dtype": dtype}])
    train([plain, tiered], torch.Generator().manual_seed(0), 40)
    assert tier(tiered, 0).demotions > 0 and tier(tiered, 0).promotions > 0
    assert_same_rows(plain, tiered)
    assert plain.stats()["t"].counters == tiered.stats()["t"].counters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["bags", "sequences"])
def test_poolings_modes_and_tables_of_both_kinds(kind, which, tmp_path):
    poolings = ("sum", "mean") if which == "bags" else ("none", "none")
    read, write = shoal.Feature("b", "read"), shoal.Feature("c", "write")
    tables = [
        {"name": "t", "dim": 5, "features": ["a", read], "pooling": poolings[0]},
        {"name": "u", "dim": 3, "features": ["a", write], "pooling": poolings[1], "missing": "zero"},
        {"name": "v", "dim": 4, "features": ["b"], "pooling": poolings[1], "tiers": [shoal.Dram()]},
    ]
    plain, tiered = pair(kind, tmp_path, tables, which=which)
    train([plain, tiered], torch.Generator().manual_seed(1), 60, ("a", "b", "c"))
    assert tier(tiered, 0, "t").demotions > 0 and tier(tiered, 0, "u").demotions > 0
    assert len(tiered.stats()["v"].tiers) == 1
    assert_same_rows(plain, tiered)


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS))
def test_whatever_is_done_in_any_order(seed, kind, tmp_path_factory):
    plain, tiered = both = pair(kind, tmp_path_factory.mktemp("tiers"), [{"name": "t", "dim": 6}])
    generator = torch.Generator().manual_seed(seed)

    def some_keys(n=40):
        return (torch.rand(n, generator=generator) ** 3 * 2200).long() - 3

    waiting = []
    for step in range(60):
        action = int(torch.randint(0, 9, (1,), generator=generator))
        if action <= 2:
            train(both, generator, 1, first=step)
        elif action == 3:  # forwards that wait for their backward, or never see one
            batch = skewed_kjt(("t",), generator, bags=8)
            outs = [bags(batch) for bags in both]
            assert_equal_outputs(outs, step)
            waiting.append(outs)
        elif action == 4 and waiting:
            outs = waiting.pop(int(torch.randint(0, len(waiting), (1,), generator=generator)))
            for out in outs:
                if seed % 2:
                    backward(out, step)
        elif action == 5:
            batch = skewed_kjt(("t",), generator)
            with torch.no_grad():
                outs = [bags.eval()(batch) for bags in both]
            assert_equal_outputs(outs, step)
            for bags in both:
                bags.train()
        elif action == 6:
            keys = some_keys()
            assert len({bags.table("t").erase(keys) for bags in both}) == 1
        elif action == 7:
            keys = some_keys()
            rows = torch.randn(len(keys), 6, generator=generator)
            for bags in both:
                bags.table("t").assign(keys, rows)
        else:
            keys = some_keys()
            one, two = (bags.table("t") for bags in both)
            assert len(one) == len(two) and torch.equal(one.contains(keys), two.contains(keys))
            assert torch.equal(one.lookup(keys), two.lookup(keys))
            assert torch.equal(one.scores(keys).nan_to_num(-1), two.scores(keys).nan_to_num(-1))
            assert all(
                torch.equal(a, b) for a, b in zip(one.state(keys).values(), two.state(keys).values(), strict=True)
            )
        if len(waiting) > 2:
            waiting.pop(0)
        out = outs = None  # these would keep the one collection's graph alive and not the other's
        memory = tier(tiered, 0)
        assert memory.bytes <= memory.budget_bytes
    assert torch.equal(plain.table("t").keys(), tiered.table("t").keys())
    assert_same_rows(plain, tiered)


def test_rows_that_did_not_change_are_not_written_again(tmp_path):
    _plain, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    bags.table("t").assign(torch.arange(2000), torch.randn(2000, 8))
    bags.eval()
    for first in range(0, 2000, 100):  # the last ones to be written leave
        bags(kjt({"t": [list(range(first, first + 100))]}))
    written = tier(bags, 0).demotions
    for _ in range(3):
        for first in range(0, 2000, 100):
            bags(kjt({"t": [list(range(first, first + 100))]}))
    assert tier(bags, 0).demotions == written
    assert tier(bags, 0).promotions > 5000 and tier(bags, 0).dirty == 0


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
@pytest.mark.parametrize("ahead", [False, True])
def test_demotions_are_the_rows_that_were_written_below(ahead, monkeypatch):
    written = []

    class Counting(MemoryStorage):
        def write(self, keys, rows):
            if len(written) == 30:
                written.append(0)
                raise ConnectionError("once")
            super().write(keys, rows)
            written.append(len(keys))

    monkeypatch.setattr(residency, "_WRITE_BYTES", 400)  # so that a part was written when it fails
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), Counting])
    generator = torch.Generator().manual_seed(0)
    some = [skewed_kjt(("t",), generator) for _ in range(60)]
    for batch in shoal.prefetch(some, bags) if ahead else some:
        with suppress(ConnectionError):
            bags(batch).values().sum().backward()
    assert len(written) > 31 and tier(bags, 0).demotions == sum(written)


def test_what_was_used_lately_stays(tmp_path):
    """Of keys that come in every batch none is read again, whatever else passes through memory."""
    for training in (True, False):
        bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(SMALL), below("memory", tmp_path)])
        often = list(range(50))
        bags.table("t").assign(torch.arange(4200), torch.randn(4200, 8))
        bags.train(training)
        for step in range(200):
            before = tier(bags, 1).hits
            seldom = list(range(100 + 20 * step, 120 + 20 * step))
            out = bags(kjt({"t": [often, seldom]}))
            if training:
                backward(out, step)
            if step > 100:
                assert tier(bags, 1).hits - before == 20


@pytest.mark.parametrize("dim", [1, 8, 300])
@pytest.mark.parametrize("rows", [100, 1000, 5000])
def test_the_memory_that_rows_are_said_to_need_is_enough(dim, rows):
    """Where lookups that wait for their backward hold all of it, others have no place."""
    table, little = {"name": "t", "dim": dim}, shoal.Dram(16 * rows * (dim + 20) + 4096)
    bags = collection([table], [little, MemoryStorage])
    batch = kjt({"t": [list(range(table_of(bags).room.spare(10**6)))]})
    more = torch.arange(10**6, 10**6 + rows), torch.ones(rows, dim)
    kept = bags(batch)
    with pytest.raises(CapacityError, match=r"table 't'\] its memory of .* stay until the backwards") as refused:
        bags.table("t").assign(*more)
    size = int(re.search(r"set Dram\((\d+)\) or more", str(refused.value))[1])
    backward(kept, 0)
    bags.table("t").assign(*more)
    bags = collection([table], [shoal.Dram(size), MemoryStorage])
    kept = bags(batch)
    bags.table("t").assign(*more)
    assert tier(bags, 0).bytes <= size
    backward(kept, 0)


@pytest.mark.parametrize("below", [[], [MemoryStorage]])
def test_memory_that_holds_no_row_is_refused_at_once(below):
    with pytest.raises(ConfigError, match=r"Table 't'\] tiers: wanted memory for a row .*; got Dram\(1\)"):
        collection([{"name": "t", "dim": 8}], [shoal.Dram(1), *below])


def test_the_lowest_tier_bounds_the_table(tmp_path):
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "512KiB")])
    capacity = tier(bags, 1).capacity
    bags.table("t").assign(torch.arange(capacity), torch.randn(capacity, 8))
    with pytest.raises(CapacityError, match=rf"{capacity} rows and 1 new.*Raise Ssd\(size=\)"):
        bags(kjt({"t": [[capacity]]}))
    with pytest.raises(CapacityError, match=r"Raise Ssd\(size=\)"):
        bags.table("t").assign([-1], torch.randn(1, 8))
    train_step(bags, kjt({"t": [[1, 2, 3]]}))
    bags.table("t").erase([5])
    train_step(bags, kjt({"t": [[capacity]]}))
    assert len(bags.table("t")) == capacity
    with pytest.raises(CapacityError, match="Nothing was loaded"):
        other = collection([{"name": "t", "dim": 8}])
        other.table("t").assign(torch.arange(capacity + 1), torch.randn(capacity + 1, 8))
        bags.load_state_dict(other.state_dict())
    assert len(bags.table("t")) == capacity


def test_an_ssd_alone_works_in_a_little_memory(tmp_path):
    plain, bags = collection([{"name": "t", "dim": 8}]), collection([{"name": "t", "dim": 8}], [below("ssd", tmp_path)])
    train([plain, bags], torch.Generator().manual_seed(0), 10)
    assert_same_rows(plain, bags)


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


# ---- faults


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


def test_a_storage_of_the_users_that_fails_is_not_said_to_have_lost_rows():
    bags, below = moody()
    train([bags], torch.Generator().manual_seed(0), 30)
    assert bags.table("t").unreadable().tolist() == []
    below.storage.fails = "read"
    with pytest.raises(OSError, match="EIO"):
        bags.table("t").unreadable()


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


class Remote(MemoryStorage):
    """A storage that goes away in the middle of an erase."""

    is_leaving = is_gone = False

    def read(self, keys):
        if self.is_gone:
            raise ConnectionError("gone")
        return super().read(keys)

    def keys(self):
        if self.is_gone:
            raise ConnectionError("gone")
        return super().keys()

    def erase(self, keys):
        if self.is_leaving:
            self.is_gone = True
            super().erase(keys[: len(keys) // 2])
            raise ConnectionError("lost in the middle")
        return super().erase(keys)


def test_rows_are_counted_again_once_a_storage_is_back_that_went_in_an_erase():
    bags = collection([{"name": "t", "dim": 6}], [shoal.Dram(SMALL), Remote])
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
