"""With prefetch and without it a run is the same, bit for bit, whatever happens on the way."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import group_of, nothing_is_staged, staged_batches_of, table_of
from support.tiered import SMALL, assert_equal_outputs, below, collection, fetched_by_lookups, outputs, skewed_kjt

import shoal
from shoal import _native
from shoal.errors import ConfigError, InputError, PrefetchWarning, StorageError
from shoal.storage import MemoryStorage
from shoal.table import Batch, Pooled, Request, StagedTogether
from shoal.table.host.staging import HostStaging
from shoal.table.lower.threads import Readers

pytestmark = pytest.mark.threads

TABLE = {"name": "t", "dim": 8, "optimizer": shoal.Adam(lr=0.1)}


def batches(n, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    return [skewed_kjt(("t",), generator, **settings) for _ in range(n)]


def backward(out, step):
    generator = torch.Generator().manual_seed(step)
    for tensor in outputs(out):
        tensor.backward(torch.randn(tensor.shape, generator=generator))


def train(bags, loader, act=lambda _step: None):
    outs = []
    for step, batch in enumerate(loader):
        act(step)
        out = bags(batch)
        outs.append(out.values().detach())
        backward(out, step)
    return outs


def spilling(kind, folder, memory=SMALL):
    return collection([TABLE], [shoal.Dram(memory), below(kind, folder)])


def is_quiet():
    """Returns whether the threads of all loops that were left end; a loop leaves some before they have."""
    left = [one for one in threading.enumerate() if one.name.startswith("shoal-prefetch-") and "table" not in one.name]
    for thread in left:
        thread.join(60)
    return not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("kind", ["ssd", "memory"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_run_is_the_same_and_finds_its_rows_in_memory(kind, depth, tmp_path):
    # Room for the batches that are on their way, with some to spare, and not for the table.
    plain, ahead = collection([TABLE]), spilling(kind, tmp_path, "160KiB")
    wanted = train(plain, batches(60))
    got = train(ahead, shoal.prefetch(batches(60), ahead, depth=depth))
    assert ahead.stats()["t"].tiers[0].demotions > 0
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert plain.stats()["t"].counters == ahead.stats()["t"].counters
    assert fetched_by_lookups(ahead) == 0  # no lookup had to fetch
    assert is_quiet() and nothing_is_staged(ahead)


def test_what_happens_between_staging_and_forward(tmp_path):
    """Erase, assign, load: the lookup sees the rows as they are then."""
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path, "40KiB")

    def meddler(bags):
        def act(step):
            table, generator = bags.table("t"), torch.Generator().manual_seed(step)
            if step % 3 == 0:
                table.erase((torch.rand(60, generator=generator) ** 3 * 2000).long())
            if step % 4 == 1:
                keys = (torch.rand(60, generator=generator) ** 3 * 2000).long()
                table.assign(keys, torch.randn(60, 8, generator=generator))
            if step == 25:
                bags.load_state_dict(bags.state_dict())
            if step % 5 == 2:  # a forward of another batch, without a backward
                bags(skewed_kjt(("t",), generator, bags=6))

        return act

    wanted = train(plain, batches(50), meddler(plain))
    got = train(ahead, shoal.prefetch(batches(50), ahead, depth=3), meddler(ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_the_same_batch_again_and_batches_that_are_not_looked_up(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    some = batches(10)
    loader = [some[n % 3 if n % 4 else n % 10] for n in range(40)]
    for step, (one, two) in enumerate(zip(loader, shoal.prefetch(loader, ahead), strict=True)):
        if step % 6 == 5:
            continue
        outs = [plain(one), ahead(two)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)
    assert nothing_is_staged(ahead)


def test_leaving_the_loop_early_and_coming_back(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    loader = shoal.prefetch(batches(30), ahead)
    assert len(loader) == 30
    for last in (4, 9, 30):
        for step, (one, two) in enumerate(zip(batches(30), loader, strict=True)):
            if step == last:
                break
            outs = [plain(one), ahead(two)]
            assert_equal_outputs(outs, step)
            for out in outs:
                backward(out, step)
        gc.collect()
        assert is_quiet() and nothing_is_staged(ahead)
    assert_same_rows(plain, ahead)


def test_an_exception_in_the_model_or_in_the_loader(tmp_path):
    ahead = spilling("ssd", tmp_path)
    with pytest.raises(ZeroDivisionError):
        for step, batch in enumerate(shoal.prefetch(batches(20), ahead)):
            ahead(batch)
            step // (3 - step)
    gc.collect()
    assert is_quiet() and nothing_is_staged(ahead)

    def loader():
        yield from batches(5)
        raise OSError("no more data")

    seen = 0
    with pytest.raises(OSError, match="no more data"):
        for batch in shoal.prefetch(loader(), ahead):
            backward(ahead(batch), seen)
            seen += 1
    assert seen == 5 and is_quiet()


def test_more_batches_ahead_than_memory_holds(tmp_path):
    """It waits until rows of the batches before may leave."""
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path, "40KiB")
    wide = {"bags": 60, "keys": 100_000}
    wanted = train(plain, batches(25, **wide))
    got = train(ahead, shoal.prefetch(batches(25, **wide), ahead, depth=20))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_graphs_that_are_kept_hold_their_rows_and_later_lookups_do_without_memory(tmp_path):
    plain, ahead = collection([TABLE]), spilling("memory", tmp_path)
    some = batches(50, bags=40, keys=10**6)
    kept = [plain(batch).values() for batch in some], []
    for batch in shoal.prefetch(some, ahead):
        kept[1].append(ahead(batch).values())
    for step, outs in enumerate(zip(*kept, strict=True)):
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.ones_like(out) * step)
    assert_same_rows(plain, ahead)
    train(ahead, shoal.prefetch(batches(5), ahead))


def test_a_batch_too_large_for_memory_is_not_read_ahead(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    large = kjt({"t": [list(range(5000))]})
    for step in range(3):
        outs = [plain(large)]
        for batch in shoal.prefetch([large], ahead):
            assert ahead.stats()["t"].tiers[1].ahead_bytes == 0
            outs.append(ahead(batch))
        assert torch.equal(*(out.values() for out in outs))
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)
    assert nothing_is_staged(ahead)


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
@pytest.mark.parametrize("call", [_native.FileCall.read, _native.FileCall.write])
def test_a_disk_that_fails_is_the_lookups_to_tell(call, tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    loader = iter(shoal.prefetch(batches(60), ahead, depth=2))
    failures = 0
    try:
        for step, one in enumerate(batches(60)):
            two = next(loader)
            if step == 20:
                _native.inject_fault(call, "", 5, 0, 1 << 30)
            try:
                out = ahead(two)
            except StorageError:
                failures += 1
                _native.clear_faults()
                out = ahead(two)
            if step == 40:
                _native.clear_faults()
            wanted = plain(one)
            assert_equal_outputs([wanted, out], step)
            backward(wanted, step)
            backward(out, step)
    finally:
        _native.clear_faults()
    assert failures >= 1
    assert_same_rows(plain, ahead)


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
def test_rows_that_are_lost_are_the_lookups_to_name_and_the_loop_goes_on_without_them(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    loader = iter(shoal.prefetch(batches(60), ahead, depth=3))
    failures = 0
    for step, one in enumerate(batches(60)):
        two = next(loader)
        if step == 30:
            for segment in tmp_path.rglob("*.seg"):
                os.truncate(segment, 0)
        try:
            out = ahead(two)
        except StorageError as error:
            failures += 1
            assert torch.isin(error.keys, two.values()).all()
            for module in (plain, ahead):
                assert module.table(error.table).erase(error.keys) == len(error.keys)
            out = ahead(two)
        wanted = plain(one)
        assert_equal_outputs([wanted, out], step)
        backward(wanted, step)
        backward(out, step)
    assert failures >= 1
    lost = ahead.table("t").unreadable()
    for module in (plain, ahead):
        assert module.table("t").erase(lost) == len(lost)
    assert_same_rows(plain, ahead)


class OneThread(MemoryStorage):
    """Serves the thread that made it, as sqlite3 does by default."""

    def read(self, keys):
        if threading.current_thread() is not threading.main_thread():
            raise ConnectionError("made in another thread")
        return super().read(keys)


def test_a_storage_that_fails_ahead_is_told_of_once_a_loop_and_counted():
    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), OneThread])
    for loop in range(2):
        wanted = train(plain, batches(20, seed=loop))
        with pytest.warns(PrefetchWarning) as told:
            got = train(ahead, shoal.prefetch(batches(20, seed=loop), ahead))
        assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
        assert len(told) == 1 and told[0].filename == __file__
        said = str(told[0].message)
        assert "ConnectionError: made in another thread; [table 't'] raised by its lowest tier: OneThread.read" in said
        assert "lookup brings them itself" in said
    assert ahead.stats()["t"].tiers[-1].failures > 20
    assert_same_rows(plain, ahead)


def test_births_ask_a_storage_once(tmp_path):
    """What a storage of one's own does not have is known from staging: the lookup does not ask again."""
    asked = []

    class Remote(MemoryStorage):
        def read(self, keys):
            asked.append((threading.current_thread().name, len(keys)))
            time.sleep(0.001)
            return super().read(keys)

    ahead = collection([TABLE], [shoal.Dram("1MiB"), Remote])
    train(ahead, shoal.prefetch(batches(30), ahead))
    from_loop = [n for name, n in asked if not name.startswith("shoal-prefetch")]
    assert sum(n for _, n in asked) > 500 and not from_loop


