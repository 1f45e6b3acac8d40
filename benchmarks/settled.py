"""Memory that the machine has already, for cases that take much of it at once.

The host of a virtual machine may take free memory back after a second or two, and give it again page by page, at a
third of a GB a second where this was written: then a load shows what the host does. So all free memory but what is
needed is held, and that is touched right before it is given back for the case to take. A case that needs little does
without: a run on few rows measures nothing.
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
    """Gives so much memory back when asked, and holds the rest. It does nothing for less than a GiB, nor on machines of
    more than 64."""

    def __init__(self, size: int) -> None:
        self._size = size
        rest = _available() - size - _SPARE
        self._is_needed = size >= _LEAST and 0 < rest <= _MOST
        self._rest = _touched(rest) if self._is_needed else None

    def give(self) -> None:
        """So much is free now, and the machine has it."""
        if self._is_needed:
            _touched(self._size).close()

    def close(self) -> None:
        """Nothing is held any more."""
        if self._rest is not None:
            self._rest.close()
            self._rest = None


@contextmanager
def settled(size: int) -> Iterator[SettledMemory]:
    """For some rounds."""
    memory = SettledMemory(size)
    try:
        yield memory
    finally:
        memory.close()
