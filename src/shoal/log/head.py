"""The head: up to where a log is known to be on the disk. Damage before it is an error; bytes after it may be half of a
commit whose writer died, and are cut off.

64 bytes, written over each other: magic, format version, 0, version, first version of its segment, that segment's
length, zeros, crc32c. Where they are damaged, nothing is known to be on the disk.
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
    """Returns the head; an empty one where there is none, or a damaged one."""
    found = _parse(files)
    return found if isinstance(found, Head) else Head()


def head_problem(files: Files) -> str | None:
    """Returns why nothing is known; None where the head is whole."""
    found = _parse(files)
    if isinstance(found, Head):
        return None
    return (
        f"[file {files.head}] {found}. What was on the disk is not known, so that commits which are cut off or damaged "
        f"at the log's end are not missed. Opening the log for writing makes a new one."
    )


def _parse(files: Files) -> Head | str:
    """Returns the head, or what is wrong with it."""
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
    """Writes the head."""

    def __init__(self, files: Files) -> None:
        self._file = _native.File.open_to_write(files.head)
        if self._file.size() > _HEAD.size:  # a head of another size is not believed
            self._file.truncate(_HEAD.size)

    def write(self, head: Head, sync: bool = False) -> None:
        """Writes what is on the disk. Without `sync` the head on the disk may be older, but it is never wrong."""
        body = _HEAD.pack(_MAGIC, _FORMAT_VERSION, 0, head.version, head.segment, head.end, bytes(20), 0)[:-4]
        self._file.write(0, body + struct.pack("<I", _native.crc32c(body)))
        if sync:
            self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
