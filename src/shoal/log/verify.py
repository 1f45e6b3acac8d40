"""Reading every byte of a log, and comparing it with its checksum, or with its only valid value if it has none."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from shoal import _native
from shoal.errors import CheckpointError, ShoalError, StorageError
from shoal.log.commit import Commit
from shoal.log.committed import CommittedChanges
from shoal.log.dense import read_dense
from shoal.log.files import MOST_MANIFEST_BYTES, Files, read_file
from shoal.log.head import Head, head_problem, read_head
from shoal.log.inherited import said_in
from shoal.log.reader import LogReader
from shoal.log.retry import while_it_changes
from shoal.log.segment import DamagedError
from shoal.log.segment_file import SegmentFile
from shoal.log.snapshot import Snapshot
from shoal.log.survey import Unfinished, walk
from shoal.records import Layout
from shoal.records.arrow import arrow_schema
from shoal.records.excerpt import sentence
from shoal.records.finite import count_not_finite
from shoal.records.frames import most_bytes
from shoal.records.ipc import ARROW_ERRORS, require_schema

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# A head that is being written may be read half old and half new; then it is read again.
_LOOKS, _BETWEEN_S = 20, 0.01


@dataclass
class Report:
    """What `verify` read, and the problems it found.

    unfinished: bytes after the last whole commit, which are being written, or were when their writer died.
    not_finite: rows with NaN or infinity, which training may make of extreme values.
    """

    snapshots: int = 0
    commits: int = 0
    rows: int = 0
    dense: int = 0
    unfinished: int = 0
    not_finite: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether all of the log is as it was written."""
        return not self.problems


def verify(files: Files, progress: Callable[[int], None] = lambda _rows: None) -> Report:
    """Reads everything that the manifest names, while others may write and compact. progress: called with numbers of
    rows."""
    try:
        return while_it_changes(files.root, lambda: _sound(files, progress))
    except _Unsound as error:
        return error.report


class _Unsound(StorageError):
    def __init__(self, report: Report) -> None:
        super().__init__("; ".join(report.problems))
        self.report = report


def _sound(files: Files, progress: Callable[[int], None]) -> Report:
    report = _look(files, progress)
    if not report.is_sound:
        raise _Unsound(report)
    return report


def _look(files: Files, progress: Callable[[int], None]) -> Report:
    report = Report()
    head = read_head(files)  # first: it promises no more than what is read after it
    try:
        reader = LogReader(files)
        _check_seal(files)
    except ShoalError as error:
        report.problems.append(str(error))
        return report
    dense = {}
    newest = 0
    snapshots = []
    for entry in reader.manifest.snapshots:
        try:
            snapshot = Snapshot(files, entry, reader.manifest.layouts)
            for name, table in snapshot.tables.items():
                for rows in snapshot.rows(name):
                    report.rows += len(rows)
                    report.not_finite += count_not_finite(rows)
                    progress(len(rows))
                _check_around_blocks(snapshot, name, reader.manifest.layouts[table.number])
            _check_rows(f"file {snapshot.folder}", snapshot)
            report.snapshots += 1
            snapshots.append(snapshot)
            newest = snapshot.commit.version
            if snapshot.commit.dense is not None:
                dense[snapshot.commit.dense.version] = snapshot.commit.dense
        except ShoalError as error:
            report.problems.append(str(error))
    for one in _walked(files, reader, head, snapshots):
        if isinstance(one, CheckpointError):
            report.problems.append(str(one))
            return report
        if isinstance(one, DamagedError):
            report.problems.append(str(one))
            continue
        if isinstance(one, Unfinished):
            report.unfinished = one.bytes
            continue
        newest = max(newest, one.version)
        # The dense weights of versions before the oldest may be gone.
        if one.commit.dense is not None and one.version >= reader.manifest.oldest:
            dense[one.commit.dense.version] = one.commit.dense
        try:
            puts: Counter[str] = Counter()
            deletes: Counter[str] = Counter()
            for change in one.changes():
                counter = deletes if change.puts is None else puts
                counter[change.table] += len(change.keys)
                report.rows += len(change.keys)
                report.not_finite += 0 if change.puts is None else count_not_finite(change.puts)
                progress(len(change.keys))
            _check_counts(f"log {files.root}, version {one.version}", one.commit, puts, deletes)
            _check_paddings(files, reader.manifest.identity, one)
            report.commits += 1
        except ShoalError as error:
            report.problems.append(str(error))
    for version, wanted in sorted(dense.items()):
        try:
            read_dense(files.dense_of(version), wanted)
            report.dense += 1
        except ShoalError as error:
            report.problems.append(str(error))
    # A new log gets its first head after its manifest; before the first commit there is nothing to promise.
    if newest and (problem := _head_problem(files)) is not None:
        report.problems.append(problem)
    return report