def test_eval_is_staged_too(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    for bags in (plain, ahead):
        train(bags, batches(40))
        bags.eval()
    before = fetched_by_lookups(ahead)
    with torch.no_grad():
        for one, two in zip(batches(40, seed=1), shoal.prefetch(batches(40, seed=1), ahead), strict=True):
            assert_equal_outputs([plain(one), ahead(two)])
    assert before and fetched_by_lookups(ahead) == before
    assert_same_rows(plain, ahead)


def test_a_lookup_does_not_wait_for_what_another_batch_is_about_to_bring(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    for bags in (plain, ahead):
        train(bags, batches(40))
    batch, twin = (skewed_kjt(("t",), torch.Generator().manual_seed(9)) for _ in range(2))
    staging = ahead.stage(batch)
    staging.find(1)  # it knows its keys, and has read none
    with torch.no_grad():
        assert_equal_outputs([plain.eval()(twin), ahead.eval()(twin)])
    staging.read()
    staging.place(lambda: False)
    with torch.no_grad():
        assert_equal_outputs([plain(batch), ahead(batch)])
    assert nothing_is_staged(ahead)
    assert_same_rows(plain, ahead)


def test_features_are_found_in_the_batch_for_several_collections(tmp_path):
    tables = [{"name": "u", "dim": 4, "features": ["t"]}]
    one = spilling("ssd", tmp_path, "64KiB")
    two = collection(tables, [shoal.Dram("32KiB"), below("memory", tmp_path)])
    loader = [{"both": batch, "other": other} for batch, other in zip(batches(20), batches(20, seed=1), strict=True)]
    finders = [lambda batch: batch["both"], lambda batch: (batch["both"], batch["other"])]
    for number, features in enumerate(finders):
        for step, batch in enumerate(shoal.prefetch(loader, [one, two], features=features)):
            assert batch is loader[step]
            backward(one(batch["both"]), step)
            backward(two(batch["other" if number else "both"]), step)
    assert fetched_by_lookups(one) == fetched_by_lookups(two) == 0


def test_collections_are_read_beside_each_other():
    both_read = threading.Barrier(2)

    class Remote(MemoryStorage):
        def read(self, keys):
            if threading.current_thread() is not threading.main_thread():
                both_read.wait(60)
            return super().read(keys)

    both = [collection([TABLE], [shoal.Dram("1MiB"), Remote]) for _ in range(2)]
    unseen = [kjt({"t": [range(50 * n, 50 * n + 50)]}) for n in range(10)]
    for step, batch in enumerate(shoal.prefetch(unseen, both, depth=1)):  # one batch is read at a time
        for bags in both:
            backward(bags(batch), step)
    assert not both_read.broken


def test_a_batch_that_waits_for_one_collections_memory_takes_none_of_anothers(tmp_path):
    class Full(Stages):
        def may_read(self, is_first):
            return is_first

    one = spilling("memory", tmp_path)
    part = one.stage(batches(1)[0])
    part.find(1)
    both = StagedTogether([part, Full()], Readers(1))
    assert not both.may_read(is_first=False)
    assert one.stats()["t"].tiers[-1].ahead_bytes == 0
    assert both.may_read(is_first=True)
    both.expect()
    assert one.stats()["t"].tiers[-1].ahead_bytes > 0
    both.release()


def test_tables_that_are_all_in_memory_are_left_alone():
    bags = collection([TABLE])
    assert bags.stage(batches(1)[0]) is None
    train(bags, shoal.prefetch(batches(5), bags))


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 0}, {"depth": "2"}, {"depth": True}, {"bags": torch.nn.Linear(1, 1)}, {"features": 3}, {"loader": 3}],
)
def test_wrong_arguments(wrong):
    settings = {"loader": [], "bags": collection([TABLE])} | wrong
    with pytest.raises(ConfigError, match=rf"\[prefetch\] {next(iter(wrong))}: wanted"):
        shoal.prefetch(**settings)


