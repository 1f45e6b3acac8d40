"""Reading a log while other processes remove files of it."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shoal.errors import CheckpointError, StorageError
from shoal.log.files import MOST_MANIFEST_BYTES, AnyPath, as_path, names_in, read_file

ResultT = TypeVar("ResultT")
# Each takes another process a commit and a compaction.
_MOST_TRIES = 20


def while_it_changes(path: AnyPath, call: Callable[[], ResultT]) -> ResultT:
    """Returns what a call that reads a log returns. Where another process removed files during the call, as a
    compaction or another save does, it is called again."""
    for _again in range(_MOST_TRIES - 1):
        before = manifests_in(path)
        try:
            return call()
        except (StorageError, CheckpointError):
            if manifests_in(path) == before:
                raise
    return call()


def manifests_in(path: AnyPath) -> list[bytes]:
    """Returns the manifests of a log, or of the ranks that saved to a folder, as they are now, without unreadable
    ones."""
    found: list[bytes] = []
    root = as_path(path)
    with suppress(StorageError):
        parts = [root / name for name in names_in(root) if name.startswith("rank-")]
        for part in (root, *parts):
            with suppress(StorageError):
                found.append(bytes(read_file(part / "MANIFEST.json", MOST_MANIFEST_BYTES)))
    return found
