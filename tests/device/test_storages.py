"""Tables on a device above a storage that kernels do not reach: to the bit what they are with device memory enough."""

import copy
import errno
import threading
import time

import pytest
import torch
from batches import kjt, random_kjt
from device_pairs import EXTREME, Pair, adam, assert_copies_sound, do_anything, same, slow, small_slabs, with_tiers  # noqa: F401 (a fixture)
from device_tables import DEVICE, backward, here, in_hbm, outputs, placed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import shoal
from shoal import Dram, Feature, Hbm, Ssd, Table, _native
from shoal.errors import CapacityError, StorageError
from shoal.storage import MemoryStorage
from shoal.storage.hbm import UNSAVED_FLAG

FORMS = {
    "hbm": lambda size, below: [Hbm(size), below],
    "dram": lambda size, below: [Hbm("1KiB"), Dram(size), below],
}
ON_ALL_FORMS = pytest.mark.parametrize("form", FORMS)
ON_ONE_FORM = pytest.mark.parametrize("form", [pytest.param("hbm", marks=pytest.mark.slow), "dram"])
pytestmark = pytest.mark.usefixtures("small_slabs")


def assert_sound(bags):
    """Rows are in memory, in the storage or in both; where they do not differ, they are equal."""
    assert_copies_sound(bags)
    for number, table in enumerate(bags._group.tables):
        if table.below is None:
            continue
        rows, storage = bags._group._rows, table.below.below.storage
        keys, _slots = rows.index.entries(number)
        assert len(keys) + table._rows.held_slots(number) <= rows.capacity(number)
        everywhere = set(keys.tolist()) | set(storage.keys().tolist())
        assert len(table) == len(everywhere)
        assert table.below.away == len(everywhere) - len(keys)
        here_now = rows.find_rows(number, keys)
        family = rows.families[number]
        saved = (rows.storage.read_flags(family, here_now) & UNSAVED_FLAG) == 0
        packed, found = storage.read(keys[saved].cpu())
        assert found.all()
        assert torch.equal(rows.storage.pack(family, here_now[saved]).cpu(), packed)


class Below(Pair):
    """A collection whose tables are above a storage, and its equal with all of it in device memory."""

    def __init__(self, form, *tables, size="4KiB", below=MemoryStorage, kind=shoal.EmbeddingBagCollection, alone=()):
        deep = [
            in_hbm(table) if table.name in alone else with_tiers(table, FORMS[form](size, below)) for table in tables
        ]
        whole = [in_hbm(table) for table in tables]
        super().__init__(*(kind(tables, device=DEVICE, seed=7) for tables in (deep, whole)), assert_sound)


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        slow("hbm", shoal.SGD(lr=0.1)),
        slow("dram", shoal.RowwiseAdagrad(lr=0.1, max_norm=0.1)),
        ("hbm", shoal.PartialRowwiseAdam(lr=0.1)),
        ("dram", shoal.Assign()),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_it_trains_as_with_endless_device_memory(form, optimizer):
    table = Table("a", 4, features=["a", "b"], optimizer=optimizer, init=shoal.Normal(0, 1))
    pair = Below(form, table, size="3KiB")
    for step in range(6):
        pair.step(random_kjt(["a", "b"], bags=6, keys=150, seed=step), seed=step)
    pair.check()
    reached = pair.stats(-2)
    assert reached.promotions > 0 and reached.demotions > 0
    assert reached.bytes <= reached.budget_bytes


@pytest.mark.parametrize(
    ("form", "dim", "dtype"),
    [("hbm", 1, "float32"), ("dram", 3, "bfloat16"), slow("hbm", 33, "float16"), slow("dram", 130, "float32")],
)
def test_rows_of_any_width_and_type_leave_and_come_back(form, dim, dtype):
    table = adam(dim=dim, dtype=dtype, init=shoal.Normal(0, 1))
    pair = Below(form, table, size=1024 + 40 * table.row_bytes)
    for step in range(5):
        pair.step(random_kjt(["a"], bags=6, keys=100, seed=step), seed=step)
    pair.check()
    assert pair.stats(-2).promotions > 0