def test_any_integer_is_a_depth():
    bags = collection([TABLE])
    train(bags, shoal.prefetch(batches(3), bags, depth=np.int64(2)))


def test_a_batch_of_features_and_labels_is_told_of_features():
    bags = collection([TABLE])
    with pytest.raises(InputError, match=r"got a tuple of 2\. Pass prefetch\(\.\.\., features=a function"):
        list(shoal.prefetch([(batch, "labels") for batch in batches(2)], bags))


def test_what_the_users_function_raises_comes_to_the_loop():
    bags = collection([TABLE])
    with pytest.raises(KeyError, match="ids"):
        list(shoal.prefetch([{"id": batch} for batch in batches(2)], bags, features=lambda batch: batch["ids"]))
    with pytest.raises(InputError, match="one for each of the 1 collections; got a tuple of 2"):
        list(shoal.prefetch(batches(2), bags, features=lambda batch: (batch, "labels")))


def test_keys_that_the_loop_changes_on_the_way_are_looked_up_as_they_are_then(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    for step, (one, two) in enumerate(zip(batches(30), shoal.prefetch(batches(30), ahead), strict=True)):
        for batch in (one, two):
            batch.values().numpy()[::3] += 1  # torch does not hear of it
        outs = [plain(one), ahead(two)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert_same_rows(plain, ahead)


def test_rows_leave_and_are_born_while_a_large_batch_is_being_found(tmp_path):
    """Whoever finds a batch's rows lets others at the indexes on the way: none that it found may leave then."""
    plain, ahead = collection([TABLE]), spilling("memory", tmp_path, "300KiB")
    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(60, 1000, generator=generator) * 1500).long() + first for first in (0, 10**6)]
    large = [kjt({"t": keys.tolist()}) for keys in drawn]
    for step in range(40):
        batch, placed = large[step % 2], []
        placed.append(ahead.stage(batch))
        finder = threading.Thread(target=placed[0].find, args=(1,))
        finder.start()
        few = kjt({"t": [range(10**7 * (step + 1), 10**7 * (step + 1) + 200)]})  # births, for which others leave
        assert_equal_outputs([plain(few), ahead(few)], step)
        finder.join()
        outs = [plain(batch), ahead(batch)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
        placed.pop().release()
    assert_same_rows(plain, ahead)
    assert ahead.stats()["t"].tiers[0].demotions > 0
    assert nothing_is_staged(ahead)


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_storage_that_wants_to_end_the_thread(where):
    class Ending(MemoryStorage):
        def read(self, keys):
            return self._end("read") or super().read(keys)

        def write(self, keys, rows):
            return self._end("write") or super().write(keys, rows)

        def _end(self, what):
            if what == where and threading.current_thread() is not threading.main_thread():
                raise SystemExit

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), Ending])
    wanted = train(plain, batches(30))
    with pytest.warns(PrefetchWarning, match="could not be brought ahead: SystemExit"):
        got = train(ahead, shoal.prefetch(batches(30), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_a_loader_that_is_slow_when_the_loop_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["shoal.prefetch.run"], "_JOIN_SECONDS", 0.05)
    ahead = spilling("ssd", tmp_path)
    is_at_work, may_go_on = threading.Event(), threading.Event()

    def slow():
        for number, batch in enumerate(batches(6)):
            if number > 2:
                is_at_work.set()
                assert may_go_on.wait(60)
            yield batch

    for number, _batch in enumerate(shoal.prefetch(slow(), ahead)):
        if number == 1:
            assert is_at_work.wait(60)
            break
    gc.collect()
    may_go_on.set()
    assert is_quiet() and nothing_is_staged(ahead)


def test_batches_that_share_their_values_and_not_their_bags(tmp_path):
    plain, ahead = (
        collection([TABLE, {"name": "u", "dim": 4}], tiers)
        for tiers in (None, [shoal.Dram("64KiB"), below("ssd", tmp_path)])
    )
    values = torch.arange(12)
    one, two = (
        shoal.KeyedJaggedTensor(["t", "u"], values, lengths=torch.tensor(lengths))
        for lengths in ([4, 4, 2, 2], [2, 2, 4, 4])
    )
    for _ in range(2):
        staging = ahead.stage(one)
        staging.read()
        staging.place(lambda: False)
        outs = [plain(two), ahead(two)]
        assert_equal_outputs(outs)
        for out in outs:
            backward(out, 0)
    assert_same_rows(plain, ahead)


class Stages:
    """Stages a batch, or raises."""

    device = torch.device("cpu")
    waits = in_loop = False

    def __init__(self, error=None, at=None):
        self.error, self.at = error, at
        self.staged = self.released = 0

    def move_here(self, _features):
        return None

    def stage(self, _features):
        if self.at == "stage":
            raise self.error
        self.staged += 1
        return self

    def expect(self):
        pass

    def read(self):
        if self.at == "read":
            raise self.error

    def place(self, _may_wait):
        pass

    def release(self):
        self.released += 1


def test_what_was_staged_is_released_where_another_collection_fails():
    good, bad = Stages(), Stages(ValueError("told to fail"), "stage")
    with pytest.raises(ValueError, match="told to fail"):
        list(shoal.prefetch(batches(3), [good, bad]))
    assert good.staged == good.released == 1


def test_an_interrupt_in_the_loops_thread_ends_the_loop():
    bags, others_came = Stages(KeyboardInterrupt(), "read"), threading.Event()

    def loader():
        for number, batch in enumerate(batches(5)):
            if number == 3:  # the second and the third are in line
                others_came.set()
            yield batch

    loop = iter(shoal.prefetch(loader(), bags, depth=3))
    with pytest.raises(KeyboardInterrupt):
        next(loop)
        assert others_came.wait(60)
        next(loop)
    loop.close()
    assert bags.staged == bags.released


class Waits(MemoryStorage):
    """A storage whose calls by some threads wait for an event."""

    def __init__(self, row_bytes):
        super().__init__(row_bytes)
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.call = self.thread = None

    def _wait(self, call):
        if call == self.call and self.thread in (None, threading.current_thread().name):
            self.began.set()
            assert self.goes_on.wait(60)

    def read(self, keys):
        self._wait("read")
        return super().read(keys)

    def write(self, keys, rows):
        self._wait("write")
        super().write(keys, rows)


KEY = 10**6


def with_key_below():
    """A collection and its equal without tiers, trained until a key has left memory, and more batches for that."""
    plain, tiers = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), Waits])
    others = iter([kjt({"t": [range(first, first + 100)]}) for first in range(0, 50_000, 100)])

    def step(batch):
        for bags in (plain, tiers):
            bags(batch).values().sum().backward()

    def let_leave():
        while bool((table_of(tiers).find(torch.tensor([KEY])) >= 0).any()):
            step(next(others))

    step(kjt({"t": [[KEY]]}))
    let_leave()
    return plain, tiers, table_of(tiers).below, step, let_leave


