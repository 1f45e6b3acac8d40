"""Work in threads of its own: items that are made while others are used, and what should not be noticed."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
# Of a core that a thread of training wants too, it gets a tenth.
_NICENESS = 10
# For work that was interrupted: it looks whether it was every few milliseconds.
_SECONDS_TO_END = 10.0
# A signal that comes just before a wait does not end it: its handler runs when the wait does.
_SECONDS_TO_HEAR = 0.1


def made_ahead(items: Generator[ItemT, None, None]) -> Iterator[ItemT]:
    """The same items, each of which a thread makes while the one before it is used.

    The thread alone runs and closes what makes them: an interrupt may end any wait for it, also that for its end.
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
    """An item, or the end: by an error, if there is one."""

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
    """Nobody waits any more."""


def in_background(work: Callable[[Callable[[object], None]], ItemT]) -> ItemT:
    """What `work` returns, at a lower priority than that of who waits for it, where the system has one for a thread. It
    is given something to call now and then, which raises once who waits was interrupted."""
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
