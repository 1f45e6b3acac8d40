"""What a log holds, in numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import StorageError
from shoal.log.commit import Commit
from shoal.log.files import Files, names_in, size_of
from shoal.log.head import read_head
from shoal.log.manifest import Manifest
from shoal.log.reader import LogReader
from shoal.log.retry import while_it_changes
from shoal.log.scores import Bar, ScoreHistogram
from shoal.log.segment import DamagedError
from shoal.log.snapshot import Snapshot
from shoal.log.survey import Unfinished, walk
from shoal.records import Layout


@dataclass(frozen=True)
class TableSummary:
    """A table at the newest version. bytes: of its rows, with keys and scores. scores: None where rows were not
    read."""

    layout: Layout
    rows: int
    bytes: int
    step: int
    scores: tuple[Bar, ...] | None


@dataclass(frozen=True)
class SnapshotSummary:
    """A snapshot."""

    version: int
    time: float
    rows: int
    bytes: int


@dataclass(frozen=True)
class SegmentSummary:
    """A segment. It has no commits yet where `last` is less than `first`."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """A log."""

    identity: str
    oldest: int | None  # the oldest version that can be read; None before the first commit
    newest: int | None
    tables: tuple[TableSummary, ...]
    snapshots: tuple[SnapshotSummary, ...]
    segments: tuple[SegmentSummary, ...]
    commits: tuple[Commit, ...]  # the last ones, newest first
    dense_bytes: int
    damage: str | None = None  # what is wrong first, and where
    unfinished: int = 0  # bytes after the last whole commit


def summarize(
    files: Files, commits: int = 10, scores: bool = True, progress: Callable[[int], None] = lambda _rows: None
) -> Summary:
    """Returns what a log holds, while others may write to it. Of a damaged segment it has what comes before the damage;
    of a damaged snapshot it has nothing. Damage within rows is only found where all rows are read.

    commits: how many of the newest commits are in it, of those that are in segments.
    scores: whether all rows are read, for histograms of their scores. progress: called with numbers of rows.
    """
    try:
        return while_it_changes(files.root, lambda: _whole(_summarize(files, commits, scores, progress)))
    except _DamagedLogError as error:
        return error.summary


class _DamagedLogError(StorageError):
    def __init__(self, summary: Summary) -> None:
        super().__init__(summary.damage)
        self.summary = summary


def _whole(summary: Summary) -> Summary:
    """Raises where the summary names damage: what is missing may have been compacted in the meantime."""
    if summary.damage is not None:
        raise _DamagedLogError(summary)
    return summary


def _summarize(files: Files, commits: int, scores: bool, progress: Callable[[int], None]) -> Summary:
    head = read_head(files)  # first: it promises no more than what is read after it
    reader = LogReader(files, checked=scores)
    manifest = reader.manifest
    damages: list[str] = []
    snapshots = []
    for entry in manifest.snapshots:
        try:
            snapshots.append(Snapshot(files, entry, manifest.layouts))
        except StorageError as error:
            damages.append(str(error))
    found: list[Commit] = []
    unfinished = 0
    for one in walk(files, manifest, head, snapshots, checked=scores):
        if isinstance(one, DamagedError):
            damages.insert(0, str(one))
            break
        if isinstance(one, Unfinished):
            unfinished = one.bytes
        else:
            found.append(one.commit)
    newest = max([0, *(one.commit.version for one in snapshots), *(one.version for one in found)])
    version = None
    try:
        version = reader.at(newest) if newest else None
    except StorageError as error:
        damages.append(str(error))
    tables = []
    for name, layout in version.layouts.items() if version is not None else ():
        assert version is not None
        said = version.commit.tables[name]
        histogram, is_read = ScoreHistogram(), scores
        try:
            for rows in version.rows(name) if scores else ():
                if rows.scores is not None:
                    histogram.add(rows.scores)
                progress(len(rows))
        except StorageError as error:
            damages.append(str(error))
            is_read = False
        bars = tuple(histogram.bars()) if is_read else None
        size = said.rows * layout.format.record_bytes
        tables.append(TableSummary(layout, said.rows, size, said.step, bars))
    shown = {one.commit.version: one.commit for one in snapshots} | {one.version: one for one in found}
    last = sorted(shown, reverse=True)[:commits]
    return Summary(
        manifest.identity,
        None if version is None else manifest.oldest,
        None if version is None else newest,
        tuple(tables),
        tuple(_snapshot(one) for one in snapshots),
        tuple(_segments(files, manifest, found)),
        tuple(shown[number] for number in last),
        sum(size_of(files.dense / name) or 0 for name in names_in(files.dense)),
        damages[0] if damages else None,
        unfinished,
    )


def _snapshot(snapshot: Snapshot) -> SnapshotSummary:
    tables = snapshot.tables.values()
    rows, size = sum(one.rows for one in tables), sum(one.bytes for one in tables)
    return SnapshotSummary(snapshot.commit.version, snapshot.commit.time, rows, size)


def _segments(files: Files, manifest: Manifest, commits: list[Commit]) -> list[SegmentSummary]:
    firsts = manifest.segments
    newest = commits[-1].version if commits else firsts[-1] - 1
    ends = [*map(manifest.before, manifest.segments[1:]), max(newest, firsts[-1] - 1)]
    return [
        SegmentSummary(first, end, size_of(files.segment(first)) or 0) for first, end in zip(firsts, ends, strict=True)
    ]