def test_a_row_that_changes_and_leaves_between_find_and_read_is_read_as_it_is_then(monkeypatch):
    plain, tiers, below, step, let_leave = with_key_below()
    found, asks = threading.Event(), threading.Event()
    coming = below._coming

    def late(staged):
        if threading.current_thread().name == "finder":
            found.set()
            assert asks.wait(60)
        return coming(staged)

    monkeypatch.setattr(below, "_coming", late)
    batch, placed = kjt({"t": [[KEY]]}), []

    def stage():
        placed.append(tiers.stage(batch))
        placed[0].read()  # finds first

    finder = threading.Thread(target=stage, name="finder")
    finder.start()
    assert found.wait(60)
    step(kjt({"t": [[KEY]]}))  # up again, and changed
    below.storage.call, below.storage.thread = "write", "leaver"
    leaver = threading.Thread(target=let_leave, name="leaver")
    leaver.start()
    assert below.storage.began.wait(60)  # those who listen have heard of it, and it is not written
    asks.set()
    finder.join()
    below.storage.goes_on.set()
    leaver.join()
    placed[0].place(lambda: False)
    assert_equal_outputs([plain(batch), tiers(batch)])
    assert_same_rows(plain, tiers)
    placed[0].release()


def test_a_row_that_left_before_it_was_looked_for_is_not_fetched_again():
    plain, tiers, below, step, _ = with_key_below()
    step(kjt({"t": [[KEY]]}))  # up again, and changed
    batch = kjt({"t": [[KEY]]})
    placed, find = tiers.stage(batch), HostStaging._find

    def late(staging, threads):
        table = table_of(tiers)
        with group_of(tiers).writing():
            leaving = table.begin_departure(len(table.index))
        with below.writing:  # it leaves after the staging began to listen, and before it is looked for
            table.write(leaving)
        with group_of(tiers).writing():
            table.end_departure(leaving)
        assert int(table.find(torch.tensor([KEY]))) < 0
        find(staging, threads)

    placed._find = lambda threads: late(placed, threads)
    placed.read()
    placed.place(lambda: False)
    fetched = fetched_by_lookups(tiers)
    assert_equal_outputs([plain(batch), tiers(batch)])
    assert fetched_by_lookups(tiers) == fetched
    placed.release()


