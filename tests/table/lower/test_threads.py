"""Threads that wait for storages: made when they are needed, gone with their owner, and daemons."""

import gc
import threading

import pytest
from support.interrupting import instructions_of, interrupted

from shoal.table.lower.threads import IoThreads

pytestmark = pytest.mark.threads


_before = set()  # of collections that other tests left


def threads():
    found = [thread for thread in threading.enumerate() if thread.name.startswith("shoal-prefetch-table")]
    return [thread for thread in found if thread not in _before]


@pytest.fixture(autouse=True)
def none_are_left():
    gc.collect()
    _before.clear()
    _before.update(threads())
    yield
    gc.collect()
    for thread in threads():
        thread.join(60)
    assert not threads()


def test_results_come_in_order_from_threads_that_are_made_when_they_are_needed():
    io_threads = IoThreads(3)
    assert not threads()
    assert io_threads.map(abs, []) == []
    assert io_threads.map(abs, [-7]) == [7] and not threads()
    assert io_threads.map(abs, range(-20, 0)) == list(range(20, 0, -1))
    assert 1 <= len(threads()) <= 3 and all(thread.daemon for thread in threads())


def test_threads_end_with_their_owner_wherever_an_interrupt_came():
    def call():
        assert IoThreads(3).map(abs, range(-4, 0)) == [4, 3, 2, 1]

    # Not those of no line, which clean up after an exception.
    lines = [one for one in instructions_of(call) if list(one.code.co_positions())[one.offset // 2][0] is not None]
    came = [interrupted(call, instruction) for instruction in lines]
    assert any(came)


def test_calls_are_made_beside_each_other():
    meeting = threading.Barrier(4)
    io_threads = IoThreads(3)
    for _ in range(3):
        io_threads.map(lambda _n: meeting.wait(60), range(4))


@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("at", [0, 2])
def test_what_a_call_raises_comes_to_the_caller_and_ends_no_thread(at, error):
    def work(n):
        if n == at:
            raise error(n)
        return n

    io_threads = IoThreads(2)
    for _ in range(5):
        with pytest.raises(error) as raised:
            io_threads.map(work, range(4))
        assert raised.value.args == (at,)
        del raised
    assert io_threads.map(abs, [-1, -2, -3]) == [1, 2, 3]


def test_a_caller_does_what_no_thread_comes_to():
    """Others wait for a storage that does not answer."""
    io_threads, may_go_on, busy = IoThreads(2), threading.Event(), threading.Semaphore(0)

    def wait(_n):
        busy.release()
        assert may_go_on.wait(60)

    waiting = threading.Thread(target=io_threads.map, args=(wait, range(3)))
    waiting.start()
    for _ in range(3):
        assert busy.acquire(timeout=60)
    assert io_threads.map(abs, [-1, -2, -3]) == [1, 2, 3]
    may_go_on.set()
    waiting.join()


def test_an_interrupt_of_the_caller_waits_for_nobody():
    io_threads, may_go_on, caller = IoThreads(1), threading.Event(), threading.current_thread()

    def work(_n):
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        assert may_go_on.wait(60)

    with pytest.raises(KeyboardInterrupt):
        io_threads.map(work, range(5))
    may_go_on.set()


def test_where_no_thread_can_be_had_the_caller_does_it_all(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    io_threads = IoThreads(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert io_threads.map(abs, [-1, -2, -3]) == [1, 2, 3]
    meeting = threading.Barrier(3)  # and once there are some, they are used
    io_threads.map(lambda _n: meeting.wait(60), range(3))


def test_several_callers_share_the_threads():
    io_threads, results = IoThreads(2), []
    callers = [
        threading.Thread(target=lambda n=n: results.append(io_threads.map(lambda k: k**n, range(9)))) for n in range(6)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == sorted([k**n for k in range(9)] for n in range(6))
