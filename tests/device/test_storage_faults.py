"""Storages below a device that fail, and memory that ends: no row is wrong or lost, and training goes on."""

import errno
import os
import threading

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_pairs import adam, same, small_slabs, with_tiers  # noqa: F401 (a fixture)
from support.device_storages import ON_ONE_FORM, Below, assert_sound
from support.device_tables import DEVICE, here, placed
from support.inside import device_rows_of, table_of
from support.leaving import Leaving

import shoal
from shoal import Feature, Hbm, Ssd, Table, _native
from shoal.errors import CapacityError, StorageError
from shoal.storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("small_slabs")


@pytest.fixture
def faults():
    yield _native.inject_fault
    _native.clear_faults()


@pytest.mark.parametrize(
    ("call", "error"), [(_native.FileCall.write, errno.ENOSPC), (_native.FileCall.read, errno.EIO)], ids=str
)
@ON_ONE_FORM
def test_training_goes_on_once_a_disk_works_again(form, call, error, faults, tmp_path):
    pair = Below(form, adam(), size="3KiB", below=Ssd(tmp_path, "16MiB"))
    failed = 0
    for step in range(6):
        batch = random_kjt(["a"], bags=8, keys=150, seed=step)
        if step >= 2:
            faults(call, "", error, 0, 1)
            try:
                pair.tiers(placed(batch))
            except StorageError as raised:
                assert str(tmp_path) in str(raised)
                failed += 1
            else:
                pair.whole(placed(batch))  # what is used is scored
            _native.clear_faults()
            assert_sound(pair.tiers)
        pair.step(batch, step)
    assert failed
    for one, two in zip(pair.tiers.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


@ON_ONE_FORM
def test_a_table_is_whole_again_once_what_is_unreadable_is_erased(form, tmp_path):
    pair = Below(form, adam(), size="3KiB", below=Ssd(tmp_path, "16MiB"))
    for step in range(5):
        pair.step(random_kjt(["a"], bags=8, keys=200, seed=step), step)
    name = next(iter(pair.tiers.tables()))
    tables = [bags.table(name) for bags in (pair.tiers, pair.whole)]
    assert tables[0].unreadable().tolist() == []
    for segment in tmp_path.rglob("*.seg"):
        os.truncate(segment, 0)
    below = table_of(pair.tiers).below
    absent = tables[0].keys()[below.is_absent(tables[0].keys().cpu()).to(DEVICE)]
    assert len(absent)
    with pytest.raises(StorageError, match="The file was cut") as raised:
        tables[0].lookup(absent[:7])
    assert raised.value.table == name and torch.equal(raised.value.keys, absent[:7])
    assert [table.erase(raised.value.keys) for table in tables] == [7, 7]
    lost = tables[0].unreadable()
    assert torch.equal(lost, absent[7:])  # what memory has is not lost, though its copy is
    assert [table.erase(lost) for table in tables] == [len(lost)] * 2
    assert_sound(pair.tiers)  # what differs from below, or is damaged there, will be written
    for step in range(5, 9):
        pair.step(random_kjt(["a"], bags=8, keys=200, seed=step), step)
    assert tables[0].unreadable().tolist() == []
    for one, two in zip(pair.tiers.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


class Failing(MemoryStorage):
    """Fails when it is told to."""

    def __init__(self, row_bytes):
        super().__init__(row_bytes)
        self.at_write = self.at_erase = None

    def write(self, keys, rows):
        if self.at_write is not None:
            self.at_write()
        super().write(keys, rows)

    def erase(self, keys):
        erased = super().erase(keys)
        if self.at_erase is not None:
            self.at_erase()
        return erased


def refuse():
    raise OSError(errno.EIO, "told to fail")


@pytest.mark.slow
def test_rows_whose_writing_fails_in_another_thread_are_not_lost():
    pair = Below("hbm", adam(), size="3KiB", below=Failing)
    many = pair.stats(0).capacity
    for first in range(0, 4 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    storage = table_of(pair.tiers).below.lower.storage
    staging = pair.tiers.stage(placed(kjt({"a": [list(range(5))]})))
    staging.read()
    writes, may_fail, errors = threading.Event(), threading.Event(), []

    def wait_and_fail():
        writes.set()
        may_fail.wait(60)
        refuse()

    def place():
        try:
            staging.place(lambda: False)
        except OSError as error:
            errors.append(error)
        staging.release()

    storage.at_write = wait_and_fail
    thread = threading.Thread(target=place)
    thread.start()
    assert writes.wait(60)
    storage.at_write = None
    batch = kjt({"a": [list(range(4 * many - 6, 4 * many))]})  # these are in memory, and others must not leave for them
    out = pair.tiers(placed(batch))
    may_fail.set()
    thread.join()
    assert errors
    wanted = pair.whole(placed(batch))
    same(out.values().detach(), wanted.values().detach())
    pair.backward([out, wanted])
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    assert_sound(pair.tiers)
    for one, two in zip(pair.tiers.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


@pytest.mark.slow
def test_an_erase_that_fails_half_way_leaves_what_is_in_memory():
    table = Table("a", 4, features=["a", Feature("r", mode="read")], optimizer=shoal.Adam(lr=0.1))
    pair = Below("dram", table, size="3KiB", below=Failing)
    many = pair.stats(1).capacity
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))], "r": [[]]}))
    pair.step(kjt({"a": [[many]], "r": [[0, 1]]}))  # clean copies above
    storage = table_of(pair.tiers).below.lower.storage
    storage.at_erase = refuse
    with pytest.raises(OSError, match="told to fail"):
        pair.tiers.table("a").erase(here(0, 1))
    storage.at_erase = None
    for first in range(500, 500 + 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))], "r": [[]]}))
    pair.check()