@pytest.mark.parametrize("what", ["load", "release"])
def test_an_eval_that_waits_for_its_turn_does_not_bring_what_is_no_more(what, monkeypatch):
    plain, tiers, below, step, let_leave = with_key_below()
    wants_alone, goes_on = threading.Event(), threading.Event()
    writing, batch = group_of(tiers).writing, kjt({"t": [[KEY]]})

    def late():
        if threading.current_thread().name == "eval":
            wants_alone.set()
            assert goes_on.wait(60)
        return writing()

    monkeypatch.setattr(group_of(tiers), "writing", late)
    placed = tiers.stage(batch) if what == "release" else None
    if placed is not None:
        placed.read()
        below.storage.call, below.storage.thread = "read", "eval"
    look = Request(Batch(["t"], batch.values(), batch.offsets()), Pooled(8), torch.float32, False, False)
    reader = threading.Thread(target=lambda: group_of(tiers).lookup(look), name="eval")
    reader.start()
    if placed is None:
        assert wants_alone.wait(60)
        plain.table("t").assign(torch.tensor([KEY]), torch.ones(1, 8))
        tiers.load_state_dict(plain.state_dict())
    else:
        placed.release()
        below.storage.goes_on.set()
        assert wants_alone.wait(60)
        assert not staged_batches_of(tiers)
        step(kjt({"t": [[KEY]]}))
        let_leave()
    assert_equal_outputs([plain(batch), tiers(batch)])
    goes_on.set()
    reader.join()
    assert_same_rows(plain, tiers)
    assert nothing_is_staged(tiers)


