"""Threads that wait for storages."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

_Work = Callable[[], None]


class Readers:
    """Up to so many threads, each made when it is first needed. They end with this object, and do not hold the process
    up: a storage may never answer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0
        weakref.finalize(self, _end, self._works, most).atexit = False

    def map(self, work: Callable[[ArgumentT], ResultT], arguments: Sequence[ArgumentT]) -> list[ResultT]:
        """What `work` returns for each of the arguments, or what it raised for one of them. This thread
        does what no other comes to: where all of them wait for others, it is as fast as alone."""
        answers: list[Future[ResultT]] = [Future() for _ in arguments]
        left = deque(zip(arguments, answers, strict=True))
        for _ in arguments[1:]:
            self._begin(partial(_help, work, left))
        try:
            _take(work, left)
        except BaseException:
            left.clear()  # nobody waits for them any more
            raise
        return [answer.result() for answer in answers]

    def _begin(self, work: _Work) -> None:
        self._works.put(work)
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._threads < self._most:
                    self._threads += 1
                    name = f"shoal-prefetch-table-{self._threads}"
                    threading.Thread(target=_serve, args=(self._works, self._idle), name=name, daemon=True).start()


def _take(work: Callable[[ArgumentT], ResultT], left: "deque[tuple[ArgumentT, Future[ResultT]]]") -> None:
    """Work for those that nobody works for, up to the first that fails."""
    while True:
        try:
            argument, answer = left.popleft()
        except IndexError:
            return
        try:
            answer.set_result(work(argument))
        except BaseException as error:
            answer.set_exception(error)
            raise


def _help(work: Callable[[ArgumentT], ResultT], left: "deque[tuple[ArgumentT, Future[ResultT]]]") -> None:
    with suppress(BaseException):  # whoever waits for the answer hears of it
        _take(work, left)


def _end(works: "SimpleQueue[_Work | None]", threads: int) -> None:
    for _ in range(threads):
        works.put(None)


def _serve(works: "SimpleQueue[_Work | None]", idle: threading.Semaphore) -> None:
    # It does not know its Readers, who would live as long as it.
    while (work := works.get()) is not None:
        work()
        del work  # or what it knows stays until the next one
        idle.release()
