"""The files of a log, through the one door to the file system.

    PATH/
      MANIFEST.json                    what the log is made of
      HEAD                             what is known to be on the disk
      LOCK, MANIFEST.lock, COMPACT     held to write, to change the manifest, to compact
      segments/<first version>.seg     commits, one after the other
      WRITER.json                      the rank that wrote last, in a job of several: see job.py
      dense/<version>.safetensors      dense weights and their optimizer
      snapshots/<version>/             all rows at a version: see snapshot.py
      set-aside/<number>/              what repairs took out: see repair.py

docs/formats.md has every byte.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal import _native
from shoal.errors import CheckpointError, StorageError
from shoal.records import strict_json

FilePath = _native.FilePath
# A path as users give it.
AnyPath = str | os.PathLike[str]

# The most bytes of a manifest: those of ten thousand tables, or of some hundred thousand segments.
MOST_MANIFEST_BYTES = 4 << 20
# The most bytes of other small files.
MOST_BYTES = 16 << 20
# Lists and objects of JSON, which take up to fifty times its bytes of memory. Of values in lines of their own, as
# `sealed_json` writes them, there are fewer.
_MOST_CONTAINERS, _BYTES_A_CONTAINER = 4096, 8
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
# How deep folders may be in each other that are removed: a log has three levels.
_MOST_DEPTH = 4
_DIGITS = 20
# A file may be this large, or so many times larger than the bytes that it holds: the rest is holes, which are read as
# zeros and cost nothing. Copies of rows that are all zeros may have some.
MOST_WITH_HOLES = 64 << 20
_MOST_TIMES_HELD = 1024
SEGMENT_HEADER_BYTES = 64


def as_path(path: AnyPath) -> FilePath:
    """Returns a path as the user named it. A FilePath stays as it is."""
    return path if isinstance(path, FilePath) else FilePath(Path(path))


class Files:
    """The paths of one log's files, below its folder, in which no link is followed."""

    def __init__(self, path: AnyPath) -> None:
        self.root = as_path(path).absolute()  # the process may change its folder
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

    def segment(self, first: int) -> FilePath:
        """Returns the path of the segment that begins with a version."""
        return self.segments / f"{first:0{_DIGITS}}.seg"

    def dense_of(self, version: int) -> FilePath:
        """Returns the path of the dense weights that were committed with a version."""
        return self.dense / f"{version:0{_DIGITS}}.safetensors"

    def snapshot(self, version: int) -> FilePath:
        """Returns the folder of a snapshot."""
        return self.snapshots / f"{version:0{_DIGITS}}"

    def make(self) -> None:
        """Makes the folders."""
        for folder in (self.root, self.segments, self.dense, self.snapshots):
            _native.make_directories(folder)


def is_new(files: Files) -> bool:
    """Returns whether there is no log yet. Raises StorageError where there is a log without its manifest."""
    if size_of(files.manifest) is not None:
        return False
    remains = [path for path in (files.head,) if size_of(path)]
    remains += [files.dense / name for name in names_in(files.dense)]
    remains += [files.snapshots / name for name in names_in(files.snapshots) if not name.endswith(".tmp")]
    # A process that died while it made the log has written no more than the header of its first segment.
    segments = [files.segments / name for name in names_in(files.segments)]
    remains += [path for path in segments if (size_of(path) or 0) > SEGMENT_HEADER_BYTES]
    if remains:
        raise StorageError(
            f"[log {files.root}] its MANIFEST.json is gone, and {remains[0].name} is there. Restore it from another "
            f"copy, or name another path."
        )
    return True


def require_folder(where: str, path: AnyPath) -> None:
    """Raises CheckpointError where something else is in the place of a folder, or a file in the place of a folder above
    it, and StorageError where the system does not take the path."""
    for place in (Path(path), *Path(path).parents):
        if os.path.isfile(place):  # not Path's, which raises where a name is too long
            raise CheckpointError(f"[{where}] wanted a folder; {place.name!r} is a file. Name another path.")
    entry = _native.look_at(as_path(path))
    if entry is not None and entry.kind in (_native.FileKind.file, _native.FileKind.other):
        raise CheckpointError(f"[{where}] wanted a folder; got a pipe, a socket or a device. Name another path.")


def names_in(folder: FilePath) -> list[str]:
    """Returns the names in a folder; none where there is no such folder."""
    return [] if _native.look_at(folder) is None else _native.list_directory(folder)


def size_of(path: FilePath) -> int | None:
    """Returns the bytes of a file; None where there is no file."""
    return _native.file_size(path)


