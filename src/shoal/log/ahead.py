"""Work in threads of its own: items that are made while others are used, and what should not be noticed."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

ItemT = TypeVar("ItemT")
# Of a core that a thread of training wants too, it gets a tenth.
_NICENESS = 10
# For work that was interrupted: it looks whether it was every few milliseconds.
_SECONDS_TO_END = 10.0
# A signal that comes just before a wait does not end it: its handler runs when the wait does.
_SECONDS_TO_HEAR = 0.1


def made_ahead(items: Generator[ItemT, None, None]) -> Iterator[ItemT]:
    """The same items, each of which a thread makes while the one before it is used."""
    end = object()
    try:
        with ThreadPoolExecutor(1, "shoal-log-ahead") as thread:
            coming = thread.submit(next, items, end)
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]
    finally:
        items.close()


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