def test_depth_hides_a_storages_latency():
    """As many reads are under way as batches, and batches come in order."""
    reading, lock, three_read = set(), threading.Lock(), threading.Event()

    class Remote(MemoryStorage):
        def read(self, keys):
            with lock:
                reading.add(threading.get_ident())
                if len(reading) == 3:
                    three_read.set()
            assert three_read.wait(60)  # the first one is not answered before the third one is asked
            time.sleep(0.005 * (int(keys[0]) % 2))  # some are answered before those that were asked sooner
            with lock:
                reading.discard(threading.get_ident())
            return super().read(keys)

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram("128KiB"), Remote])
    some = [kjt({"t": [range(50 * n, 50 * n + 50)]}) for n in range(40)]
    wanted, got = train(plain, some), train(ahead, shoal.prefetch(some, ahead, depth=4))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert three_read.is_set()


@pytest.mark.parametrize("found", [None, {"t": 1}, torch.ones(3)], ids=["None", "dict", "tensor"])
def test_what_is_no_batch_of_features_is_said(found):
    bags = collection([TABLE])
    with pytest.raises(InputError, match=r"features: wanted the KeyedJaggedTensor .* got"):
        list(shoal.prefetch(batches(3), bags, features=lambda _batch: found))


def test_features_that_stop_an_iteration_do_not_end_the_loop_in_silence():
    with pytest.raises(RuntimeError, match="features raised StopIteration"):
        list(shoal.prefetch(batches(3), collection([TABLE]), features=lambda _batch: next(iter(()))))