def _check_counts(where: str, commit: Commit, puts: Counter[str], deletes: Counter[str]) -> None:
    """Raises StorageError where a commit has another number of rows or deletes of a table than it says."""
    for name in {*said_in(commit.tables), *puts, *deletes}:
        found, said = (puts[name], deletes[name]), commit.tables.get(name)
        told = (0, 0) if said is None else (said.puts, said.deletes)
        if told != found or (said is None and any(found)):
            raise _damaged(where, f"table {name!r:.100}: wanted {told[0]} rows and {told[1]} deletes; got {found}")
        if said is not None and said.replaces and said.rows != found[0]:
            raise _damaged(where, f"table {name!r:.100}: wanted all of its {said.rows} rows; got {found[0]}")


def _check_rows(where: str, snapshot: Snapshot) -> None:
    """Raises StorageError where a snapshot has another number of rows of a table than its commit says."""
    for name in {*snapshot.tables, *snapshot.commit.tables}:
        found = snapshot.tables[name].rows if name in snapshot.tables else 0
        said = snapshot.commit.tables[name].rows if name in snapshot.commit.tables else 0
        if found != said:
            raise _damaged(where, f"table {name!r:.100}: wanted {said} rows; got {found}")


def _walked(
    files: Files, reader: LogReader, head: Head, snapshots: list[Snapshot]
) -> Iterator[CommittedChanges | DamagedError | Unfinished | CheckpointError]:
    try:
        yield from walk(files, reader.manifest, head, snapshots)
    except CheckpointError as error:  # a commit that a newer Shoal wrote
        yield error


def _head_problem(files: Files) -> str | None:
    for _look in range(_LOOKS - 1):
        if head_problem(files) is None:
            return None
        time.sleep(_BETWEEN_S)
    return head_problem(files)


def _check_seal(files: Files) -> None:
    """Raises StorageError where anything comes after the manifest's checksum: reading it ignores newlines."""
    data = bytes(read_file(files.manifest, MOST_MANIFEST_BYTES))
    if data != data.rstrip(b"\n") + b"\n":
        raise StorageError(
            f"[file {files.manifest}] wanted one newline after the checksum; got {data[-20:]!r}. Restore it from "
            f"another copy."
        )


def _check_paddings(files: Files, identity: str, one: CommittedChanges) -> None:
    segment = SegmentFile(files.segment(one.whole.segment), identity, one.whole.segment, one.whole.end)
    try:
        segment.check_paddings(one.whole)
    finally:
        segment.close()


def _check_around_blocks(snapshot: Snapshot, name: str, layout: Layout) -> None:
    """Raises StorageError where something else than the schema comes before a table's blocks, anything between them, or
    something else than the stream's end after them. REQUIRES: the file has its size."""
    path, table = snapshot.path_of(name), snapshot.tables[name]
    begin = end = table.blocks[0].offset if table.blocks else table.bytes - len(_END_OF_STREAM)
    for block in table.blocks:
        if block.offset != end:
            raise _damaged(f"file {path}, offset {end}", f"wanted a block; got one at {block.offset}")
        end += block.bytes
    if begin > most_bytes(layout, 0) or table.bytes - end != len(_END_OF_STREAM):
        what = f"wanted a schema, blocks and the end of an Arrow stream; got {begin} and {table.bytes - end} bytes"
        raise _damaged(f"file {path}, offset {end}", what)
    schema, rest = bytearray(max(begin, 0)), bytearray(len(_END_OF_STREAM))
    with _native.File.open_to_read(path) as file:
        for offset, data in ((0, schema), (end, rest)):
            if data:
                file.read(offset, data)
    if table.schema_crc32c not in (None, _native.crc32c(schema)):
        raise _damaged(f"file {path}, offset 0", "the checksum of its schema is wrong")
    _check_schema(f"file {path}", bytes(schema), arrow_schema(layout))
    if rest != _END_OF_STREAM:
        where = f"file {path}, offset {end}"
        raise _damaged(where, f"wanted the end of an Arrow stream; got {bytes(rest)!r}")


def _check_schema(where: str, data: bytes, wanted: pa.Schema) -> None:
    """Raises StorageError where bytes are not one message with that schema, which another version of Arrow may write
    differently."""
    source = pa.BufferReader(data)
    try:
        found = pa.ipc.read_schema(pa.ipc.read_message(source))
    except ARROW_ERRORS as error:
        raise _damaged(where, f"wanted the schema of an Arrow stream before its rows; {error}") from None
    require_schema(found, wanted, where)
    if source.tell() != len(data):
        raise _damaged(where, f"wanted a schema of {len(data)} bytes before its rows; got one of {source.tell()}")


def _damaged(where: str, what: str) -> StorageError:
    return StorageError(f"[{where}] {sentence(what)} Restore the file from another copy.")
