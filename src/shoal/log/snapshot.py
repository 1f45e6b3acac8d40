"""A snapshot: all rows of a log's tables at one version.

    snapshots/<version>/
      SNAPSHOT.json         the version's commit, and each table's blocks: their places, checksums and buckets
      <table number>.arrow  an Arrow IPC stream, a record batch a block, in the order of the keys' buckets

The rows of some buckets are read without the blocks of the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import StorageError
from shoal.log.commit import ID_DIGITS, Commit
from shoal.log.fields import Fields, whole
from shoal.log.files import (
    MOST_BYTES,
    FilePath,
    Files,
    names_in,
    read_sealed_json,
    require_held,
    size_of,
)
from shoal.log.keys import InOrder
from shoal.log.manifest import SnapshotEntry
from shoal.records import Layout, Rows
from shoal.records.frames import most_bytes
from shoal.records.stream import StreamDecoder

LIST = "SNAPSHOT.json"
# A block of one row takes some 1000 bytes, and its line in the list up to 150.
_BLOCK_TO_LIST = 6


def buckets_of(keys: Tensor, buckets: int) -> Tensor:
    """Returns the bucket of each key."""
    out = torch.empty_like(keys)
    _native.buckets(keys, buckets, out)
    return out


@dataclass(frozen=True)
class Block:
    """One record batch of a table's file."""

    offset: int
    bytes: int
    crc32c: int
    rows: int
    first_bucket: int
    last_bucket: int

    def to_json(self) -> list[int]:
        """Returns what `from_json` takes."""
        return [self.offset, self.bytes, self.crc32c, self.rows, self.first_bucket, self.last_bucket]

    @staticmethod
    def from_json(where: str, value: Any) -> "Block":
        """Reads what came from a file."""
        if not isinstance(value, list) or len(value) != 6:
            raise StorageError(f"[{where}] wanted six numbers; got {value!r:.100}. The file is damaged.")
        return Block(*(whole(where, number) for number in value))


@dataclass(frozen=True)
class TableBlocks:
    """One table of a snapshot."""

    number: int  # its number in the manifest
    bytes: int
    blocks: tuple[Block, ...]
    schema_crc32c: int | None = None  # of the bytes before the first block; None where the file does not say

    @property
    def rows(self) -> int:
        """The rows of all blocks."""
        return sum(block.rows for block in self.blocks)


class SnapshotError(StorageError):
    """The rows of a snapshot are not those that were written."""


