"""Tables on a device above a storage that kernels do not reach: to the bit what they are with device memory enough."""

import copy
import re

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.batches import kjt, random_kjt
from support.device_pairs import (  # noqa: F401 (a fixture)
    EXTREME,
    adam,
    assert_same_handles,
    assign_and_erase_between_steps,
    do_anything,
    same,
    slow,
    small_slabs,
    with_tiers,
)
from support.device_storages import FORMS, ON_ALL_FORMS, ON_ONE_FORM, Below, assert_sound
from support.device_tables import DEVICE, backward, in_hbm, placed
from support.inside import device_rows_of

import shoal
from shoal import Dram, Feature, Hbm, Ssd, Table
from shoal.errors import CapacityError, DeviceError
from shoal.storage import MemoryStorage
from shoal.table.device.streams import Streams

pytestmark = pytest.mark.usefixtures("small_slabs")


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
def test_the_memory_that_a_batch_is_said_to_need_is_enough(form):
    pair = Below(form, adam(), size="3KiB")
    many = pair.stats(-2).capacity
    # Rows of the first are in memory when the second needs them, with more rows than memory has room for.
    first, second = (kjt({"a": [list(range(end))]}) for end in (many, 3 * many))
    pair.step(first)
    with pytest.raises(CapacityError) as refused:
        pair.tiers(placed(second))
    size = int(re.search(r"Raise it to \w+\((\d+)\) or more", str(refused.value))[1])
    pair = Below(form, adam(), size=size)
    for batch in (first, second):
        pair.step(batch)
    pair.check()


@ON_ALL_FORMS
def test_memory_too_small_for_what_is_at_work_is_an_error_and_changes_nothing(form):
    pair = Below(form, adam(), size="3KiB")
    many = pair.stats(-2).capacity
    pair.step(kjt({"a": [list(range(many))]}))
    with pytest.raises(
        CapacityError, match=r"this batch brings \d+ that are not there. Raise it to \w+\(\d+\) or more"
    ):
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
    many = device_rows_of(pair.tiers).above.most[0]
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
@pytest.mark.filterwarnings("ignore::shoal.errors.ModeWarning")
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


@pytest.mark.parametrize("is_eval", [False, True])
def test_a_lookup_that_is_captured_into_a_graph_says_that_the_storage_is_in_the_way(is_eval, monkeypatch):
    tables = [with_tiers(adam("deep"), [Hbm("8KiB"), MemoryStorage]), in_hbm(adam("plain"))]
    bags = shoal.EmbeddingBagCollection(tables, device=DEVICE, seed=7).train(not is_eval)
    monkeypatch.setattr(Streams, "is_capturing", True)
    with (
        torch.set_grad_enabled(not is_eval),
        pytest.raises(DeviceError, match=r"lookup of 'deep' .* the storage below"),
    ):
        bags(placed(kjt({"deep": [[1, 2]], "plain": [[3]]})))


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
    assert_same_handles(pair, asked)


@ON_ALL_FORMS
def test_assign_erase_and_training_between_each_other(form):
    pair = Below(form, adam(), size="6KiB")
    assign_and_erase_between_steps(pair, steps=4, bags=6, keys=120)
    pair.step(random_kjt(["a"]))
    pair.check()


@pytest.mark.slow
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