def test_a_storage_is_not_asked_for_nothing():
    asked = []

    class Counting(MemoryStorage):
        def read(self, keys):
            asked.append(len(keys))
            return super().read(keys)

    tables = [TABLE, {**TABLE, "name": "u"}]
    bags = collection(tables, [shoal.Dram("1MiB"), Counting])
    some = [kjt({"t": [range(10)], "u": [range(5)]}) for _ in range(8)]
    train(bags, shoal.prefetch(some, bags, depth=4))
    assert asked and min(asked) > 0


def test_rows_that_are_read_ahead_and_have_no_place_are_bounded():
    most = 0

    class Watched(MemoryStorage):
        def read(self, keys):
            nonlocal most
            most = max(most, table.below.ahead_bytes)
            return super().read(keys)

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), Watched])
    some = [kjt({"t": [range(100 * (n % 9), 100 * (n % 9) + 100)]}) for n in range(36)]
    table = table_of(ahead)
    batch_bytes = 100 * table.below.row_bytes
    assert 4 * batch_bytes > table.budget
    wanted = train(plain, some)
    got = train(ahead, shoal.prefetch(some, ahead, depth=8), lambda _step: time.sleep(0.01))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    # One that is being placed, the first that is read, and one that the loop was given without a place.
    assert batch_bytes <= most <= 3 * batch_bytes
    assert ahead.stats()["t"].tiers[-1].ahead_bytes == 0


ENDING = """
import os, sys, threading, time, torch, shoal
from shoal.storage import MemoryStorage
from shoal.table.host.staging import HostStaging
module = sys.modules["shoal.prefetch.run"]

class Remote(MemoryStorage):
    answers, hangs, changed, was_read = True, threading.Event(), threading.Condition(), set()
    def read(self, keys):
        if not Remote.answers:
            Remote.hangs.set()
            threading.Event().wait()
        answer = super().read(keys)
        with Remote.changed:
            Remote.was_read.update(keys.tolist())
            Remote.changed.notify()
        return answer

tables = [shoal.Table(name, 8, tiers=[shoal.Dram("28KiB"), Remote]) for name in ("a", "b")]
bags = shoal.EmbeddingBagCollection(tables)
def batch(n):
    return shoal.KeyedJaggedTensor(["a", "b"], torch.arange(80) + 80 * n, lengths=torch.tensor([40, 40]))
loop = iter(shoal.prefetch([batch(n) for n in range(40)], bags, depth=3))
for _ in range(20):
    bags(next(loop))
"""


def ends(program, seconds=300):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", ENDING + program], timeout=seconds).returncode


def test_a_process_ends_though_a_storage_does_not_answer():
    # What the next step needs is read; what comes after it is being read for ever.
    program = """
module._JOIN_SECONDS = 0.2
with Remote.changed:
    Remote.changed.wait_for(lambda: set(range(80 * 20, 80 * 21)) <= Remote.was_read)
Remote.answers = False
next(loop)
Remote.hangs.wait(10)
sys.exit(3)
"""
    assert ends(program) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_a_loop_alone():
    """Its locks may be held by threads that the child does not have."""
    program = """
run = next(iter(module._running))
held, may_go = threading.Event(), threading.Event()
def hold():
    with run._lock:
        held.set()
        may_go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if not child:
    try:
        next(loop)
    except shoal.errors.ForkError:
        loop.close()
        sys.exit(7)
    sys.exit(1)
end = time.monotonic() + 120
while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
    time.sleep(0.05)
if not ended[0]:
    os.kill(child, 9)
may_go.set()
thread.join()
bags(next(loop))
sys.exit(os.waitstatus_to_exitcode(ended[1]) if ended[0] else 2)
"""
    assert ends(program) == 7


@pytest.mark.parametrize("started", [0, 1, 3])
def test_threads_that_cannot_be_started_leave_none_behind(started, tmp_path, monkeypatch):
    ahead = spilling("ssd", tmp_path)
    start, left = threading.Thread.start, started

    def refusing(thread):
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iter(shoal.prefetch(batches(5), ahead)))
    assert is_quiet() and nothing_is_staged(ahead)
    train(ahead, shoal.prefetch(batches(5), ahead))


