"""Whether a writer still has the log that it opened. A person may take its LOCK for a stale one and remove it, or put
another folder in the place of the log's; another process can then write, too."""

import threading
from typing import Any

from shoal import _native
from shoal.errors import StorageError
from shoal.log.files import Files, size_of
from shoal.log.manifest import Manifest, read_manifest


class LostError(StorageError):
    """A log is not the writer's any more. may_come_back: whether nothing is in the place of its files, which may only
    have been moved."""

    may_come_back = False


class Hold:
    """A log's LOCK and its manifest, as a writer has them.

    Thread safety: all methods may be called by several threads at once.
    """

    def __init__(self, files: Files, where: str, lock: Any, manifest: Manifest) -> None:
        self._files = files
        self._where = where
        self._lock = lock
        self._mutex = threading.Lock()
        # The manifest's file is kept open, so that no other file gets its inode number.
        self._file: Any = None
        self.follow(manifest)

    @property
    def manifest(self) -> Manifest:
        """The writer's manifest."""
        return self._manifest

    def follow(self, manifest: Manifest) -> None:
        """Takes another manifest as the writer's."""
        with self._mutex:
            self._manifest = manifest
            self._let_go()

    def close(self) -> None:
        """Closes the manifest's file."""
        with self._mutex:
            self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def check(self, segment: Any) -> None:
        """Raises LostError where the lock, the segment or the manifest at their paths are not the writer's. It looks
        only at which files the names lead to, and reads the manifest only where another process has changed it, as a
        compaction does."""
        for file, path in ((self._lock, self._files.lock), (segment, segment.path)):
            if not file.is_in_place:
                raise self._lost(str(path), size_of(path) is None)
        with self._mutex:
            if self._file is None or not self._file.is_in_place:
                self._read()

    def _read(self) -> None:
        path = self._files.manifest
        self._let_go()
        if size_of(path) is None:
            raise self._lost(str(path), is_gone=True)
        file = _native.File.open_to_read(path)
        try:
            self.require_own(read_manifest(self._files))
        except BaseException:
            file.close()
            raise
        self._file = file

    def require_own(self, found: Manifest) -> None:
        """Raises LostError where a manifest is another log's, or another writer's."""
        own = self._manifest
        if (found.identity, found.epoch, found.writer) != (own.identity, own.epoch, own.writer):
            raise self._lost(str(self._files.manifest), is_gone=False)

    def _lost(self, path: str, is_gone: bool) -> LostError:
        what = (
            "is not there any more: it was removed, or its folder was moved or removed. Put it back"
            if is_gone
            else "is not the one that this log was opened with: another process may write the log. Open it again"
        )
        error = LostError(
            f"[{self._where}] {path} {what}, or open another log; `verify` says whether all is well. Nothing of this "
            f"call is acknowledged."
        )
        error.may_come_back = is_gone
        return error
