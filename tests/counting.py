"""Counting the calls of the operating system that something makes."""

import errno
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal import _native
from shoal.errors import StorageError


class Count:
    """How many there were, once the block is left."""

    calls = 0


@contextmanager
def counted(call, folder, part="", most=20):
    """Gives the number of calls of a kind, writes or syncs, on files of a folder whose paths have a part. REQUIRES: there
    are at most so many, each of which takes one more."""
    own = Path(folder, f"{part}.count{part}")
    count = Count()
    with _native.File.create_new(str(own)) as file:
        # The one behind the most that are let through fails: those of its own tell how many others had taken.
        _native.inject_fault(getattr(_native.FileCall, call), part or str(folder), errno.EIO, after=most)
        try:
            yield count
        finally:
            left = 0
            with suppress(StorageError):
                while left <= most:
                    file.write(0, b"x") if call == "write" else file.sync()
                    left += 1
            assert left <= most, "an error was met, or there were more"
            count.calls = most - left
            _native.clear_faults()
    own.unlink()
