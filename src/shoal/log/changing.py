"""Reading a log whose files others remove."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shoal.errors import CheckpointError, StorageError

ResultT = TypeVar("ResultT")
# Each takes another process a commit and a compaction.
_MOST_TRIES = 20


def while_it_changes(path: Path, call: Callable[[], ResultT]) -> ResultT:
    """What a call that reads a log returns. Where another process removed files under it, as who compacts or saves
    anew does, it is called again."""
    for _again in range(_MOST_TRIES - 1):
        before = manifests_in(path)
        try:
            return call()
        except (StorageError, CheckpointError):
            if manifests_in(path) == before:
                raise
    return call()


def manifests_in(path: Path) -> list[bytes]:
    """The manifests of a log, or of the ranks that saved to a folder, as they are now."""
    found = []
    for part in sorted([path, *path.glob("rank-*")]):
        with suppress(OSError):
            found.append((part / "MANIFEST.json").read_bytes())
    return found
