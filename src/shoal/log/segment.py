"""A segment: a header of 64 bytes, then frames. A version's rows come first, its commit frame last.

The first commit says all; of the others, most say only what changed. A base says what the commit before the first one
said, where a repair let the segment begin with one that does not say all.

What stands behind the last whole commit is being written, or was when its writer died.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shoal import _native
from shoal.errors import StorageError
from shoal.log.commit import Commit
from shoal.log.files import FilePath
from shoal.records.excerpt import sentence
from shoal.records.frames import (
    HEADER_BYTES,
    FrameHeader,
)

# magic, format version, 0, log, first version, 0, crc32c of the 60 bytes before it
_HEADER = struct.Struct("<8sII16sQ20sI")
_MAGIC = b"SHOALSEG"
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame is."""

    header: FrameHeader
    offset: int  # of its payload

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.offset - HEADER_BYTES + self.header.frame_bytes


@dataclass(frozen=True)
class WholeCommit:
    """A commit whose frames are all there, and where they are."""

    commit: Commit
    segment: int  # its first version
    frames: Sequence[Place]
    begin: int
    end: int


class DamagedError(StorageError):
    """The bytes of a segment are not what was written, from an offset on: the end of the last whole version.

    version: the first that cannot be read. segment: the first version of its segment.
    """

    segment = offset = version = 0

    @staticmethod
    def at(path: FilePath, segment: int, offset: int, version: int, what: str) -> "DamagedError":
        """The error for a place in a segment."""
        before = "Versions before it can still be read. " if version > 1 else ""
        error = DamagedError(
            f"[file {path}] version {version}, offset {offset}: {sentence(what)} {before}Restore the file from another "
            f"copy, or have `shoal repair` set what is damaged aside."
        )
        error.segment, error.offset, error.version = segment, offset, version
        return error

    def reading(self, version: int) -> "DamagedError":
        """The same error, which says that a version is the newest that can be read as it is."""
        text = str(self).replace("Versions before it can still be read. ", "")
        said = (
            f"Version {version} can still be read, with version={version}; a repair goes on from the highest whole one."
        )
        error = DamagedError(f"{text} {said}")
        error.segment, error.offset, error.version = self.segment, self.offset, self.version
        return error


def header_of(identity: str, first: int) -> bytes:
    """The first bytes of a segment."""
    head = _HEADER.pack(_MAGIC, _FORMAT_VERSION, 0, bytes.fromhex(identity), first, bytes(20), 0)[:-4]
    return head + struct.pack("<I", _native.crc32c(head))


def is_header(data: bytes) -> bool:
    """Returns whether bytes are the header of a segment, of any log, with the right checksum."""
    return len(data) == _HEADER.size and data[-4:] == struct.pack("<I", _native.crc32c(data[:-4]))


def digest_of(headers: Sequence[bytes]) -> dict[str, int]:
    """What a commit frame says of the frames before it: how many, and a checksum of their headers, which have those of
    their payloads."""
    return {"count": len(headers), "crc32c": _native.crc32c(b"".join(headers))}
