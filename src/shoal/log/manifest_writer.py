"""The manifest of a log, as the log's writer changes it. A process that compacts changes it, too."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from shoal.errors import ShoalError
from shoal.log.files import Files
from shoal.log.hold import Hold
from shoal.log.manifest import Manifest, changing_manifest, next_epoch, read_manifest


class ManifestWriter:
    """Changes the manifest for one writer, and names that writer in it before its first version.

    now: the manifest as the writer knows it. names_writer: whether it names the writer, on the disk.
    is_unknown: whether a change failed, and it is not known what the manifest says.
    """

    def __init__(self, files: Files, hold: Hold) -> None:
        self._files = files
        self._hold = hold
        self.now = hold.manifest
        own = next_epoch(self.now)
        self.epoch, self.writer = own.epoch, own.writer
        self.names_writer = False
        self.is_unknown = False

    def change(self, change: Callable[[Manifest], Manifest], require_own: Callable[[], None]) -> Manifest:
        """Changes the manifest, and returns the one before. Where that fails, the manifest is as before; or it is
        changed and is written again before the next commit, as it may not be on the disk. require_own: raises where the
        log is not the writer's any more."""
        with changing_manifest(self._files) as write:
            require_own()
            now = read_manifest(self._files)
            self._hold.require_own(now)
            changed = replace(change(now), epoch=self.epoch, writer=self.writer)
            try:
                if changed != now or not self.names_writer:
                    write(changed)
                self._hold.follow(changed)
                self.now, self.names_writer = changed, True
            except BaseException:
                if self._is_in_place(changed):
                    self._hold.follow(changed)
                    self.now, self.names_writer = changed, False
                elif not self._is_in_place(now):
                    self.is_unknown = True
                raise
        return now

    def _is_in_place(self, manifest: Manifest) -> bool:
        """Returns whether the log's manifest is that one."""
        with suppress(ShoalError):
            return read_manifest(self._files) == manifest
        return False

    def writes_to(self, first: int) -> bool:
        """Returns whether the manifest names the segment of that first version as the one that is written to."""
        return self.now.segments[-1] == first
