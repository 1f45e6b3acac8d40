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


def in_background(work: Callable[[], ItemT]) -> ItemT:
    """What `work` returns, at a lower priority than that of who waits for it, where the system has one for a thread."""
    with ThreadPoolExecutor(1, "shoal-log-background", initializer=_be_nice) as thread:
        return thread.submit(work).result()


def _be_nice() -> None:
    if sys.platform == "linux":  # elsewhere it is that of the process
        with suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + _NICENESS, 19))
