"""The files of a log, through the one door to the file system.

    PATH/
      MANIFEST.json                    what the log is made of
      HEAD                             what is known to be on the disk
      LOCK, MANIFEST.lock, COMPACT     held by who writes, who changes the manifest, who compacts
      segments/<first version>.seg     commits, one behind the other
      WRITER.json                      the rank that wrote last, in a job of several: see job.py
      dense/<version>.safetensors      dense weights and their optimizer
      snapshots/<version>/             all rows at a version: see snapshot.py
      set-aside/<number>/              what repairs took out: see repair.py

docs/formats.md has every byte.
"""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal import _native
from shoal.errors import CheckpointError, StorageError
from shoal.records import strict_json

# A manifest or the list of a snapshot's blocks is small; what claims to be more is not ours.
_MOST_JSON = 1 << 30
_DIGITS = 20
# A file may be this large, or so many times larger than the bytes that it holds: the rest is holes, which are read as
# zeros and cost nobody anything. Copies of rows that are all zeros may have some.
_MOST_WITH_HOLES = 64 << 20
_MOST_TIMES_HELD = 1024
_BLOCK_BYTES = 512  # in which the system counts
SEGMENT_HEADER_BYTES = 64


class Files:
    """Where the files of one log are."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).absolute()  # the process may change its folder
        self.manifest = self.root / "MANIFEST.json"
        self.head = self.root / "HEAD"
        self.writer = self.root / "WRITER.json"
        self.set_aside = self.root / "set-aside"
        self.lock = self.root / "LOCK"
        self.manifest_lock = self.root / "MANIFEST.lock"
        self.compact_lock = self.root / "COMPACT"
        self.segments = self.root / "segments"
        self.dense = self.root / "dense"
        self.snapshots = self.root / "snapshots"

    def segment(self, first: int) -> Path:
        """The segment that begins with a version."""
        return self.segments / f"{first:0{_DIGITS}}.seg"

    def dense_of(self, version: int) -> Path:
        """Dense weights that were committed with a version."""
        return self.dense / f"{version:0{_DIGITS}}.safetensors"

    def snapshot(self, version: int) -> Path:
        """The folder of a snapshot."""
        return self.snapshots / f"{version:0{_DIGITS}}"

    def make(self) -> None:
        """Make the folders."""
        for folder in (self.root, self.segments, self.dense, self.snapshots):
            _native.make_directories(str(folder))


def is_new(files: Files) -> bool:
    """Whether there is no log yet. Raises StorageError where there is one whose manifest is gone."""
    if size_of(files.manifest) is not None:
        return False
    remains = [path for path in (files.head,) if size_of(path)]
    remains += [files.dense / name for name in names_in(files.dense)]
    remains += [files.snapshots / name for name in names_in(files.snapshots) if not name.endswith(".tmp")]
    # Who died while it made the log has written no more than the header of its first segment.
    segments = [files.segments / name for name in names_in(files.segments)]
    remains += [path for path in segments if (size_of(path) or 0) > SEGMENT_HEADER_BYTES]
    if remains:
        raise StorageError(
            f"[log {files.root}] its MANIFEST.json is gone, and {remains[0].name} is there. Restore it from another "
            f"copy, or name another path."
        )
    return True


def require_folder(where: str, path: Path) -> None:
    """Raise CheckpointError where a file is in the place of a folder or of one above it, and StorageError where the
    system does not take the path."""
    for place in (path, *path.parents):
        if os.path.isfile(place):  # not Path's, which raises where a name is too long
            raise CheckpointError(f"[{where}] wanted a folder; {place.name!r} is a file. Name another path.")
    size_of(path)


def names_in(folder: Path) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    return _native.list_directory(str(folder)) if folder.is_dir() else []


def size_of(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    return _native.file_size(str(path))


def require_held(path: Path) -> None:
    """Raise StorageError where a file is almost all holes: reading it would take time and memory that its bytes do not
    explain."""
    try:
        status = os.stat(path)
    except OSError:  # who opens it says what is wrong
        return
    if status.st_size <= max(_MOST_WITH_HOLES, _MOST_TIMES_HELD * status.st_blocks * _BLOCK_BYTES):
        return
    held = _held(path, status.st_size)  # some systems count no blocks
    if status.st_size > max(_MOST_WITH_HOLES, _MOST_TIMES_HELD * held):
        raise StorageError(
            f"[file {path}] wanted a file that holds what its {status.st_size} bytes say; got {held} bytes, and holes. "
            f"Restore it from another copy."
        )


def _held(path: Path, size: int) -> int:
    """Bytes of a file that are not in holes; all of them where the system does not say."""
    held = at = 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        try:
            while True:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                held += at - begin
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                return held
    return size


def read_file(path: Path, limit: int = _MOST_JSON) -> bytearray:
    """All of a small file."""
    if size_of(path) is None:
        raise StorageError(f"[file {path}] is not there. Restore it, or another copy of the log.")
    with _native.File.open_to_read(str(path)) as file:
        size = file.size()  # of this one: another may be put in its place meanwhile
        if size > limit:
            raise StorageError(f"[file {path}] wanted at most {limit} bytes; got {size}. Restore it from another copy.")
        out = bytearray(size)
        file.read(0, out)
    return out


def write_file(path: Path, data: bytes) -> None:
    """Put a file in the place of another, which is there until the new one is on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    make_file(temporary, data)
    _native.rename_file(str(temporary), str(path))
    _native.sync_directory(str(path.parent))


def make_file(path: Path, data: bytes) -> None:
    """A new small file, on the disk. Its name is there once the folder is synced."""
    remove_file(path)  # of a writer that died
    with _native.File.create_new(str(path)) as file:
        file.write(0, data)
        file.sync()


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    _native.remove_file(str(path))


def remove_folder(path: Path) -> None:
    """Remove a folder and all that is in it, if it is there."""
    if path.is_dir():
        for name in names_in(path):
            if (path / name).is_dir():
                remove_folder(path / name)
            else:
                remove_file(path / name)
        _native.remove_directory(str(path))


def link_file(path: Path, to: Path) -> bool:
    """Give a file another name, which keeps it when the first is removed. False where the file system cannot."""
    try:
        os.link(path, to)
    except OSError:
        return False
    return True


def sealed_json(value: dict[str, Any]) -> bytes:
    """JSON with the checksum of what stands before it in its last line."""
    body = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
    return body + f"\ncrc32c {_native.crc32c(body):08x}\n".encode()


def read_sealed_json(path: Path, crc32c: int | None = None) -> dict[str, Any]:
    """What `sealed_json` wrote to a file, whose checksum may be known. Raises StorageError where it is damaged."""
    data = bytes(read_file(path))
    body, _, last = data.rstrip(b"\n").rpartition(b"\n")
    is_known = crc32c is None or crc32c == _native.crc32c(data)
    if last != f"crc32c {_native.crc32c(body):08x}".encode() or not is_known:
        raise StorageError(f"[file {path}] its checksum is not that of its text. Restore it from another copy.")
    value = strict_json.parse(body, f"file {path}")
    if not isinstance(value, dict):
        raise StorageError(f"[file {path}] wanted a JSON object; got {type(value).__name__}. Restore it.")
    return value
