"""Limits on what a call may take, for tests."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path

# A sanitizer's own heap does not survive a limit.
IS_SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")


@contextmanager
def little_memory():
    """Who asks for more than a log of some 100 KB explains gets none: an error that is not Shoal's. The kernel counts
    all of it, whoever allocates, also what threads reserve for their stacks and arenas."""
    if IS_SANITIZED:
        yield
        return
    room = (512 + 80 * (os.cpu_count() or 1)) << 20
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
