"""Files of other formats, through the one door to the file system."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal import _native
from shoal.errors import CheckpointError, InputError
from shoal.log.files import FilePath, as_path, remove_file, require_held, size_of


@contextmanager
def replacing(path: Path) -> Iterator[FilePath]:
    """Gives a temporary name to write to, which becomes `path` at the end; where that fails, nothing is left of it."""
    place = as_path(path.parent) / path.name  # a link of that name is replaced itself
    if _native.look_at(place.parent) is None:
        raise InputError(f"[file {path}] wanted a file in a folder that is there; got {path.parent}. Make it first.")
    temporary = place.with_name(path.name + ".tmp")
    remove_file(temporary)  # of a writer that died
    try:
        yield temporary
        _native.rename_file(temporary, place)
        _native.sync_directory(place.parent)
    except BaseException:
        remove_file(temporary)
        raise


class Sink:
    """A new file, as what writes to Python's files sees it."""

    def __init__(self, path: FilePath) -> None:
        self._writer = _native.FileWriter.create(path)
        self._is_abandoned = False
        self.closed = False

    def write(self, data: Any) -> int:
        """Append some bytes."""
        piece = memoryview(data).cast("B")
        if not self._is_abandoned:
            self._writer.append(piece)
        return len(piece)

    def flush(self) -> None:
        """What waits is written by `finish`."""

    def close(self) -> None:
        """Write no more."""
        self.closed = True

    def finish(self) -> None:
        """All of it is on the disk."""
        self._writer.finish()

    def abandon(self) -> None:
        """End it as it is. Later writes, by code that still finishes its work, go nowhere."""
        self._is_abandoned = True
        self._writer.abandon()


class Source:
    """A file that is there, as what reads Python's files sees it."""

    def __init__(self, path: Path | FilePath) -> None:
        place = as_path(path)
        if size_of(place) is None:
            raise CheckpointError(f"[file {path}] wanted a file to import; there is none. Is the path right?")
        require_held(place)
        self._file = _native.File.open_to_read(place)
        self.size = self._file.size()
        self._at = 0
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_at(self, offset: int, count: int) -> bytearray:
        """Some bytes; fewer where the file ends."""
        out = bytearray(max(min(count, self.size - offset), 0))
        if out:
            self._file.read(offset, out)
        return out

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        out = bytes(self.read_at(self._at, self.size - self._at if count < 0 else count))
        self._at += len(out)
        return out

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next bytes are."""
        return self._at

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Let it go."""
        self.closed = True
        self._file.close()
