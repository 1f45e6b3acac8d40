"""Writing the frames of a segment."""

from collections.abc import Callable, Sequence

from shoal import _native
from shoal.log.files import SEGMENT_HEADER_BYTES, FilePath


class SegmentWriter:
    """Writes at the end of a segment.

    require_own: called with this object before each write; it raises where the file is not the writer's any more.
    end: where the last whole commit ends. is_clean: whether nothing comes after it.
    headers: of the frames that were written since. holds_commit: whether a commit frame is among those.
    """

    def __init__(self, path: FilePath, end: int, require_own: "Callable[[SegmentWriter], None]") -> None:
        self.path = path
        self._require_own = require_own
        self.end = end
        self._at = end
        self._file = _native.File.open_to_write(path)
        self.headers: list[bytes] = []
        self.holds_commit = False
        self.is_clean = True

    def append(self, frame: Sequence[memoryview]) -> None:
        """Writes a frame after those before it. Its first piece is its header."""
        self._require_own(self)
        self.is_clean = False
        for piece in frame:
            if len(piece):
                self._file.write(self._at, piece)
                self._at += len(piece)
        self.headers.append(bytes(frame[0]))

    def append_commit(self, frame: Sequence[memoryview]) -> None:
        """Writes the frame that ends a commit."""
        self.append(frame)
        self.holds_commit = True

    @property
    def is_in_place(self) -> bool:
        """Whether the file at its path is still this one."""
        return self._file.is_in_place

    @property
    def is_empty(self) -> bool:
        """Whether it has no whole commit yet."""
        return self.end == SEGMENT_HEADER_BYTES

    def commit(self) -> None:
        """Makes what was appended a whole commit."""
        self.end = self._at
        self.headers = []
        self.holds_commit, self.is_clean = False, True

    def abandon(self) -> None:
        """Cuts off what was appended since the last whole commit."""
        self.headers = []
        self._require_own(self)
        self._at = self.end
        if not self.is_clean:
            self._file.truncate(self.end)
        self.holds_commit, self.is_clean = False, True

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
