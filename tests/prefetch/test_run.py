"""A pass over a loader, whatever its batches do on their way: in order, each once, and nothing is left behind."""

import itertools
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import CapacityError, OutOfMemoryError, PrefetchWarning, StorageError
from shoal.prefetch.run import Run

pytestmark = pytest.mark.threads

METHODS = ("find", "read", "has_room", "place_into_room", "place")


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Course:
    """What a batch will do: whose work it is, how long each call takes, which one fails, and where it finds room."""

    kind: str
    milliseconds: tuple[int, ...]  # by method
    fails: str | None
    has_room: bool
    comes_into_room: bool
    asks_to_wait: int  # how often, where another thread places it
    leaves_memory: bool  # to others that are read ahead


# Whether a batch waits for something, and whether the loop works for it.
KINDS = {"host": (True, True), "device over a storage": (True, False), "device": (False, False), "not staged": None}


def courses(kinds):
    return st.builds(
        Course,
        kind=st.sampled_from(kinds),
        milliseconds=st.tuples(*[st.sampled_from([0, 0, 0, 1, 3])] * len(METHODS)),
        fails=st.sampled_from([None] * 12 + list(METHODS)),
        has_room=st.booleans(),
        comes_into_room=st.booleans(),
        asks_to_wait=st.sampled_from([0, 0, 1, 3]),
        leaves_memory=st.booleans(),
    )


class Journey:
    """One batch on its way."""

    def __init__(self, number, course, notes):
        self.number, self.course, self.notes = number, course, notes
        self.waits, self.in_loop = KINDS[course.kind]
        self.calls, self.is_released = [], False

    def _begin(self, method):
        self.calls.append(method)
        self.notes.append((method, self.number))
        time.sleep(self.course.milliseconds[METHODS.index(method)] / 1000)
        if self.course.fails == method:
            raise Broken(method)

    def find(self, _threads):
        if "find" not in self.calls:
            self._begin("find")

    def may_read(self, is_first):
        return is_first or self.course.leaves_memory

    def expect(self):
        pass

    def read(self):
        self._begin("read")

    def has_room(self):
        self._begin("has_room")
        return self.course.has_room

    def place_into_room(self, _threads):
        with self._alone():
            self._begin("place_into_room")
        return self.course.comes_into_room

    def place(self, may_wait):
        with self._alone():
            self._begin("place")
            for _ in range(self.course.asks_to_wait):
                if not may_wait():
                    return

    def _alone(self):
        """Batches that wait are placed one after the other. The loop places the others at the same time."""
        return self.notes.placing if self.waits else nullcontext()

    def release(self):
        self.is_released = True