class Slow:
    """A batch on its way that takes its time to be found, by a thread."""

    waits, in_loop = True, False

    def __init__(self):
        self.begins, self.may_go_on, self.calls = threading.Event(), threading.Event(), []

    def find(self, _threads):
        self.begins.set()
        assert self.may_go_on.wait(60)

    def may_read(self, is_first):
        return is_first

    def expect(self):
        pass

    def read(self):
        self.calls.append("read")

    def place(self, _may_wait):
        self.calls.append("place")

    def release(self):
        self.calls.append("release")


def test_a_batch_that_is_let_go_while_its_thread_is_busy_is_not_read(monkeypatch):
    monkeypatch.setattr(sys.modules["shoal.prefetch.run"], "_JOIN_OTHERS_SECONDS", 0.05)
    died = []
    monkeypatch.setattr(threading, "excepthook", lambda what: died.append(what.exc_value))
    slow = Slow()
    run = sys.modules["shoal.prefetch.run"].Run(iter(batches(3)), lambda _batch: slow, 2, [])
    assert slow.begins.wait(60)
    run.close()
    assert "release" in slow.calls
    slow.may_go_on.set()
    run.await_threads(30)
    assert not died and set(slow.calls) == {"release"}


def recorded(monkeypatch, *methods):
    """The threads that call methods of a batch on its way, by method."""
    seen = {method: [] for method in methods}

    def record(method, call):
        def recording(self, *arguments):
            seen[method].append(threading.current_thread().name)
            return call(self, *arguments)

        monkeypatch.setattr(HostStaging, method, recording)

    for method in methods:
        record(method, getattr(HostStaging, method))
    return seen


def test_the_loop_finds_and_places_and_threads_do_what_may_wait(tmp_path, monkeypatch):
    main = threading.current_thread().name
    seen = recorded(monkeypatch, "_find", "place_into_room", "place", "read", "_let_leave")
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    wanted = train(plain, batches(60))
    got = train(ahead, shoal.prefetch(batches(60), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert seen["_find"] == [main] * 60
    assert len(seen["read"]) == 60 and set(seen["read"]) == {"shoal-prefetch-read"}
    assert set(seen["place_into_room"]) == {main}
    # Memory is full after some steps: rows have to leave for others from then on.
    assert set(seen["place"]) == set(seen["_let_leave"]) == {"shoal-prefetch-place"}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_batches_are_on_their_way_as_depth_says(depth, tmp_path):
    ahead = spilling("memory", tmp_path, "1MiB")
    loaded, most_loaded, most_found, came = 0, 0, 0, threading.Condition()

    def loader():
        nonlocal loaded
        for batch in batches(30):
            with came:
                loaded += 1
                came.notify()
            yield batch

    for step, batch in enumerate(shoal.prefetch(loader(), ahead, depth=depth)):
        with came:  # the loader is as far as it may be, unless it is less far than it must be
            came.wait_for(lambda step=step: loaded >= min(step + depth + 2, 30), 60)
        most_loaded = max(most_loaded, loaded - (step + 1))
        most_found = max(most_found, len(staged_batches_of(ahead)) - 1)
        backward(ahead(batch), step)
    assert most_loaded == depth + 1 and most_found == depth


def test_an_interrupt_while_the_loop_finds_lets_all_go(tmp_path, monkeypatch):
    ahead = spilling("ssd", tmp_path)
    find, calls = HostStaging._find, []

    def interrupted(self, threads):
        find(self, threads)
        calls.append(self)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(HostStaging, "_find", interrupted)
    steps = 0
    with pytest.raises(KeyboardInterrupt):
        for batch in shoal.prefetch(batches(20), ahead):
            backward(ahead(batch), steps)
            steps += 1
    gc.collect()
    assert len(calls) == 5 and steps < 5
    assert is_quiet() and nothing_is_staged(ahead)


def test_memory_that_is_refused_where_rows_are_placed_is_the_lookups_to_tell(tmp_path, monkeypatch):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    place, refused = _native.place, 0

    def refusing(tables, *rest):
        nonlocal refused
        if refused % 3 < 2:
            refused += 1
            return [-1] * len(tables)
        return place(tables, *rest)

    monkeypatch.setattr(_native, "place", refusing)
    wanted = train(plain, batches(40))
    got = train(ahead, shoal.prefetch(batches(40), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert refused >= 2 and nothing_is_staged(ahead)
