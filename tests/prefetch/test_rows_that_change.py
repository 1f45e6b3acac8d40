"""Rows that change, leave memory or are looked up while their batch is being staged."""

import threading

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import group_of, nothing_is_staged, staged_batches_of, table_of
from support.prefetching import TABLE, backward, batches, spilling, train
from support.tiered import SMALL, assert_equal_outputs, collection, fetched_by_lookups, skewed_kjt

import shoal
from shoal.storage import MemoryStorage
from shoal.table import Batch, Pooled, Request
from shoal.table.host.staging import HostStaging

pytestmark = pytest.mark.threads


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


def test_rows_leave_and_are_born_while_a_large_batch_is_being_found(tmp_path):
    """Finding a batch's rows releases the indexes on the way: no row that it found may leave then."""
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