class Alone:
    """Raises where two are in it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.was_shared = False

    def __enter__(self):
        self.has = self._lock.acquire(blocking=False)
        self.was_shared |= not self.has

    def __exit__(self, *_):
        if self.has:
            self._lock.release()


class Notes(list):
    def __init__(self):
        super().__init__()
        self.placing = Alone()

    def of(self, *methods):
        return [number for method, number in self if method in methods]


def ordered(numbers):
    return all(one < two for one, two in itertools.pairwise(numbers))


@pytest.fixture(autouse=True)
def _no_thread_dies(monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", lambda what: died.append(what.exc_value))
    yield
    assert not died


def loaded(courses, delays, raises):
    for number in range(len(courses)):
        time.sleep(delays[number % len(delays)] / 1000)
        yield number
    if raises:
        raise Broken("load")


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3).flatmap(
        lambda kinds: st.lists(courses(kinds), max_size=12)
    ),
    st.integers(1, 10),
    st.lists(st.sampled_from([0, 0, 1, 4]), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 0, 1, 4]), min_size=1, max_size=4),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_every_batch_comes_once_in_order_and_is_let_go(courses, depth, loading, training, raises, leave_after):
    notes = Notes()
    journeys = [Journey(n, course, notes) if KINDS[course.kind] else None for n, course in enumerate(courses)]

    run = Run(loaded(courses, loading, raises), journeys.__getitem__, depth, [])
    given, error = [], None
    try:
        while leave_after is None or len(given) < leave_after:
            number = run.next()
            given.append(number)
            journey = journeys[number]
            assert all(one.is_released for one in journeys[:number] if one)
            if journey and journey.waits and journey.course.fails is None:
                assert "read" in journey.calls and {"place", "place_into_room"} & set(journey.calls)
                assert not journey.is_released
            on_way = {one for one in notes.of("find") if one > number}
            assert len(on_way) <= depth
            time.sleep(training[len(given) % len(training)] / 1000)
    except StopIteration:
        assert not raises
    except Broken as raised:
        error = raised
    finally:
        run.close()
        run.await_threads(30)
    assert given == list(range(len(given)))
    if leave_after is None or leave_after > len(courses):
        assert len(given) == len(courses) and (error is not None) == raises
    assert not any(thread.is_alive() for thread in run._threads)
    assert not notes.placing.was_shared
    if len({KINDS[course.kind] for course in courses} - {None, KINDS["device"]}) < 2:
        assert ordered(notes.of("find"))
    for journey in filter(None, journeys):
        assert journey.is_released or not journey.calls
        order = [method for method in journey.calls if method != "has_room"]
        assert order == sorted(order, key=METHODS.index) and len(set(order)) == len(order)


@given(st.integers(1, 6), st.integers(0, 5), st.sampled_from(["find", "place_into_room"]))
def test_an_interrupt_in_the_loops_work_ends_it_and_leaves_nothing_behind(depth, at, method):
    notes = Notes()
    course = Course("host", (0,) * len(METHODS), None, True, True, 0, True)
    journeys = [Journey(number, course, notes) for number in range(8)]

    def interrupted(_threads):
        raise KeyboardInterrupt

    setattr(journeys[at], method, interrupted)
    run = Run(iter(range(8)), journeys.__getitem__, depth, [])
    with pytest.raises(KeyboardInterrupt):
        for _ in range(8):
            run.next()
    run.close()
    run.await_threads(30)
    assert not any(thread.is_alive() for thread in run._threads)
    assert all(journey.is_released for journey in journeys if journey.calls)


@dataclass(frozen=True)
class Failure:
    """What a call of a batch raises, and whether the loop tells of it."""

    error: BaseException
    is_told: bool


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Broken("a user's"), True),
        Failure(StorageError("a disk's"), True),
        Failure(SystemExit(), True),
        Failure(CapacityError("the lookup's"), False),
        Failure(OutOfMemoryError("the lookup's"), False),
    ],
    ids=lambda failure: type(failure.error).__name__,
)
@pytest.mark.parametrize("method", ["read", "place"])
def test_failures_of_storages_are_told_of_and_no_others(failure, method):
    course = Course("device over a storage", (0,) * len(METHODS), None, False, False, 0, True)
    journeys = [Journey(number, course, Notes()) for number in range(4)]

    def fail(*_):
        raise failure.error

    setattr(journeys[1], method, fail)
    run = Run(iter(range(4)), journeys.__getitem__, 2, [])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [run.next() for _ in range(4)] == [0, 1, 2, 3]
    run.close()
    assert [warning.category for warning in told] == [PrefetchWarning] * failure.is_told
    assert all(type(failure.error).__name__ in str(warning.message) for warning in told)


def test_what_fails_because_a_loop_is_left_is_not_told_of():
    course = Course("device over a storage", (0,) * len(METHODS), None, False, False, 0, True)
    reads, is_left = threading.Event(), threading.Event()

    class Left(Journey):
        def read(self):
            reads.set()
            assert is_left.wait(60)
            raise Broken("left")

        def release(self):
            super().release()
            is_left.set()

    left = Left(0, course, Notes())
    run = Run(iter(range(1)), [left].__getitem__, 1, [])
    assert reads.wait(60)
    run.close()
    run.await_threads(30)
    assert left.is_released and run._failures.first is None
