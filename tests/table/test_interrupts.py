"""An interrupt at any moment leaves tables as they were before or are after the call, and loses no lock."""

import contextlib
import gc
import random
import signal
import threading
import time

import pytest
import torch
from support.batches import assert_same_rows
from support.inside import group_of, locks_are_free, nothing_is_staged, table_of, tables_of
from support.tiered import assert_equal_outputs, below, collection, skewed_kjt

import shoal
from shoal.table.host.arrivals import Arriving

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread is interrupted"
)

SECONDS = 4.0
TABLES = [{"name": name, "dim": 8, "optimizer": shoal.SGD(lr=0.1)} for name in "ab"]


class Interrupts:
    """Interrupts the main thread, some time after it asks for that."""

    def __init__(self):
        self.count = 0
        self._is_armed = False
        self._asked, self._is_over = threading.Semaphore(0), False
        self._most_seconds = 0.0

    def __enter__(self):
        self._before = signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over = True
        self._asked.release()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def _interrupt(self, *_):
        if self._is_armed:
            self._is_armed = False
            self.count += 1
            raise KeyboardInterrupt

    def _send(self):
        while self._asked.acquire() and not self._is_over:
            time.sleep(random.random() * self._most_seconds)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def call(self, most_seconds, what):
        """What a call returns, which an interrupt may have ended: then None."""
        self._most_seconds = most_seconds
        self._asked.release()
        with contextlib.suppress(KeyboardInterrupt):
            try:
                self._is_armed = True
                return what()
            finally:
                self._is_armed = False
        return None


def assert_sound(bags, plain):
    gc.collect()
    assert locks_are_free(bags)
    assert nothing_is_staged(bags)
    for table, other in zip(tables_of(bags), tables_of(plain), strict=True):
        assert len(table) == len(table.keys()) == len(other)
        assert table.storage.native.live == len(table.index)  # no slot is lost
        if table.below is not None:
            assert bags.stats()[table.config.name].tiers[0].pinned == 0
    assert_same_rows(bags, plain)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("ssd", "120KiB"), ("memory", "120KiB"), (None, None), ("ssd", "8KiB"), ("memory", "8KiB")],
    ids=["ssd", "memory", "alone", "ssd that reads in pieces", "memory that reads in pieces"],
)
def test_a_forward_that_is_interrupted_is_made_again(kind, size, tmp_path):
    plain = collection(TABLES)
    bags = collection(TABLES, [shoal.Dram(size), below(kind, tmp_path)] if kind else None)
    generator = torch.Generator().manual_seed(0)
    end = time.monotonic() + SECONDS
    step = 0
    with Interrupts() as interrupts:
        while time.monotonic() < end or interrupts.count < 20:
            batch = skewed_kjt("ab", generator, bags=60, keys=6000)
            out, tries = None, 0
            while out is None:
                tries += 1
                out = interrupts.call(0.003 * tries, lambda batch=batch: bags(batch))
            outs = [out, plain(batch)]
            assert_equal_outputs(outs, step)
            for one in outs:
                one.values().backward(torch.ones_like(one.values()))
            step += 1
            out = outs = one = None
    assert step > 5
    assert_sound(bags, plain)


@pytest.mark.parametrize("kind", ["ssd", "memory"])
def test_a_loop_that_is_interrupted_is_begun_again(kind, tmp_path):
    plain = collection(TABLES)
    bags = collection(TABLES, [shoal.Dram("120KiB"), below(kind, tmp_path)])
    generator = torch.Generator().manual_seed(0)
    batches = [skewed_kjt("ab", generator, bags=60, keys=6000) for _ in range(40)]
    end = time.monotonic() + SECONDS
    step = 0
    with Interrupts() as interrupts:
        while time.monotonic() < end or interrupts.count < 5:
            begin = step % len(batches)
            loop = iter(shoal.prefetch(batches[begin:], bags))
            for batch in batches[begin:]:
                if interrupts.call(0.01, lambda loop=loop: next(loop)) is None:
                    loop.close()
                    break
                outs = [bags(batch), plain(batch)]
                assert_equal_outputs(outs, step)
                for one in outs:
                    one.values().backward(torch.ones_like(one.values()))
                step += 1
    outs = one = None
    assert_sound(bags, plain)


def test_rows_that_a_traceback_holds_are_not_taken_out_later(monkeypatch):
    """An interrupt at the end of an arrival: rows that are in by then stay, even if something keeps the exception."""
    bags = collection(TABLES)
    batch = skewed_kjt("ab", torch.Generator().manual_seed(0))
    leave = Arriving.__exit__

    def interrupted(_self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Arriving, "__exit__", interrupted)
    try:
        bags(batch)
    except KeyboardInterrupt as error:
        kept = error
    monkeypatch.setattr(Arriving, "__exit__", leave)
    bags(batch).values().sum().backward()
    rows = bags.table("a").lookup(bags.table("a").keys())
    del kept
    gc.collect()
    assert torch.equal(bags.table("a").lookup(bags.table("a").keys()), rows)
    for table in tables_of(bags):
        assert len(table) == len(table.keys()) == table.storage.native.live


def test_leases_that_ended_are_not_forgotten(monkeypatch):
    bags = collection(TABLES)
    group = group_of(bags)
    batch = skewed_kjt("ab", torch.Generator().manual_seed(0))
    outs = [bags(batch) for _ in range(5)]
    touch, calls = group._touch, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        touch(batch)

    monkeypatch.setattr(group, "_touch", interrupted)
    del outs
    gc.collect()
    with pytest.raises(KeyboardInterrupt), group.writing():
        pass
    with group.writing():
        assert not group._leases.live()
    assert len(calls) == 6 and calls[2] is calls[3]
    assert locks_are_free(bags)


@pytest.mark.parametrize("kind", ["memory", None])
def test_erases_that_are_interrupted_lose_no_slot_and_no_count(kind, tmp_path):
    bags = collection(TABLES, [shoal.Dram("120KiB"), below(kind, tmp_path)] if kind else None)
    keys, generator = torch.arange(1500), torch.Generator().manual_seed(0)
    table, held = bags.table("a"), table_of(bags)
    end = time.monotonic() + SECONDS / 2
    with Interrupts() as interrupts:
        while time.monotonic() < end or interrupts.count < 20:
            table.assign(keys, torch.zeros(len(keys), 8))
            some = keys[torch.randperm(len(keys), generator=generator)[:700]]
            interrupts.call(0.002, lambda some=some: table.erase(some))
            assert len(table) == len(table.keys())
            assert held.storage.native.live == len(held.index)
    assert locks_are_free(bags)
