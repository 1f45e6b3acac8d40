"""A loop that is left, or fails, at any moment: its threads end, and no batch stays staged."""

import gc
import sys
import threading

import pytest
from support.batches import assert_same_rows
from support.inside import nothing_is_staged
from support.prefetching import TABLE, Stages, backward, batches, is_quiet, spilling, train
from support.tiered import assert_equal_outputs, collection

import shoal
from shoal.table.host.staging import HostStaging

pytestmark = pytest.mark.threads


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
