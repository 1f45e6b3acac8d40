"""Items that are made while others are used."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")


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
