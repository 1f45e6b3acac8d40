"""Work in threads of its own."""

import os
import signal
import threading
import time

import pytest

from shoal.log.threads import in_background, made_ahead


def test_items_come_in_order_and_each_is_made_while_the_one_before_it_is_used():
    made, one_more = [], threading.Semaphore(0)

    def items():
        for number in range(5):
            made.append(number)
            one_more.release()
            yield number

    seen = []
    used = 0
    for item in made_ahead(items()):
        seen.append(item)
        for _ in range(min(item + 2, 5) - used):
            assert one_more.acquire(timeout=60)
        used = min(item + 2, 5)
        assert made == list(range(min(item + 2, 5)))
    assert seen == list(range(5))
    assert list(made_ahead(item for item in ())) == []


def test_what_items_raise_is_raised_behind_those_before():
    def items():
        yield 1
        raise ValueError("the second")

    seen = []
    with pytest.raises(ValueError, match="the second"):
        seen.extend(made_ahead(items()))  # a list is extended item by item
    assert seen == [1]


def test_who_leaves_early_closes_what_makes_them():
    is_closed = False

    def items():
        nonlocal is_closed
        try:
            yield from range(100)
        finally:
            is_closed = True

    ahead = made_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert is_closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-log-ahead")]


def test_background_work_has_a_lower_priority_and_its_answer_comes_back():
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    theirs = in_background(lambda _go_on: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert theirs == min(own + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    with pytest.raises(ValueError, match="no"):
        in_background(lambda _go_on: int("no"))


@pytest.fixture
def interrupts():
    """Ctrl-C raises, also where a shell had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_background_work_ends_when_who_waits_is_interrupted(interrupts):
    for _ in range(50):  # the signal comes before the wait, in it, and just as it begins
        rounds = 0

        def work(go_on):
            nonlocal rounds
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                time.sleep(0.001)
                rounds += 1
                go_on(rounds)

        with pytest.raises(KeyboardInterrupt):
            in_background(work)
        seen = rounds
        time.sleep(0.005)
        assert seen == rounds