def require_held(path: FilePath) -> None:
    """Raises StorageError where a file is almost all holes: reading it would take more time and memory than the bytes
    on the disk explain."""
    if (what := holes_in(path)) is not None:
        raise StorageError(f"[file {path}] {what}. Restore it from another copy.")


def holes_in(path: FilePath) -> str | None:
    """Returns what is wrong with a file that is almost all holes; None where it is not."""
    entry, size = _native.look_at(path), size_of(path) or 0
    if entry is None or size <= max(MOST_WITH_HOLES, _MOST_TIMES_HELD * entry.disk_bytes):
        return None
    held = entry.disk_bytes
    if not held:  # some systems do not count them, and tell which files have data
        with _native.File.open_to_read(path) as file:
            held = 0 if file.next_data(0) >= size else size
    if size <= max(MOST_WITH_HOLES, _MOST_TIMES_HELD * held):
        return None
    return f"wanted a file that holds what its {size} bytes say; got {held} bytes, and holes"


def read_file(path: FilePath, limit: int = MOST_BYTES) -> bytearray:
    """Returns all of a small file."""
    if size_of(path) is None:
        raise StorageError(f"[file {path}] is not there. Restore it, or another copy of the log.")
    with _native.File.open_to_read(path) as file:
        size = file.size()  # of this one: another may be put in its place now
        if size > limit:
            raise StorageError(f"[file {path}] wanted at most {limit} bytes; got {size}. Restore it from another copy.")
        out = bytearray(size)
        file.read(0, out)
    return out


def write_file(path: FilePath, data: bytes) -> None:
    """Writes a file in the place of another, which stays until the new one is on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        make_file(temporary, data)
        _native.rename_file(temporary, path)
    except BaseException:
        with suppress(StorageError):  # the next one is written over it
            remove_file(temporary)
        raise
    _native.sync_directory(path.parent)


def make_file(path: FilePath, data: bytes) -> None:
    """Writes a new small file to the disk. Its name is on the disk once the folder is synced."""
    remove_file(path)  # of a writer that died
    with _native.File.create_new(path) as file:
        file.write(0, data)
        file.sync()


def remove_file(path: FilePath) -> None:
    """Removes a file, if it is there."""
    _native.remove_file(path)


def remove_folder(path: FilePath, depth: int = _MOST_DEPTH) -> None:
    """Removes a folder and all that is in it, if it is there. Of a link in it, the link itself is removed."""
    if depth == 0:
        raise StorageError(f"[file {path}] wanted a folder of a log; got folders in it that are too deep. Remove it.")
    for name in names_in(path):
        entry = _native.look_at(path / name)
        if entry is not None and entry.kind is _native.FileKind.folder:
            remove_folder(path / name, depth - 1)
        else:
            remove_file(path / name)
    _native.remove_directory(path)


def sealed_json(value: dict[str, Any]) -> bytes:
    """Returns JSON whose last line is a checksum of the lines before."""
    body = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
    return body + f"\ncrc32c {_native.crc32c(body):08x}\n".encode()


def read_sealed_json(path: FilePath, crc32c: int | None = None, limit: int = MOST_BYTES) -> dict[str, Any]:
    """Returns what `sealed_json` wrote to a file. crc32c: the checksum of the whole file, where it is known. limit: the
    most bytes that the file may have. Raises StorageError where the file is damaged."""
    data = bytes(read_file(path, limit))
    body, _, last = data.rstrip(b"\n").rpartition(b"\n")
    is_known = crc32c is None or crc32c == _native.crc32c(data)
    if last != f"crc32c {_native.crc32c(body):08x}".encode() or not is_known:
        raise StorageError(f"[file {path}] its checksum is not that of its text. Restore it from another copy.")
    _require_few(path, body)
    value = strict_json.parse(body, f"file {path}")
    if not isinstance(value, dict):
        raise StorageError(f"[file {path}] wanted a JSON object; got {type(value).__name__}. Restore it.")
    return value


def _require_few(path: FilePath, body: bytes) -> None:
    """Raises StorageError where JSON has more objects than its size explains."""
    most = _MOST_CONTAINERS + len(body) // _BYTES_A_CONTAINER
    if _containers(body) > most and (found := _containers(_STRING.sub(b"", body))) > most:
        raise StorageError(
            f"[file {path}] wanted at most {most} lists and objects in {len(body)} bytes; got {found}. Restore it from "
            f"another copy."
        )


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")
