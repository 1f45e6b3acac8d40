"""Which user owns the files that a writer believes, writes and removes. A log may come from a stranger, in an archive
or on a disk that several users share, and its content decides which files a writer removes.

A folder or file of another user than the one that writes is refused, as git does it (safe.directory), also for root. A
link, a pipe or a device in the place of a file or folder of the log is refused, too: no link is ever followed, and the
check here raises before anything changes.
"""

import os
import pwd
from collections.abc import Iterator

from shoal import _native
from shoal.errors import CheckpointError
from shoal.log.files import FilePath, Files, names_in, size_of

# The folders of which a writer believes or removes files, and how many levels deep those are.
_DEPTHS = (("segments", 1), ("dense", 1), ("snapshots", 2), ("set-aside", 0))


def require_own_files(files: Files, where: str, trust: bool) -> None:
    """Raises StorageError where a log has something else than files and folders, and CheckpointError where one of them
    is another user's, unless `trust` is set."""
    user = os.geteuid()
    for path in _places(files):
        entry = _native.look_at(path)
        if entry is None or entry.owner == user or trust:
            continue
        raise CheckpointError(
            f"[{where}] wanted files of user {_named(user)}, which writes here; {path} belongs to user "
            f"{_named(entry.owner)}, which can decide by it what is written and removed. Give trust=True (--trust) if "
            f"that is right; reading needs no trust."
        )


def _places(files: Files) -> Iterator[FilePath]:
    """Yields each path that a writer may touch."""
    yield files.root
    known = (files.manifest, files.head, files.writer, files.lock, files.manifest_lock, files.compact_lock)
    for path in known:
        for one in (path, path.with_name(path.name + ".tmp")):
            size_of(one)  # raises where it is no file
            yield one
    for name, depth in _DEPTHS:
        yield from _below(files.root / name, depth)


def _below(folder: FilePath, depth: int) -> Iterator[FilePath]:
    yield folder
    names = names_in(folder)  # raises where it is no folder
    for name in names if depth else ():
        if depth > 1:
            yield from _below(folder / name, depth - 1)
        else:
            size_of(folder / name)
            yield folder / name


def _named(user: int) -> str:
    try:
        return f"{user} ({pwd.getpwuid(user).pw_name})"
    except KeyError:  # of another system
        return str(user)
