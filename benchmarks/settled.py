"""Provides memory that the virtual machine already has, for cases that take much at once.

The host of a virtual machine may take free memory back after a second or two, and give it again page by page, at a
third of a GB a second where this was written: then the time of a load is the host's. So all free memory except the
amount that the case needs is held, and that amount is touched just before the case takes it. A case that needs little
memory does not use this: a run on few rows measures nothing.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LEAST = 1 << 30
_MOST = 64 << 30
_SPARE = 1 << 30
_PAGE = 4096


def _touched(size: int) -> mmap.mmap:
    region = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(region, dtype=torch.uint8)[::_PAGE] = 1
    return region


def _available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


class SettledMemory:
    """Releases so much memory when asked, and holds the rest. It does nothing for less than a GiB, nor on machines with
    more than 64."""

    def __init__(self, size: int) -> None:
        self._size = size
        rest = _available() - size - _SPARE
        self._is_needed = size >= _LEAST and 0 < rest <= _MOST
        self._rest = _touched(rest) if self._is_needed else None

    def give(self) -> None:
        """Makes so much memory free that the machine already has."""
        if self._is_needed:
            _touched(self._size).close()

    def close(self) -> None:
        """Releases all held memory."""
        if self._rest is not None:
            self._rest.close()
            self._rest = None


@contextmanager
def settled(size: int) -> Iterator[SettledMemory]:
    """Keeps memory ready for some rounds."""
    memory = SettledMemory(size)
    try:
        yield memory
    finally:
        memory.close()
