"""The head: up to where a log is known to be on the disk. What is damaged before it is an error; what stands behind it
may be half of a commit whose writer died, and is cut off.

64 bytes, written over each other: magic, format version, 0, version, first version of its segment, that segment's
length, zeros, crc32c. Where they are damaged, nothing is known.
"""

import struct
from dataclasses import dataclass

from shoal import _native
from shoal.log.files import Files, read_file, size_of

_HEAD = struct.Struct("<8sIIQQQ20sI")
_MAGIC = b"SHOALHED"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Head:
    """The newest version that is on the disk, its segment, and where it ends there."""

    version: int = 0
    segment: int = 0
    end: int = 0


def read_head(files: Files) -> Head:
    """What is known; nothing where there is no head, or a damaged one."""
    found = _parse(files)
    return found if isinstance(found, Head) else Head()


def head_problem(files: Files) -> str | None:
    """Why nothing is known; None where the head is whole."""
    found = _parse(files)
    if isinstance(found, Head):
        return None
    return (
        f"[file {files.head}] {found}. What was on the disk is not known, so that commits which are cut off or damaged "
        f"at the log's end are not missed. Opening the log for writing makes a new one."
    )


def _parse(files: Files) -> Head | str:
    """The head, or what is wrong with it."""
    size = size_of(files.head)
    if size != _HEAD.size:
        return f"wanted {_HEAD.size} bytes; got {'no file' if size is None else size}"
    data = bytes(read_file(files.head, _HEAD.size))
    if len(data) != _HEAD.size:  # it changed in between
        return f"wanted {_HEAD.size} bytes; got {len(data)}"
    magic, version, _, *numbers, _, crc = _HEAD.unpack(data)
    if magic != _MAGIC or version != _FORMAT_VERSION:
        return f"wanted {_MAGIC!r}, format {_FORMAT_VERSION}; got {magic!r}, format {version}"
    if crc != (found := _native.crc32c(data[:-4])):
        return f"wanted the checksum {crc:#010x}; got {found:#010x}"
    return Head(*numbers)


class HeadWriter:
    """Writes it."""

    def __init__(self, files: Files) -> None:
        self._file = _native.File.open_to_write(files.head)
        if self._file.size() > _HEAD.size:  # nobody would believe what is written over it
            self._file.truncate(_HEAD.size)

    def write(self, head: Head, sync: bool = False) -> None:
        """Say what is on the disk. Not synced, it is at worst older than what is true."""
        body = _HEAD.pack(_MAGIC, _FORMAT_VERSION, 0, head.version, head.segment, head.end, bytes(20), 0)[:-4]
        self._file.write(0, body + struct.pack("<I", _native.crc32c(body)))
        if sync:
            self._file.sync()

    def close(self) -> None:
        """Let it go."""
        self._file.close()
