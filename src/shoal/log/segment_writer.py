"""Writing the frames of a segment."""

from collections.abc import Callable, Sequence

from shoal import _native
from shoal.log.files import SEGMENT_HEADER_BYTES, FilePath


class SegmentWriter:
    """The end of a segment that is being written. require_own: called before each write, with this; it raises where
    the file is not the writer's any more."""

    def __init__(self, path: FilePath, end: int, require_own: "Callable[[SegmentWriter], None]") -> None:
        self.path = path
        self._require_own = require_own
        self.end = end  # behind the last whole commit
        self._at = end
        self._file = _native.File.open_to_write(path)
        self.headers: list[bytes] = []  # of the commit that is being written
        self.holds_commit = False  # a commit frame that is not known to be kept
        self.is_clean = True  # whether nothing stands after the last whole commit

    def append(self, frame: Sequence[memoryview]) -> None:
        """Write a frame, in pieces of which the first is its header, behind those before it."""
        self._require_own(self)
        self.is_clean = False
        for piece in frame:
            if len(piece):
                self._file.write(self._at, piece)
                self._at += len(piece)
        self.headers.append(bytes(frame[0]))

    def append_commit(self, frame: Sequence[memoryview]) -> None:
        """Write the frame that ends a commit."""
        self.append(frame)
        self.holds_commit = True

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        return self._file.is_in_place

    @property
    def is_empty(self) -> bool:
        """Whether it has no whole commit yet."""
        return self.end == SEGMENT_HEADER_BYTES

    def commit(self) -> None:
        """What was appended is a whole commit."""
        self.end = self._at
        self.headers = []
        self.holds_commit, self.is_clean = False, True

    def abandon(self) -> None:
        """Take what was appended since the last whole commit away again."""
        self.headers = []
        self._require_own(self)
        self._at = self.end
        if not self.is_clean:
            self._file.truncate(self.end)
        self.holds_commit, self.is_clean = False, True

    def sync(self) -> None:
        """What was written is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Let it go."""
        self._file.close()
