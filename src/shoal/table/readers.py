"""Threads that wait for storages."""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_Call = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class Readers:
    """Up to so many threads, each made when it is first needed. They end with this object, and do not hold the process
    up: a storage may never answer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0
        weakref.finalize(self, _end, self._calls, most).atexit = False

    def map(self, work: Callable[..., ResultT], *arguments: Sequence[Any]) -> list[ResultT]:
        """What `work` returns for each of the arguments, or what it raised for the first that it did."""
        calls = list(zip(*arguments, strict=True))
        others = [self._begin(work, call) for call in calls[1:]]
        first = [work(*call) for call in calls[:1]]  # this thread waits anyway
        return first + [other.result() for other in others]

    def _begin(self, work: Callable[..., ResultT], arguments: tuple[Any, ...]) -> "Future[ResultT]":
        answer: Future[ResultT] = Future()
        self._calls.put((work, arguments, answer))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._threads < self._most:
                    self._threads += 1
                    name = f"shoal-prefetch-table-{self._threads}"
                    threading.Thread(target=_serve, args=(self._calls, self._idle), name=name, daemon=True).start()
        return answer


def _end(calls: "SimpleQueue[_Call | None]", threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


def _serve(calls: "SimpleQueue[_Call | None]", idle: threading.Semaphore) -> None:
    # It does not know its Readers, who would live as long as it.
    while (call := calls.get()) is not None:
        work, arguments, answer = call
        try:
            answer.set_result(work(*arguments))
        except BaseException as error:
            answer.set_exception(error)
        del call, work, arguments, answer  # or they stay until the next one
        idle.release()