def test_a_disk_below_and_what_it_says_of_itself(tmp_path):
    pair = Below("dram", adam(), below=Ssd(tmp_path, "16MiB"))
    for step in range(6):
        pair.step(random_kjt(["a"], bags=8, keys=200, seed=step), seed=step)
    pair.check()
    hbm, dram, ssd = pair.tiers.table("a").stats().tiers
    assert (hbm.name, dram.name, ssd.name) == ("Hbm", "Dram", "Ssd")
    assert hbm.rows <= dram.rows <= dram.capacity < ssd.rows + dram.rows
    assert ssd.read_bytes > 0 and ssd.written_bytes > 0 and ssd.read_seconds > 0
    assert dram.hits + dram.misses == hbm.misses
    assert pair.tiers.table("a").stats().bytes == hbm.bytes + dram.bytes


@pytest.mark.parametrize(
    "tiers", [slow([MemoryStorage]), [Dram("4KiB"), MemoryStorage], slow([Dram("64KiB")])], ids=str
)
def test_a_table_may_do_without_device_memory_of_its_own(tiers):
    tables = [adam("a"), adam("b")]
    bags = shoal.EmbeddingBagCollection([with_tiers(tables[0], tiers), in_hbm(tables[1])], device=DEVICE, seed=7)
    whole = shoal.EmbeddingBagCollection([in_hbm(table) for table in tables], device=DEVICE, seed=7)
    for step in range(4):
        batch = random_kjt(["a", "b"], bags=6, keys=150, seed=step)
        outs = [module(placed(batch)) for module in (bags, whole)]
        same(*(out.values().detach() for out in outs))
        for out in outs:
            backward(out, step)
    for one, two in zip(bags.state_dict().values(), whole.state_dict().values(), strict=True):
        same(one, two)


@pytest.mark.slow
@ON_ONE_FORM
def test_pooling_modes_and_tables_beside_each_other(form):
    read, write = Feature("r", mode="read"), Feature("w", mode="write")
    pair = Below(
        form,
        Table("x", 4, features=["a", read, write], pooling="none", optimizer=shoal.Adam(lr=0.5)),
        Table("y", 3, features=[Feature("a", mode="read"), "r"], pooling="none"),
        Table("fixed", 2, features=["a"], pooling="none", optimizer=None),
        Table("alone", 4, features=["a", "w"], pooling="none", optimizer=shoal.Adagrad(lr=0.1)),
        kind=shoal.EmbeddingCollection,
        alone=["alone"],
        size="3KiB",
    )
    for name, dim in (("y", 3), ("fixed", 2)):
        rows = torch.randn(90, dim, device=DEVICE)
        pair.each(lambda module, name=name, rows=rows: module.table(name).assign(range(90), rows))
    for step in range(3):
        pair.step(random_kjt(["a", "r", "w"], bags=5, keys=100, seed=step), seed=step)
    pair.evaluate(random_kjt(["a", "r", "w"], bags=5, keys=120, seed=9))
    pair.check()


@pytest.mark.slow
@ON_ONE_FORM
def test_extreme_repeated_and_no_keys(form):
    pair = Below(form, adam(), size="3KiB")
    pair.step(kjt({"a": [[], []]}))
    for first in range(0, 120, 20):
        pair.step(kjt({"a": [EXTREME * 3, [5] * 40, list(range(first, first + 20))]}))
        pair.step(kjt({"a": [list(range(first, first + 20))]}))
    pair.check()


# ---- what must stay


@ON_ONE_FORM
def test_forwards_before_their_backwards_keep_their_rows(form):
    pair = Below(form, adam(), size="6KiB")
    waiting = []
    for seed in range(6):
        waiting.append((pair.forward(random_kjt(["a"], bags=4, keys=90, seed=seed))[0], seed))
        if len(waiting) == 3:
            pair.backward(*waiting.pop(1))
    while waiting:
        pair.backward(*waiting.pop())
    pair.check()


