"""Counting the calls of the operating system that something makes, and letting one of them fail."""

import errno
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal import _native
from shoal.errors import StorageError


class Calls:
    """What is known once the block is left."""

    has_failed = False
    count = 0  # if none did


_CALLS = {
    "open": lambda _file, path: _native.File.open_to_read(path).close(),
    "write": lambda file, _path: file.write(0, b"x"),
    "sync": lambda file, _path: file.sync(),
    "remove": lambda _file, path: _native.remove_file(f"{path}.none"),
    "rename": lambda _file, path: _native.rename_file(path, path),
    "truncate": lambda file, _path: file.truncate(1),
    "sync_directory": lambda _file, path: _native.sync_directory(str(Path(path).parent)),
    "make_directory": lambda _file, path: _native.make_directories(str(Path(path).parent)),
}


@contextmanager
def failing(call, folder, part="", *, after, error=errno.EIO):
    """The call behind so many of its kind, those of `_CALLS`, fails, on files of a folder whose paths have a part."""
    own = Path(folder, f"{part}.count{part}")
    calls = Calls()
    with _native.File.create_new(str(own)) as file:
        _native.inject_fault(getattr(_native.FileCall, call), part or str(folder), error, after=after)
        try:
            yield calls
        finally:
            # Who did not meet it left it to these, as many as it left.
            left = 0
            with suppress(StorageError):
                while left <= after:
                    _CALLS[call](file, str(own))
                    left += 1
            calls.has_failed, calls.count = left > after, after - left
            _native.clear_faults()
    own.unlink()


@contextmanager
def counted(call, folder, part="", most=20):
    """As `failing`, with none that fails. REQUIRES: there are no more calls than that."""
    with failing(call, folder, part, after=most) as calls:
        yield calls
    assert not calls.has_failed
