"""Threads that wait for storages."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

_Work = Callable[[], None]


class IoThreads:
    """Up to so many I/O threads, each made when it is first needed. They end with this object, and do not keep the
    process alive: a storage may never answer.

    All that threads share are queues of the interpreter's own. What `threading` builds of locks in Python, as its
    semaphores, is lost where an interrupt comes at the wrong moment.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle: deque[None] = deque()  # one for each thread that waits for work
        self._lock = threading.Lock()
        self._threads = 0
        weakref.finalize(self, self._works.put, None).atexit = False

    def map(self, work: Callable[[ArgumentT], ResultT], arguments: Sequence[ArgumentT]) -> list[ResultT]:
        """What `work` returns for each of the arguments, or what it raised for one of them. This thread does what no
        other comes to: where all of them wait for others, it is as fast as alone."""
        left = deque(enumerate(arguments))
        answers: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        results: dict[int, ResultT] = {}
        try:
            for _ in arguments[1:]:
                self._begin(partial(_help, work, left, answers))
            while left:
                try:
                    at, argument = left.popleft()
                except IndexError:  # another one was faster
                    break
                results[at] = work(argument)
            while len(results) < len(arguments):
                at, result, error = answers.get()
                if error is not None:
                    raise error
                results[at] = result
        except BaseException:
            left.clear()  # no caller waits for them any more
            raise
        return [results[at] for at in range(len(arguments))]

    def _begin(self, work: _Work) -> None:
        """Have a thread work, if one waits for that or can be made."""
        try:
            self._idle.pop()
        except IndexError:
            with self._lock:
                if self._threads == self._most:
                    return
                name = f"shoal-prefetch-table-{self._threads + 1}"
                thread = threading.Thread(target=_serve, args=(self._works, self._idle), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there is none to be had
                    return
                self._threads += 1
        self._works.put(work)


def _help(
    work: Callable[[Any], Any], left: "deque[tuple[int, Any]]", answers: "SimpleQueue[tuple[int, Any, Any]]"
) -> None:
    """Work on the arguments that no thread has taken."""
    while left:
        try:
            at, argument = left.popleft()
        except IndexError:
            return
        try:
            answers.put((at, work(argument), None))
        except BaseException as error:
            answers.put((at, None, error))


def _serve(works: "SimpleQueue[_Work | None]", idle: "deque[None]") -> None:
    # It has no reference to its IoThreads, which would live as long as it.
    while (work := works.get()) is not None:
        work()
        del work  # or what it knows stays until the next one
        idle.append(None)
    works.put(None)  # for the next thread: an interrupt may have begun one that is not counted