@ON_ALL_FORMS
def test_memory_too_small_for_what_is_at_work_is_an_error_and_changes_nothing(form):
    pair = Below(form, adam(), size="3KiB")
    many = pair.stats(-2).capacity
    pair.step(kjt({"a": [list(range(many))]}))
    with pytest.raises(CapacityError, match=r"this batch brings \d+ that are not there. Raise \w+\(\.\.\.\)"):
        pair.tiers(placed(kjt({"a": [list(range(1000, 1000 + 2 * many))]})))
    pair.check()
    first, _ = pair.forward(kjt({"a": [list(range(many - 4))]}))
    with pytest.raises(CapacityError, match="run backwards before further forwards"):
        pair.tiers(placed(kjt({"a": [list(range(500, 520))]})))
    pair.backward(first)
    pair.step(kjt({"a": [list(range(500, 520))]}))
    pair.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_is_used_in_place_stays_where_it_is_whoever_else_needs_it(ahead):
    pair = Below("dram", adam(), size="16KiB")
    many = pair.tiers._group._rows.above.most[0]
    pair.step(kjt({"a": [[1000]]}))
    for first in (2000, 3000):
        pair.step(kjt({"a": [list(range(first, first + many))]}))
    full, _ = pair.forward(kjt({"a": [list(range(many))]}))
    used, _ = pair.forward(kjt({"a": [[1000]]}))  # there is no room above
    pair.backward(full, 1)
    if ahead:
        staging = pair.tiers.stage(placed(kjt({"a": [[1000]]})))
        staging.read()
        staging.place(lambda: False)
        staging.release()
    again, _ = pair.forward(kjt({"a": [[1000]]}))
    pair.backward(used, 2)
    pair.backward(again, 3)
    pair.check()


@pytest.mark.slow
def test_forwards_without_a_backward():
    pair = Below("dram", adam(), size="3KiB")
    for step in range(5):
        outs, _ = pair.forward(random_kjt(["a"], bags=6, keys=90, seed=step))
        if step % 3 == 0:
            pair.backward(outs)
        del outs
        with torch.no_grad():
            pair.forward(random_kjt(["a"], bags=6, keys=90, seed=step + 10))
    pair.check()


def test_a_clean_row_is_not_written_again():
    table = Table("a", 4, features=["t", Feature("r", mode="read")], optimizer=shoal.Adam(lr=0.1))
    pair = Below("hbm", table, size="3KiB")
    for first in range(0, 90, 30):
        pair.step(kjt({"t": [list(range(first, first + 30))], "r": [[]]}))
    for first in (0, 30, 60, 0, 30, 60):
        if first == 0:
            before = pair.stats(0)
        pair.step(kjt({"t": [[]], "r": [list(range(first, first + 30))]}))
    after = pair.stats(0)
    assert after.promotions > before.promotions
    assert after.demotions == before.demotions
    pair.check()


def test_what_was_used_last_stays():
    pair = Below("hbm", adam(), size="3KiB")
    hot = list(range(10))
    for step in range(8):
        pair.step(kjt({"a": [hot, [1000 + 8 * step + n for n in range(8)]]}))
    before = pair.stats(0)
    pair.step(kjt({"a": [hot]}))
    assert pair.stats(0).misses == before.misses
    pair.check()


# ---- handles


@ON_ONE_FORM
def test_a_handle_sees_one_table(form):
    pair = Below(form, adam(), size="3KiB")
    for step in range(4):
        pair.step(random_kjt(["a"], bags=8, keys=120, seed=step), seed=step)
    asked = [*range(0, 130, 3), *EXTREME, 3, 3]
    for ask in ("lookup", "scores", "contains"):
        same(*pair.each(lambda module, ask=ask: getattr(module.table("a"), ask)(asked).float()))
    ours, wanted = pair.each(lambda module: module.table("a").state(asked))
    for name, value in wanted.items():
        same(ours[name], value, name)
    assert torch.equal(*pair.each(lambda module: module.table("a").keys()))
    assert len(pair.tiers.table("a")) == len(pair.whole.table("a"))


@ON_ALL_FORMS
def test_assign_erase_and_training_between_each_other(form):
    pair = Below(form, adam(), size="6KiB")
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        outs, _ = pair.forward(random_kjt(["a"], bags=6, keys=120, seed=step))
        keys = torch.randint(0, 140, (20,), generator=generator).to(DEVICE)
        rows = torch.randn(20, 4, generator=generator).to(DEVICE)
        pair.each(lambda module, keys=keys, rows=rows: module.table("a").assign(keys, rows))
        gone = torch.randint(0, 140, (15,), generator=generator).to(DEVICE)
        assert len(set(pair.each(lambda module, gone=gone: module.table("a").erase(gone)))) == 1
        again, _ = pair.forward(random_kjt(["a"], bags=6, keys=120, seed=step + 20))
        pair.backward(outs, step)
        pair.backward(again, step)
        del outs, again
        pair.each(lambda module, gone=gone: module.table("a").erase(gone[:5]))
        assert_sound(pair.tiers)
    pair.step(random_kjt(["a"]))
    pair.check()