@pytest.mark.parametrize("what", ["unpack", "give"])
def test_memory_that_ends_while_rows_come_or_leave(what, monkeypatch):
    pair = Below("hbm", adam(), size="3KiB")
    many = pair.stats(0).capacity
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    rows = device_rows_of(pair.tiers)
    owner = rows.storage if what == "unpack" else rows
    original, refused = getattr(owner, what), []

    def once(*arguments):
        if not refused:
            refused.append(True)
            raise torch.OutOfMemoryError("told to fail")
        return original(*arguments)

    monkeypatch.setattr(owner, what, once)
    batch = kjt({"a": [list(range(5))]})
    with pytest.raises(shoal.errors.OutOfMemoryError):
        pair.tiers(placed(batch))
    assert_sound(pair.tiers)
    pair.step(batch)
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    assert refused
    pair.check()


def test_a_table_that_was_large_once_chooses_no_row_twice():
    pair = Below("hbm", adam(), size="8KiB")
    pair.step(kjt({"a": [[1, 2, 3, 4]]}))
    small = {name: value.clone() for name, value in pair.whole.state_dict().items()}
    many = pair.stats(0).capacity
    for first in range(100, 100 + 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    pair.each(lambda module: module.load_state_dict(small))
    table_of(pair.tiers).below._hand = 12
    waiting, _ = pair.forward(kjt({"a": [[1, 2]]}))
    with pytest.raises(CapacityError, match="others at work"):
        pair.tiers(placed(kjt({"a": [list(range(1000, 1000 + many - 1))]})))
    assert_sound(pair.tiers)
    pair.backward(waiting)
    with pytest.raises(CapacityError, match="this batch brings"):
        pair.tiers(placed(kjt({"a": [list(range(1000, 1000 + many + 1))]})))
    assert_sound(pair.tiers)


@pytest.mark.slow
def test_a_load_that_fails_leaves_an_empty_table_and_says_so(faults, tmp_path):
    pair = Below("hbm", adam(), size="3KiB", below=Ssd(tmp_path, "16MiB"))
    pair.each(lambda module: module.table("a").assign(range(200), torch.randn(200, 4, device=DEVICE)))
    state = pair.whole.state_dict()
    faults(_native.FileCall.write, "", errno.ENOSPC, 0, 100)
    with pytest.raises(StorageError) as caught:
        pair.tiers.load_state_dict(state)
    assert any("is empty now" in note for note in caught.value.__notes__)
    assert len(pair.tiers.table("a")) == 0
    _native.clear_faults()
    pair.tiers.load_state_dict(state)
    pair.step(kjt({"a": [list(range(0, 200, 9))]}))
    for one, two in zip(pair.tiers.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


def test_a_load_that_fails_leaves_tables_that_it_did_not_reach():
    tables = [with_tiers(Table(name, 4, optimizer=shoal.SGD(lr=0.1)), [Hbm("1KiB"), Failing]) for name in ("a", "b")]
    bags = shoal.EmbeddingBagCollection(tables, device=DEVICE)
    for table in bags.tables().values():
        table.assign(range(30), torch.ones(30, 4, device=DEVICE))
    state = bags.state_dict()
    bags.table("b").erase([7])
    for fails, says, rows in ((0, "'b' stayed as before.", [0, 29]), (1, "'a' did load.", [30, 0])):
        storage = table_of(bags, fails).below.lower.storage
        storage.at_write = refuse
        with pytest.raises(OSError, match="told to fail") as caught:
            bags.load_state_dict(state)
        storage.at_write = None
        note = caught.value.__notes__[-1]
        assert "is empty now. Load it again." in note and note.endswith(says)
        assert [len(table) for table in bags.tables().values()] == rows
    bags.load_state_dict(state)
    for one, two in zip(bags.state_dict().values(), state.values(), strict=True):
        same(one, two)


def test_rows_are_counted_again_once_a_storage_is_back_that_went_in_an_erase():
    pair = Below("hbm", adam(), size="3KiB", below=Leaving)
    many = 3 * pair.stats(0).capacity
    pair.each(lambda module: module.table("a").assign(range(many), torch.ones(many, 4, device=DEVICE)))
    table, storage = pair.tiers.table("a"), table_of(pair.tiers).below.lower.storage
    storage.is_leaving = True
    with pytest.raises(ConnectionError, match="lost in the middle"):
        table.erase(range(many // 2))
    storage.is_leaving = storage.is_gone = False
    assert len(table) == len(table.keys()) < many
    assert table.stats().counters["erased"] == many - len(table)
    pair.each(lambda module: module.table("a").erase(range(many // 2)))
    pair.check()
    assert table.stats().counters["erased"] == many // 2


def test_rows_that_the_disk_has_no_place_for_are_not_born(tmp_path):
    bags = shoal.EmbeddingBagCollection(
        [with_tiers(adam(dim=64), [Hbm("64KiB"), Ssd(tmp_path, "4MiB")])], device=DEVICE
    )
    most = bags.table("a").stats().tiers[-1].capacity
    with pytest.raises(CapacityError, match=r"Raise Ssd\(size=\)"):
        bags.table("a").assign(range(most + 1), torch.zeros(most + 1, 64, device=DEVICE))
    assert len(bags.table("a")) == 0
