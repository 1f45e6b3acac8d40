"""Work in threads of its own: making an item while the one before is used, and working in the background."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
# A background thread gets a tenth of a core that a thread of training wants, too.
_NICENESS = 10
# How long interrupted work may take to end: it checks for that every few milliseconds.
_SECONDS_TO_END = 10.0
# A signal that comes just before a wait does not end it: its handler runs when the wait does.
_SECONDS_TO_HEAR = 0.1


def made_ahead(items: Generator[ItemT, None, None]) -> Iterator[ItemT]:
    """Yields the same items. A thread makes each one while the one before it is used.

    Only that thread runs and closes the generator: an interrupt may end any wait for the thread, also the last one.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()  # queues of the interpreter's own: no interrupt leaves them locked
    made: SimpleQueue[_Made[ItemT]] = SimpleQueue()
    thread = threading.Thread(target=_make, args=(items, wanted, made), name="shoal-log-ahead", daemon=True)
    try:
        thread.start()
        wanted.put(True)
        while (one := made.get()).is_item:
            wanted.put(True)
            yield one.item  # type: ignore[misc]
        if one.error is not None:
            raise one.error
    finally:
        wanted.put(False)
        if thread.is_alive():
            thread.join()


@dataclass(frozen=True)
class _Made(Generic[ItemT]):
    """An item, or the end of the items, with the error that ended them if there was one."""

    is_item: bool
    item: ItemT | None = None
    error: BaseException | None = None


def _make(items: Generator[ItemT, None, None], wanted: "SimpleQueue[bool]", made: "SimpleQueue[_Made[ItemT]]") -> None:
    end = _Made[ItemT](False)
    try:
        while wanted.get():
            try:
                made.put(_Made(True, next(items)))
            except StopIteration:
                return
    except BaseException as error:
        end = _Made(False, error=error)
    finally:
        items.close()
        made.put(end)


class _Interrupted(BaseException):
    """Raised in background work once its caller was interrupted."""


def in_background(work: Callable[[Callable[[object], None]], ItemT]) -> ItemT:
    """Runs `work` in a thread and returns its result. The thread has a lower priority than the caller's, where the
    system has priorities of threads. `work` gets a function to call now and then, which raises once the caller was
    interrupted."""
    is_interrupted = threading.Event()

    def go_on(_done: object) -> None:
        if is_interrupted.is_set():
            raise _Interrupted

    answer: list[ItemT] = []
    failed: list[BaseException] = []
    done = threading.Lock()  # held until it is: an interrupt leaves events and futures locked

    def run() -> None:
        try:
            _be_nice()
            answer.append(work(go_on))
        except BaseException as error:
            failed.append(error)
        finally:
            done.release()

    done.acquire()
    thread = threading.Thread(target=run, name="shoal-log-background")
    try:
        thread.start()
        while not done.acquire(timeout=_SECONDS_TO_HEAR):
            pass
    except BaseException:
        is_interrupted.set()
        if thread.ident is not None:
            done.acquire(timeout=_SECONDS_TO_END)
        raise
    if failed:
        raise failed[0]
    return answer[0]


def _be_nice() -> None:
    if sys.platform == "linux":  # elsewhere it is that of the process
        with suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + _NICENESS, 19))
