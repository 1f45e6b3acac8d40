"""A segment: a header of 64 bytes, then frames. A version's rows come first, its commit frame last.

The first commit says all; most of the others say only what changed. Where a repair let a segment begin with a commit
that does not say all, a base comes first: it says what the commit before that one said.

The bytes after the last whole commit are being written, or were when their writer died.
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
    """A frame's header, and where its payload is."""

    header: FrameHeader
    offset: int  # of the payload

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.offset - HEADER_BYTES + self.header.frame_bytes


@dataclass(frozen=True)
class WholeCommit:
    """A commit of which all frames are there, and where they are."""

    commit: Commit
    segment: int  # the first version of its segment
    frames: Sequence[Place]
    begin: int
    end: int


class DamagedError(StorageError):
    """The bytes of a segment are not what was written, from an offset on.

    version: the first version that cannot be read. segment: the first version of its segment. offset: where the last
    whole version before it ends.
    """

    segment = offset = version = 0

    @staticmethod
    def at(path: FilePath, segment: int, offset: int, version: int, what: str) -> "DamagedError":
        """Returns the error for a place in a segment."""
        before = "Versions before it can still be read. " if version > 1 else ""
        error = DamagedError(
            f"[file {path}] version {version}, offset {offset}: {sentence(what)} {before}Restore the file from another "
            f"copy, or have `shoal repair` set what is damaged aside."
        )
        error.segment, error.offset, error.version = segment, offset, version
        return error

    def reading(self, version: int) -> "DamagedError":
        """Returns the same error, saying that `version` is the newest that can be read without a repair."""
        text = str(self).replace("Versions before it can still be read. ", "")
        said = (
            f"Version {version} can still be read, with version={version}; a repair goes on from the highest whole one."
        )
        error = DamagedError(f"{text} {said}")
        error.segment, error.offset, error.version = self.segment, self.offset, self.version
        return error


def header_of(identity: str, first: int) -> bytes:
    """Returns the first bytes of a segment. identity: the log's. first: the first version in it."""
    head = _HEADER.pack(_MAGIC, _FORMAT_VERSION, 0, bytes.fromhex(identity), first, bytes(20), 0)[:-4]
    return head + struct.pack("<I", _native.crc32c(head))


def is_header(data: bytes) -> bool:
    """Returns whether bytes are the header of a segment, of any log, with the right checksum."""
    return len(data) == _HEADER.size and data[-4:] == struct.pack("<I", _native.crc32c(data[:-4]))


def digest_of(headers: Sequence[bytes]) -> dict[str, int]:
    """Returns what a commit frame says of the frames before it: how many there are, and a checksum of their headers,
    which hold the checksums of their payloads."""
    return {"count": len(headers), "crc32c": _native.crc32c(b"".join(headers))}