class Snapshot:
    """A complete snapshot. hold: whether its files stay open, so that it can be read after others removed it."""

    def __init__(self, files: Files, entry: SnapshotEntry, layouts: tuple[Layout, ...], hold: bool = False) -> None:
        self._folder = files.snapshot(entry.version)
        path = self._folder / LIST
        value = Fields(f"file {path}", read_sealed_json(path, entry.crc32c, _most_bytes(path)))
        value.others(("commit", "id", "tables"))
        known_as = value.digits("id", ID_DIGITS) if "id" in value.value else ""
        self.commit = Commit.from_json(f"file {path}, commit", value.object("commit").value, known_as)
        if self.commit.is_partial:
            raise StorageError(f"[file {path}] wanted a commit that says all; got one that does not. Restore the file.")
        if self.commit.version != entry.version:
            raise StorageError(f"[file {path}] wanted version {entry.version}; got {self.commit.version}.")
        self.tables: dict[str, TableBlocks] = {}
        self._layouts: dict[str, Layout] = {}
        listed = value.object("tables")
        for name in listed.value:
            table = listed.object(name)
            blocks = TableBlocks(
                table.integer("number", 0, max(len(layouts) - 1, 0)),
                table.integer("bytes"),
                tuple(table.items("blocks", Block.from_json)),
                table.integer("schema_crc32c", 0, 2**32 - 1) if "schema_crc32c" in table.value else None,
            )
            if not layouts or layouts[blocks.number].name != name:
                raise StorageError(f"[file {path}] {name!r:.100} is not the manifest's table {blocks.number}.")
            _check_order(f"file {path}, table {name!r:.100}", blocks, layouts[blocks.number].buckets)
            self.tables[name], self._layouts[name] = blocks, layouts[blocks.number]
        # Files that are not held are opened when they are read, which is faster.
        self._held = {name: _native.File.open_to_read(self.path_of(name)) for name in self.tables if hold}

    @property
    def folder(self) -> FilePath:
        """Where its files are."""
        return self._folder

    def size_of(self, name: str) -> int:
        """Returns the bytes of a table's file, as it is."""
        return self._held[name].size() if name in self._held else size_of(self.path_of(name)) or 0

    def path_of(self, name: str) -> FilePath:
        """Returns the path of a table's file."""
        return self._folder / file_name(self.tables[name].number)

    def rows(self, name: str, first_bucket: int = 0, end_bucket: int | None = None) -> Iterator[Rows]:
        """Yields those blocks of a table that have rows of buckets [first, end), whole and in order; nothing where the
        snapshot has no such table."""
        if name not in self.tables:
            return
        table, layout, path = self.tables[name], self._layouts[name], self.path_of(name)
        held = self._held.get(name)
        size = size_of(path) if held is None else held.size()
        if size != table.bytes:
            raise SnapshotError(
                f"[file {path}] wanted {table.bytes} bytes; got {size}. The file was cut or changed: restore it from "
                f"another copy."
            )
        wanted = [
            block
            for block in table.blocks
            if block.last_bucket >= first_bucket and (end_bucket is None or block.first_bucket < end_bucket)
        ]
        require_held(path)
        decoder = StreamDecoder(layout)
        keys = InOrder(layout.buckets)
        reader = _native.FileReader.open(path) if held is None else None
        try:
            for block in wanted:
                where = f"file {path}, version {self.commit.version}, offset {block.offset}"
                least, most = block.rows * layout.row_bytes, most_bytes(layout, block.rows)
                if block.offset + block.bytes > table.bytes or not least <= block.bytes <= most:
                    raise SnapshotError(f"[{where}] a block of {block.bytes} bytes does not fit. Restore the snapshot.")
                data = _native.buffer(block.bytes)
                if reader is not None:
                    crc = reader.read_checked(block.offset, data)
                else:
                    assert held is not None
                    held.read(block.offset, data)
                    crc = _native.crc32c(data)
                if crc != block.crc32c:
                    raise SnapshotError(
                        f"[{where}] its checksum is wrong. Restore the file from another copy, or recover another "
                        f"version."
                    )
                try:
                    rows = decoder.batch(data, where)
                except StorageError as error:
                    raise SnapshotError(str(error)) from error
                if len(rows) != block.rows:
                    raise SnapshotError(f"[{where}] wanted {block.rows} rows; got {len(rows)}. Restore the snapshot.")
                _check_keys(where, name, keys, rows.keys, block, block is wanted[-1])
                yield rows
        finally:
            if reader is not None:
                reader.close()


def _most_bytes(path: FilePath) -> int:
    """Returns how many bytes the list of a snapshot's blocks may have: some for the commit, and for each block fewer
    than its rows have."""
    if (size_of(path) or 0) <= MOST_BYTES:
        return MOST_BYTES
    found = [_native.look_at(path.with_name(name)) for name in names_in(path.parent) if name != path.name]
    return MOST_BYTES + sum(one.disk_bytes for one in found if one is not None) // _BLOCK_TO_LIST


def _check_keys(where: str, name: str, keys_so_far: InOrder, keys: Tensor, block: Block, is_last: bool) -> None:
    """Raises SnapshotError where rows are not in the order of their keys' buckets, where these are not the block's, or
    where a key comes twice."""
    where = f"[{where}] table {name!r:.100}"
    found = keys_so_far.add(keys, block.first_bucket, block.last_bucket, is_last)
    if found.misplaced is not None:
        raise SnapshotError(
            f"{where}: wanted keys in the order of their buckets, {block.first_bucket} to {block.last_bucket}; got key "
            f"{int(keys[found.misplaced])}, which is not. Restore the snapshot."
        )
    if found.repeated is not None:
        raise SnapshotError(f"{where}: wanted each key once; got key {found.repeated} again. Restore the snapshot.")


def _check_order(where: str, table: TableBlocks, buckets: int) -> None:
    """Raises StorageError where blocks are not one after another, in the order of their buckets."""
    end = bucket = 0
    for block in table.blocks:
        if block.offset < end or not bucket <= block.first_bucket <= block.last_bucket < buckets:
            raise SnapshotError(f"[{where}] wanted blocks in order; got one at {block.offset} that is not. Restore it.")
        end, bucket = block.offset + block.bytes, block.last_bucket


def file_name(number: int) -> str:
    """Returns the name of a table's file. number: the table's, in the manifest."""
    return f"{number:05}.arrow"
