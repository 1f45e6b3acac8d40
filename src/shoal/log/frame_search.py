"""Finding frames in a segment that is damaged, by the magic word of their headers."""

from typing import Protocol

import torch

from shoal.records.frames import FRAME_ALIGNMENT, HEADER_BYTES, MAGIC

PIECE_BYTES = 4 << 20  # that are read together; a multiple of a frame's alignment
_MAGIC_WORD = int.from_bytes(MAGIC, "little", signed=True)
_WORDS = FRAME_ALIGNMENT // 4


class Searched(Protocol):
    """A file, as far as a search reads it."""

    def size(self) -> int:
        """Returns its bytes."""

    def data_from(self, offset: int) -> int:
        """Returns where the next bytes are that are not a hole's; the end where none are."""

    def read(self, offset: int, count: int) -> bytearray:
        """Returns some bytes. REQUIRES: the file has them."""


class FrameSearch:
    """Looks for frames in a segment, from ascending offsets. Each byte is read once."""

    def __init__(self, segment: Searched) -> None:
        self._segment = segment
        self._size = segment.size()
        self._begin = 0
        self._data = bytearray()
        self._found: list[int] = []  # offsets in these bytes that were not returned yet, the last one first

    def next_from(self, at: int) -> int | None:
        """Returns where the next frame seems to begin, from an offset on, which is a multiple of a frame's
        alignment."""
        while True:
            while self._found:
                if self._found[-1] >= at:
                    return self._found[-1]
                self._found.pop()
            begin = max(at, self._begin + len(self._data) // FRAME_ALIGNMENT * FRAME_ALIGNMENT)
            begin = max(begin, self._segment.data_from(begin) // FRAME_ALIGNMENT * FRAME_ALIGNMENT)
            if begin + HEADER_BYTES > self._size:
                return None
            self._begin = begin
            self._data = self._segment.read(begin, min(PIECE_BYTES, self._size - begin))
            whole = len(self._data) // FRAME_ALIGNMENT * FRAME_ALIGNMENT
            words = torch.frombuffer(self._data, dtype=torch.int32, count=whole // 4)[::_WORDS]
            self._found = [begin + FRAME_ALIGNMENT * one for one in (words == _MAGIC_WORD).nonzero()[:, 0].tolist()]
            self._found.reverse()

    def header(self, begin: int) -> bytes:
        """Returns the header of the frame that was found last."""
        return bytes(self._data[begin - self._begin : begin - self._begin + HEADER_BYTES])
