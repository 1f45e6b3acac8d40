"""Keeping what a repair takes out of a log: set-aside/<number>/ holds the files under their names, and WHY.txt."""

from contextlib import suppress

from shoal import _native
from shoal.errors import StorageError
from shoal.log.files import FilePath, Files, make_file, names_in, remove_folder, size_of

_PIECE_BYTES = 4 << 20
_SUFFIX = ".tmp"


class Aside:
    """A new folder in set-aside/. It has a temporary name until it is complete; that of a repair that died is
    removed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        for name in names_in(files.set_aside):
            if name.endswith(_SUFFIX):
                remove_folder(files.set_aside / name)
        numbers = [int(name) for name in names_in(files.set_aside) if name.isdecimal()]
        self.folder = files.set_aside / f"{max(numbers, default=0) + 1:04}"
        self._temporary = self.folder.with_name(self.folder.name + _SUFFIX)
        self._folders: set[FilePath] = set()
        self.bytes = 0

    def take(self, path: FilePath, begin: int = 0) -> None:
        """Keeps a file of the log: all of it, under a second name, or a copy of the bytes from an offset on."""
        size = size_of(path)
        if size is None or size <= begin:
            return
        to = self._temporary / path.below.removeprefix(self._files.root.below).lstrip("/")
        to = to if begin == 0 else to.with_name(f"{to.name}.from-{begin}")
        _native.make_directories(to.parent)
        self._folders.add(to.parent)
        if begin or not _native.link_file(path, to):
            _copy(path, to, begin, size)
        self.bytes += size - begin

    def finish(self, why: str) -> None:
        """Writes why, waits until all is on the disk, and gives the folder its name."""
        if not self.bytes:
            return
        make_file(self._temporary / "WHY.txt", f"{why}\n".encode())
        for folder in (*self._folders, self._temporary):
            _native.sync_directory(folder)
        _native.rename_file(self._temporary, self.folder)
        for folder in (self._files.set_aside, self._files.root):
            _native.sync_directory(folder)

    def abandon(self) -> None:
        """Removes the folder. The log still has all that was taken."""
        for folder in (self._temporary, self.folder):
            with suppress(StorageError):
                remove_folder(folder)


def _copy(path: FilePath, to: FilePath, begin: int, size: int) -> None:
    with _native.File.open_to_read(path) as source, _native.File.create_new(to) as file:
        at = begin
        while (at := source.next_data(at)) < size:  # holes stay holes: they may be more than the disk has
            data = bytearray(min(_PIECE_BYTES, size - at))
            source.read(at, data)
            file.write(at - begin, data.rstrip(b"\0"))
            at += len(data)
        file.truncate(size - begin)
        file.sync()
