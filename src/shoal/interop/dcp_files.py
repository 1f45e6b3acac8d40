"""The files of a torch.distributed.checkpoint: its metadata, and its pieces with their checksums.

    .metadata        a pickle: entries with their shapes, where each of their pieces lies, and the paths they are from
    __0_0.distcp     pieces, one after another. Each is a zip file as torch.save writes it

Every record of a zip file has a CRC32, which torch.load ignores. The metadata has no checksum.
"""

import errno
import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shoal import _native
from shoal.errors import CheckpointError, StorageError
from shoal.log.files import FilePath, as_path
from shoal.records.excerpt import excerpt

UNHARMED = "Nothing was loaded."

_END_OF_ZIP = 22  # bytes of the record that ends a zip file without a comment
_CHUNK = 1 << 20

# The names that lead to an entry from the state dict that was saved: str for keys, int for places in lists.
Names = tuple[str | int, ...]
Shape = tuple[torch.dtype, tuple[int, ...]]


class Planner(DefaultLoadPlanner):
    """Reads flat entries into the places that they are given."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # As DCP does, but without its pickles of any class.
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")


def _opened(path: str | os.PathLike[str]) -> _native.File:
    try:
        return _native.File.open_to_read(as_path(path))
    except StorageError as error:
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        raise CheckpointError(f"{error} {UNHARMED}") from None


class _Files(FileSystem):
    """The files of a checkpoint, through the door: no link below its folder is followed, and no pipe waited for."""

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> FilePath:
        return as_path(path) / suffix

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _opened(as_path(path)) as file, io.BufferedReader(_Slice(file, 0, file.size())) as stream:
            yield stream


class Reader(FileSystemReader):
    """Reads piece by piece, each after its checksums were compared: its bytes are in the page cache the second time."""

    def __init__(self, where: str, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _Files()
        self._where = where

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read: Future[None] = Future()
        for item in sorted(plan.items, key=self._place):
            self._check(item)
            read = super().read_data(replace(plan, items=[item]), planner)
        if not plan.items:
            read.set_result(None)
        return read

    def _place(self, item: ReadItem) -> tuple[str, int]:
        piece = self.storage_data[item.storage_index]
        return piece.relative_path, piece.offset

    def _check(self, item: ReadItem) -> None:
        piece = self.storage_data[item.storage_index]
        if getattr(piece, "transform_descriptors", None):
            return  # compressed by an extension of DCP, say
        place = self.fs.concat_path(self.path, piece.relative_path)
        with _opened(place) as file:
            found = _damage(_Slice(file, piece.offset, piece.length))
        if found:
            kind = "value" if item.type == LoadItemType.BYTE_IO else "tensor"
            raise CheckpointError(
                f"[{self._where}] wanted a checkpoint that can be read; got damage in the {kind} "
                f"{excerpt(item.storage_index.fqn)}, in {piece.relative_path} from byte {piece.offset} on: {found}. "
                f"{UNHARMED} Load another checkpoint."
            )


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: _native.File, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._begin = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError(f"a place before the first byte: {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin = self._begin + self._at
        if begin < 0:
            raise ValueError(f"a place before the first byte: {begin}")
        there = min(self._length - self._at, self._file.size() - begin)
        view = memoryview(buffer)[: max(0, there)]
        self._file.read(begin, view)
        self._at += len(view)
        return len(view)


def _damage(piece: _Slice) -> str | None:
    """What is wrong with a piece, which is to be one whole zip file; None where it is sound."""
    try:
        piece.seek(-_END_OF_ZIP, io.SEEK_END)
        last = piece.read(_END_OF_ZIP) or b""
        if not last.startswith(b"PK\5\6") or last[-2:] != b"\0\0":
            return "it does not end where a zip file does"
        with zipfile.ZipFile(piece) as archive:
            records = archive.infolist()
            if not records or min(record.header_offset for record in records):
                return "it does not begin where a zip file does"
            # torch.serialization.set_crc32_options(False) writes zeros, for all records.
            for record in records if any(record.CRC for record in records) else ():
                with archive.open(record) as content:
                    while content.read(_CHUNK):  # compares the checksum at the end
                        pass
    except OSError:
        raise
    except Exception as error:  # whatever zipfile makes of bytes that are no zip file
        return f"{type(error).__name__}, {excerpt(str(error))}"
    return None


class Saved:
    """The metadata of a checkpoint, checked as far as it is asked for: any part of it may be missing or wrong."""

    def __init__(self, where: str, metadata: Any) -> None:
        self._where = where
        entries = getattr(metadata, "state_dict_metadata", None)
        paths = getattr(metadata, "planner_data", None)
        if not isinstance(metadata, Metadata) or not isinstance(entries, dict) or not isinstance(paths, dict):
            self._refuse("metadata with entries and their paths", excerpt(metadata))
        self._entries = entries
        self._paths: dict[Names, str] = {}
        for fqn in entries:
            path = paths.get(fqn)
            if not isinstance(path, tuple) or not path or not all(isinstance(part, str | int) for part in path):
                self._refuse(f"a path of names for {excerpt(fqn)}", excerpt(path))
            if fqn != ".".join(map(str, path)):
                self._refuse(f"the path of {excerpt(fqn)}", excerpt(path))
            self._paths[path] = fqn

    def names(self) -> list[str]:
        """The first names of all paths."""
        return sorted({str(path[0]) for path in self._paths})

    def within(self, names: Names) -> dict[Names, str]:
        """The entries under a path, by the path that leads to them from there."""
        depth = len(names)
        return {path[depth:]: fqn for path, fqn in self._paths.items() if tuple(map(str, path[:depth])) == names}

    def names_over(self, wanted: set[str]) -> Iterator[str]:
        """The names whose state dicts have one of the wanted keys."""
        for name in self.names():
            if any(path and path[0] in wanted for path in self.within((name,))):
                yield name

    def shape(self, fqn: str) -> Shape | None:
        """The type and shape of a tensor; None where the entry is no tensor."""
        entry = self._entries[fqn]
        if isinstance(entry, BytesStorageMetadata):
            return None
        if not isinstance(entry, TensorStorageMetadata):
            self._refuse(f"a tensor or bytes for {fqn!r}", excerpt(entry))
        # A damaged pickle makes objects that lack attributes.
        given, chunks = getattr(entry, "size", None), getattr(entry, "chunks", None)
        size, dtype = _size(given), getattr(getattr(entry, "properties", None), "dtype", None)
        if size is None or not isinstance(dtype, torch.dtype):
            self._refuse(f"a shape and a type for {fqn!r}", f"{excerpt(given)} of {excerpt(dtype)}")
        if not _is_whole(size, chunks):
            self._refuse(f"pieces that are all of {fqn!r}, {list(size)}", excerpt(chunks))
        return dtype, size

    def place_for(self, fqn: str) -> Any:
        """What an entry is read into."""
        shape = self.shape(fqn)
        # Anything that is no tensor stands for bytes.
        return io.BytesIO() if shape is None else torch.empty(shape[1], dtype=shape[0], device="cpu")

    def _refuse(self, wanted: str, got: str) -> NoReturn:
        raise CheckpointError(f"[{self._where}] wanted {wanted}; got {got}. {UNHARMED}")


def _size(given: Any) -> tuple[int, ...] | None:
    good = isinstance(given, tuple | list) and all(isinstance(one, int) and one >= 0 for one in given)
    return tuple(given) if good else None


def _is_whole(size: tuple[int, ...], chunks: Any) -> bool:
    """Whether pieces are a tensor together: none reaches out of it, no two overlap, and their volumes add up to it.

    What no piece covers would be loaded as memory happens to be.
    """
    boxes = []
    for chunk in chunks if isinstance(chunks, list) else []:
        begin, extent = _size(getattr(chunk, "offsets", None)), _size(getattr(chunk, "sizes", None))
        if begin is None or extent is None or not len(begin) == len(extent) == len(size):
            return False
        end = tuple(first + many for first, many in zip(begin, extent, strict=True))
        if any(last > most for last, most in zip(end, size, strict=True)):
            return False
        if math.prod(extent):
            boxes.append((begin, end))
    for at, (begin, end) in enumerate(boxes):
        for other_begin, other_end in boxes[:at]:
            if all(max(a, b) < min(c, d) for a, b, c, d in zip(begin, other_begin, end, other_end, strict=True)):
                return False
    covered = sum(math.prod(c - a for a, c in zip(begin, end, strict=True)) for begin, end in boxes)
    return covered == math.prod(size)