@ON_ONE_FORM
def test_many_more_rows_than_memory_holds_are_assigned_loaded_and_copied(form):
    pair, other = (Below(form, adam(), size="3KiB") for _ in range(2))
    rows = torch.randn(300, 4, device=DEVICE)
    pair.each(lambda module: module.table("a").assign(range(300), rows))
    pair.step(kjt({"a": [list(range(0, 300, 17))]}))
    pair.check()
    other.tiers.load_state_dict(pair.whole.state_dict())
    other.whole.load_state_dict(pair.tiers.state_dict())
    for step in range(2):
        other.step(random_kjt(["a"], bags=4, keys=300, seed=step), seed=step)
    assert_sound(other.tiers)
    for one, two in zip(other.tiers.state_dict().values(), other.whole.state_dict().values(), strict=True):
        same(one, two)
    copied = copy.deepcopy(pair.tiers)
    for one, two in zip(copied.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


# ---- faults


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


def test_rows_whose_writing_fails_in_another_thread_are_not_lost():
    pair = Below("hbm", adam(), size="3KiB", below=Failing)
    many = pair.stats(0).capacity
    for first in range(0, 4 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    storage = pair.tiers._group.tables[0].below.below.storage
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


def test_an_erase_that_fails_half_way_leaves_what_is_in_memory():
    table = Table("a", 4, features=["a", Feature("r", mode="read")], optimizer=shoal.Adam(lr=0.1))
    pair = Below("dram", table, size="3KiB", below=Failing)
    many = pair.stats(1).capacity
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))], "r": [[]]}))
    pair.step(kjt({"a": [[many]], "r": [[0, 1]]}))  # clean copies above
    storage = pair.tiers._group.tables[0].below.below.storage
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
    rows = pair.tiers._group._rows
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
    pair.tiers._group.tables[0].below._hand = 12
    waiting, _ = pair.forward(kjt({"a": [[1, 2]]}))
    with pytest.raises(CapacityError, match="others at work"):
        pair.tiers(placed(kjt({"a": [list(range(1000, 1000 + many - 1))]})))
    assert_sound(pair.tiers)
    pair.backward(waiting)
    with pytest.raises(CapacityError, match="this batch brings"):
        pair.tiers(placed(kjt({"a": [list(range(1000, 1000 + many + 1))]})))
    assert_sound(pair.tiers)


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


def test_rows_that_the_disk_has_no_place_for_are_not_born(tmp_path):
    bags = shoal.EmbeddingBagCollection(
        [with_tiers(adam(dim=64), [Hbm("64KiB"), Ssd(tmp_path, "4MiB")])], device=DEVICE
    )
    most = bags.table("a").stats().tiers[-1].capacity
    with pytest.raises(CapacityError, match=r"Raise Ssd\(size=\)"):
        bags.table("a").assign(range(most + 1), torch.zeros(most + 1, 64, device=DEVICE))
    assert len(bags.table("a")) == 0


# ---- ahead


def run(module, loader, seeds):
    outs = []
    for seed, batch in zip(seeds, loader, strict=True):
        out = module(batch)
        outs.append([tensor.detach() for tensor in outputs(out)])
        backward(out, seed)
    return outs


