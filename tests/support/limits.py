"""What a call may take of the machine, for tests of files that others wrote."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path

# A sanitizer's own heap does not survive a limit.
IS_SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")
_COUNTS = Path("/proc/self/io")


@contextmanager
def little_memory(more=0):
    """An allocation of more than a log of some 100 KB explains fails, with an error that is not Shoal's. The kernel
    counts all memory of the process, also what threads reserve for their stacks and arenas. more: bytes beyond that."""
    if IS_SANITIZED:
        yield
        return
    room = more + ((512 + 80 * (os.cpu_count() or 1)) << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def bytes_read():
    """Bytes that this process has read from files so far; 0 where the system does not count them."""
    if not _COUNTS.exists():
        return 0
    return int(_COUNTS.read_text().split()[1])  # rchar
