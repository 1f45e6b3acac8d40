"""Writing a snapshot."""

from typing import Any

from shoal import _native
from shoal.log.commit import Commit, id_of
from shoal.log.files import FilePath, Files, remove_folder, sealed_json, write_file
from shoal.log.manifest import SnapshotEntry
from shoal.log.snapshot import LIST, Block, TableBlocks, buckets_of, file_name
from shoal.records import Layout, Rows
from shoal.records.stream import StreamEncoder


class TableWriter:
    """Writes the rows of one table. REQUIRES: they come in the order of their keys' buckets, each key once."""

    def __init__(self, folder: FilePath, number: int, layout: Layout) -> None:
        self.table = layout.name
        self._number = number
        self._layout = layout
        self._encoder = StreamEncoder(layout)
        self._blocks: list[Block] = []
        self._file = _native.FileWriter.create(folder / file_name(number))
        self._schema_crc = self._write(self._encoder.begin())

    def _write(self, pieces: list[memoryview]) -> int:
        crc = 0
        for piece in pieces:
            crc = self._file.append_checked(piece, crc)
        return crc

    def put(self, rows: Rows) -> None:
        """Writes a block."""
        if not len(rows):
            return
        ends = buckets_of(rows.keys[[0, -1]], self._layout.buckets).tolist()
        offset = self._file.position
        crc = self._write(self._encoder.batch(rows))
        self._blocks.append(Block(offset, self._file.position - offset, crc, len(rows), *ends))

    def finish(self) -> TableBlocks:
        """Ends the file; all of it is on the disk then. Returns its blocks."""
        self._write(self._encoder.end())
        size = self._file.position
        self._file.finish()
        return TableBlocks(self._number, size, tuple(self._blocks), self._schema_crc)

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.abandon()


class SnapshotWriter:
    """Writes a snapshot to a folder with a temporary name, which gets its own name once all is on the disk."""

    def __init__(self, files: Files, version: int, suffix: str = ".tmp") -> None:
        self._files = files
        self._version = version
        self._place = files.snapshot(version)
        self._folder = files.snapshots / f"{self._place.name}{suffix}"
        remove_folder(self._folder)
        _native.make_directories(self._folder)
        self._tables: dict[str, TableBlocks] = {}
        self._open: TableWriter | None = None

    def begin_table(self, number: int, layout: Layout) -> None:
        """Ends the table before, and begins another, to which `put` writes."""
        self.end_table()
        self._open = TableWriter(self._folder, number, layout)

    def put(self, rows: Rows) -> None:
        """Writes a block of the table that was begun last."""
        assert self._open is not None
        self._open.put(rows)

    def end_table(self) -> None:
        """Ends the table that was begun last, if one is open: all of it is on the disk."""
        if self._open is not None:
            self._tables[self._open.table] = self._open.finish()
            self._open = None

    def id_of(self, commit: Commit) -> str:
        """Returns the id of a commit that is in no segment: a hash of what it says and of its rows' checksums."""
        return id_of(sealed_json({"commit": commit.to_json(), "tables": self._listed()}))

    def _listed(self) -> dict[str, Any]:
        return {
            name: {
                "number": table.number,
                "bytes": table.bytes,
                "schema_crc32c": table.schema_crc32c,
                "blocks": [block.to_json() for block in table.blocks],
            }
            for name, table in self._tables.items()
        }

    def finish(self, commit: Commit) -> SnapshotEntry:
        """Completes the snapshot and puts it in its place. The manifest does not name it yet."""
        data = sealed_json(
            {
                "commit": commit.to_json(),
                **({"id": commit.id} if commit.id else {}),
                "tables": self._listed(),
            }
        )
        write_file(self._folder / LIST, data)
        remove_folder(self._place)  # of a writer that died before the manifest named it
        _native.rename_file(self._folder, self._place)
        self._folder = self._place
        _native.sync_directory(self._files.snapshots)
        return SnapshotEntry(self._version, _native.crc32c(data))

    def abandon(self) -> None:
        """Removes what was written. REQUIRES: no manifest names it."""
        if self._open is not None:
            self._open.abandon()
        remove_folder(self._folder)