@pytest.mark.parametrize("tiers", [slow("hbm"), "dram", "two"])
def test_prefetch_changes_nothing(tiers):
    """One after the other: Triton's interpreter runs one kernel at a time."""
    batches = [random_kjt(["a"], bags=6, keys=120, seed=seed) for seed in range(8)]
    table = adam()
    forms = {**FORMS, "two": lambda size, _below: [Hbm("2KiB"), Dram(size)]}
    plain = shoal.EmbeddingBagCollection([in_hbm(table)], device=DEVICE, seed=7)
    made = with_tiers(table, forms[tiers]("12KiB", MemoryStorage))
    ahead = shoal.EmbeddingBagCollection([made], device=DEVICE, seed=7)
    wanted = run(plain, map(placed, batches), range(8))
    ready = threading.Event()

    def slowly():
        for batch in shoal.prefetch([placed(batch) for batch in batches], ahead):
            deadline = time.monotonic() + 5
            while tiers != "two" and not _is_staged(ahead, batch) and time.monotonic() < deadline and ready.is_set():
                time.sleep(0.01)
            ready.set()  # the first lookup makes the plan
            yield batch

    got = run(ahead, slowly(), range(8))
    for ours, theirs in zip(got, wanted, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            same(one, two)
    assert not ahead._group.staged
    ahead.check()
    for one, two in zip(ahead.state_dict().values(), plain.state_dict().values(), strict=True):
        same(one, two)
    ours, theirs = (module.table("a").stats().counters for module in (ahead, plain))
    assert ours == theirs


def _is_staged(bags, batch):
    return any(staging.values is batch.values() for staging in bags._group.staged.values())


def test_nothing_is_staged_where_few_rows_come_up(monkeypatch):
    monkeypatch.setattr("shoal.table.device_tiers._BATCHES_BETWEEN", 2)
    bags = shoal.EmbeddingBagCollection([with_tiers(adam(), [Hbm("3KiB"), Dram("64KiB")])], device=DEVICE)
    many = bags._group._rows.above.most[0]

    def is_staged(keys):
        batch = placed(kjt({"a": [keys]}))
        if (staging := bags.stage(batch)) is not None:
            staging.release()
        backward(bags(batch))
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        return staging is not None

    assert not is_staged(list(range(3 * many)))  # there is no plan yet
    spilling = [is_staged(list(range(first, first + many))) for first in (0, many, 2 * many) * 3]
    assert all(spilling[-3:])
    fitting = [is_staged(list(range(many // 2))) for _ in range(9)]
    assert not any(fitting[-3:])
    spilling = [is_staged(list(range(first, first + many))) for first in (0, many, 2 * many) * 3]
    assert all(spilling[-3:])


def test_rows_that_came_ahead_need_no_storage_any_more():
    batches = [kjt({"a": [list(range(first, first + 20))]}) for first in (0, 20, 40, 0, 20, 40)]
    bags = shoal.EmbeddingBagCollection([with_tiers(adam(), [Hbm("3KiB"), MemoryStorage])], device=DEVICE, seed=7)
    run(bags, map(placed, batches[:3]), range(3))
    bags.eval()
    for batch in batches[3:]:
        here_now = placed(batch)
        staging = bags.stage(here_now)
        staging.read()
        staging.place(lambda: False)
        below = bags._group.tables[0].below
        before = below.fetched, below.below.stats().hits
        with torch.no_grad():
            bags(here_now)
        assert (below.fetched, below.below.stats().hits) == before
        staging.release()
    assert_sound(bags)


@pytest.mark.parametrize("what", [slow("erase"), slow("assign"), "load", "leave", "overwrite"])
@ON_ONE_FORM
def test_what_happens_between_staging_and_lookup(form, what):
    pair = Below(form, adam(), size="6KiB")
    for first in range(0, 160, 20):
        pair.step(kjt({"a": [list(range(first, first + 20))]}))
    batch = kjt({"a": [list(range(0, 24, 2)), [900, 901]]})
    staged_batch = placed(batch)
    staging = pair.tiers.stage(staged_batch)
    staging.read()
    if what == "leave":  # others bring it, change it, and it leaves again, behind what was read
        pair.step(kjt({"a": [list(range(0, 24, 2)), [900]]}))
        for first in range(200, 340, 20):
            pair.step(kjt({"a": [list(range(first, first + 20))]}))
    elif what == "erase":
        pair.each(lambda module: module.table("a").erase([0, 2, 4, 901]))
    staging.place(lambda: False)
    if what == "erase":
        pair.each(lambda module: module.table("a").erase([6, 8]))
    elif what == "assign":
        pair.each(lambda module: module.table("a").assign([0, 900], torch.ones(2, 4, device=DEVICE)))
    elif what == "load":
        state = pair.whole.state_dict()
        pair.each(lambda module: module.load_state_dict(state))
    elif what == "overwrite":
        batch.values()[0] = staged_batch.values()[0] = 77
    outs = [pair.tiers(staged_batch), pair.whole(placed(batch))]
    same(*(out.values().detach() for out in outs))
    pair.backward(outs, 3)
    staging.release()
    assert_sound(pair.tiers)
    for one, two in zip(pair.tiers.state_dict().values(), pair.whole.state_dict().values(), strict=True):
        same(one, two)


# ---- anything


@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_anything_in_any_order(data):
    form = data.draw(st.sampled_from(sorted(FORMS)))
    pair = Below(form, adam("a", 3), adam("b", 2, features=["a", "b"]), size=data.draw(st.sampled_from([6144, 8192])))
    pool = [*range(120), *EXTREME]
    do_anything(data, pair, pool, st.integers(3, 7), most_waiting=1)
    pair.step(kjt({"a": [pool[:30]], "b": [pool[90:]]}))
    pair.check()
