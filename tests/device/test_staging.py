"""Batches whose rows come up to a device ahead of their lookup: nothing changes."""

import itertools
import threading

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_pairs import adam, same, slow, small_slabs, with_tiers  # noqa: F401 (a fixture)
from support.device_storages import FORMS, ON_ONE_FORM, Below, assert_sound
from support.device_tables import DEVICE, backward, in_hbm, outputs, placed
from support.inside import device_rows_of, group_of, nothing_is_staged, staged_batches_of, table_of

import shoal
from shoal import Dram, Hbm
from shoal.storage import MemoryStorage
from shoal.table.lower import tier as storage_below

pytestmark = pytest.mark.usefixtures("small_slabs")


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
    has_plan = threading.Event()  # which the first lookup makes: batches are staged from then on

    def loader():
        for number, batch in enumerate(batches):
            assert not number or has_plan.wait(60)
            yield placed(batch)

    def staged():
        for number, batch in enumerate(shoal.prefetch(loader(), ahead)):
            assert tiers == "two" or _is_staged(ahead, batch) == (number > 0)
            yield batch
            has_plan.set()

    got = run(ahead, staged(), range(8))
    for ours, theirs in zip(got, wanted, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            same(one, two)
    assert not staged_batches_of(ahead)
    ahead.check()
    for one, two in zip(ahead.state_dict().values(), plain.state_dict().values(), strict=True):
        same(one, two)
    ours, theirs = (module.table("a").stats().counters for module in (ahead, plain))
    assert ours == theirs


def _is_staged(bags, batch):
    return any(staging.values is batch.values() for staging in staged_batches_of(bags).values())


def test_nothing_is_staged_where_few_rows_come_up(monkeypatch):
    monkeypatch.setattr("shoal.table.device.cache._BATCHES_BETWEEN", 2)
    bags = shoal.EmbeddingBagCollection([with_tiers(adam(), [Hbm("3KiB"), Dram("64KiB")])], device=DEVICE)
    many = device_rows_of(bags).above.most[0]

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
        below = table_of(bags).below
        before = below.fetched, below.lower.metrics.read()["hits"]
        with torch.no_grad():
            bags(here_now)
        assert (below.fetched, below.lower.metrics.read()["hits"]) == before
        staging.release()
    assert_sound(bags)


@pytest.mark.parametrize("what", [slow("erase"), slow("assign"), "load", slow("leave"), slow("overwrite")])
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


@pytest.mark.parametrize("form", [slow("hbm"), "dram", slow("two")])
def test_rows_of_a_staged_batch_stay_when_stamps_begin_anew(form):
    forms = {**FORMS, "two": lambda size, _below: [Hbm("2KiB"), Dram("64KiB")]}
    made = with_tiers(adam(), forms[form]("8KiB", MemoryStorage))
    tiers, whole = (shoal.EmbeddingBagCollection([one], device=DEVICE, seed=7) for one in (made, in_hbm(adam())))

    def step(batch, seed):
        outs = [module(placed(batch)) for module in (tiers, whole)]
        same(*(out.values().detach() for out in outs))
        for out in outs:
            backward(out, seed)

    for first in range(0, 120, 30):
        step(kjt({"a": [list(range(first, first + 30))]}), first)
    stamps = device_rows_of(tiers).stamps
    stamps._numbers = itertools.count(2**30 - 2)
    found, placed_ahead = (placed(kjt({"a": [list(range(first, first + 20, 2))]})) for first in (0, 80))
    stagings = [tiers.stage(found), tiers.stage(placed_ahead)]
    for staging in stagings:
        staging.read()
    stagings[1].place(lambda: False)
    for first in (100, 30):
        step(kjt({"a": [list(range(first, first + 30))]}), first)
    assert [stamps.of(staging.number) for staging in stagings] == [1, 2]
    stagings[0].place(lambda: False)
    for seed, (batch, staging) in enumerate(zip((found, placed_ahead), stagings, strict=True)):
        assert not staged_batches_of(tiers)[staging.address].waits or staging.is_still_right(staging.plan)
        outs = [module(batch) for module in (tiers, whole)]
        staging.release()
        same(*(out.values().detach() for out in outs))
        for out in outs:
            backward(out, seed)
    tiers.check()
    for one, two in zip(tiers.state_dict().values(), whole.state_dict().values(), strict=True):
        same(one, two)


def test_rows_do_not_move_ahead_once_a_lookup_is_in_a_graph():
    bags = shoal.EmbeddingBagCollection([with_tiers(adam(), [Hbm("2KiB"), Dram("64KiB")])], device=DEVICE, seed=7)
    for first in range(0, 90, 30):
        backward(bags(placed(kjt({"a": [list(range(first, first + 30))]}))))
    staging = bags.stage(placed(kjt({"a": [list(range(20))]})))
    before = bags.stats()["a"].tiers[0].promotions
    group_of(bags)._streams.is_captured = True
    staging.place(lambda: False)
    assert bags.stats()["a"].tiers[0].promotions == before
    group_of(bags)._streams.is_captured = False
    staging.place(lambda: False)
    assert bags.stats()["a"].tiers[0].promotions > before
    staging.release()


def test_stamps_begin_anew_where_batches_are_only_staged():
    bags = shoal.EmbeddingBagCollection([with_tiers(adam(), [Hbm("2KiB"), Dram("64KiB")])], device=DEVICE, seed=7)
    batch = placed(kjt({"a": [[1, 2, 3]]}))
    backward(bags(batch))
    stamps = device_rows_of(bags).stamps
    stamps._numbers = itertools.count(2**30 + 5)
    staging = bags.stage(batch)
    staging.place(lambda: False)
    assert stamps.of(staging.number) == 1
    staging.release()
    assert bags.stats()["a"].tiers[0].pinned == 0


def test_a_batch_may_be_let_go_while_it_is_being_found(monkeypatch):
    tables = [with_tiers(adam(name=name), [Hbm("8KiB"), MemoryStorage]) for name in ("a", "b")]
    bags = shoal.EmbeddingBagCollection(tables, device=DEVICE, seed=7)
    batch = placed(kjt({"a": [[1, 2]], "b": [[3]]}))
    bags(batch)
    staging = bags.stage(batch)
    finder = threading.Thread(target=staging.read)
    has_one, may_go_on = threading.Event(), threading.Event()
    listen, unstage = storage_below.Below.listen, storage_below.Below.unstage

    def pausing(self):
        if has_one.is_set():
            assert may_go_on.wait(60)
        heard = listen(self)
        has_one.set()
        return heard

    def meanwhile(self, staged):
        if not may_go_on.is_set():
            may_go_on.set()
            finder.join(60)
        unstage(self, staged)

    monkeypatch.setattr(storage_below.Below, "listen", pausing)
    monkeypatch.setattr(storage_below.Below, "unstage", meanwhile)
    finder.start()
    assert has_one.wait(60)
    staging.release()
    finder.join(60)
    assert not finder.is_alive()
    assert nothing_is_staged(bags)


def test_several_batches_are_read_at_a_time():
    both = threading.Barrier(2)

    class Remote(MemoryStorage):
        def read(self, keys):
            if threading.current_thread() is not threading.main_thread():
                both.wait(60)
            return super().read(keys)

    pair = Below("hbm", adam(), size="3KiB", below=Remote)
    many = pair.stats(0).capacity
    for first in range(0, 2 * many, many // 2):
        pair.step(kjt({"a": [list(range(first, first + many // 2))]}))
    batches = [kjt({"a": [list(range(first, first + 6))]}) for first in (0, 4)]
    ours = [placed(batch) for batch in batches]
    stagings = [pair.tiers.stage(batch) for batch in ours]
    for staging in stagings:  # one after the other: what the first reads the second does not
        staging.find()
        assert staging.may_read(is_first=False)
    assert [len(staging.answers[0].keys) for staging in stagings] == [6, 4]
    threads = [threading.Thread(target=staging.read) for staging in stagings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
    for staging, batch, mine in zip(stagings, batches, ours, strict=True):
        staging.place(lambda: False)
        before = table_of(pair.tiers).below.fetched
        outs = [pair.tiers(mine), pair.whole(placed(batch))]
        same(*(out.values().detach() for out in outs))
        assert table_of(pair.tiers).below.fetched == before
        pair.backward(outs)
        staging.release()
    assert_sound(pair.tiers)
