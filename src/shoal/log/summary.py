"""What a log holds, told in numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import StorageError
from shoal.log.changing import while_it_changes
from shoal.log.commit import Commit
from shoal.log.files import Files, names_in, size_of
from shoal.log.reader import LogReader
from shoal.log.scores import Bar, ScoreHistogram
from shoal.log.segment import DamagedError
from shoal.log.snapshot import Snapshot
from shoal.records import Layout


@dataclass(frozen=True)
class TableSummary:
    """A table at the newest version. bytes: of its rows, with keys and scores. scores: None where nobody asked."""

    layout: Layout
    rows: int
    bytes: int
    step: int
    scores: tuple[Bar, ...] | None
    nonfinite_scores: int


@dataclass(frozen=True)
class SnapshotSummary:
    """A snapshot."""

    version: int
    time: float
    rows: int
    bytes: int


@dataclass(frozen=True)
class SegmentSummary:
    """A segment; without commits yet where `last` is before `first`."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """A log."""

    identity: str
    oldest: int | None  # version whose rows can be had; None before the first commit
    newest: int | None
    tables: tuple[TableSummary, ...]
    snapshots: tuple[SnapshotSummary, ...]
    segments: tuple[SegmentSummary, ...]
    commits: tuple[Commit, ...]  # the last ones, newest first
    dense_bytes: int
    damage: str | None = None  # what is wrong behind the newest version, and where


def summarize(
    files: Files, commits: int = 10, scores: bool = True, progress: Callable[[int], None] = lambda _rows: None
) -> Summary:
    """What a log holds, while others may write to it. commits: how many of the last ones are told of, of those that are
    not in a snapshot alone. scores: whether all rows are read, for histograms of their scores; `progress` hears of
    them. Where a segment is damaged, it tells of what stands before; damage within rows is seen where all are read."""
    try:
        return while_it_changes(files.root, lambda: _whole(_summarize(files, commits, scores, progress)))
    except _DamagedLogError as error:
        return error.summary


class _DamagedLogError(StorageError):
    def __init__(self, summary: Summary) -> None:
        super().__init__(summary.damage)
        self.summary = summary


def _whole(summary: Summary) -> Summary:
    """Raises where it is not: what is missing may have been compacted meanwhile."""
    if summary.damage is not None:
        raise _DamagedLogError(summary)
    return summary


def _summarize(files: Files, commits: int, scores: bool, progress: Callable[[int], None]) -> Summary:
    reader = LogReader(files, checked=scores)
    manifest = reader.manifest
    snapshots = [Snapshot(files, entry, manifest.layouts) for entry in manifest.snapshots]
    found: list[Commit] = []
    damage = None
    try:
        for one in reader.commits(manifest.segments[0] - 1):
            found.append(one.commit)
    except DamagedError as error:
        damage = str(error)
    newest = max([0, *(one.commit.version for one in snapshots), *(one.version for one in found)])
    version = reader.at(newest) if newest else None
    tables = []
    for name, layout in version.layouts.items() if version is not None else ():
        assert version is not None
        said = version.commit.tables[name]
        histogram = ScoreHistogram()
        if scores:
            for rows in version.rows(name):
                if rows.scores is not None:
                    histogram.add(rows.scores)
                progress(len(rows))
        bars = tuple(histogram.bars()) if scores else None
        size = said.rows * (layout.row_bytes + 16)
        tables.append(TableSummary(layout, said.rows, size, said.step, bars, histogram.nonfinite))
    shown = {one.commit.version: one.commit for one in snapshots} | {one.version: one for one in found}
    last = sorted(shown, reverse=True)[:commits]
    return Summary(
        manifest.identity,
        None if version is None else manifest.oldest,
        None if version is None else newest,
        tuple(tables),
        tuple(_snapshot(one) for one in snapshots),
        tuple(_segments(files, manifest.segments, found)),
        tuple(shown[number] for number in last),
        sum(size_of(files.dense / name) or 0 for name in names_in(files.dense)),
        damage,
    )


def _snapshot(snapshot: Snapshot) -> SnapshotSummary:
    tables = snapshot.tables.values()
    rows, size = sum(one.rows for one in tables), sum(one.bytes for one in tables)
    return SnapshotSummary(snapshot.commit.version, snapshot.commit.time, rows, size)


def _segments(files: Files, firsts: tuple[int, ...], commits: list[Commit]) -> list[SegmentSummary]:
    newest = commits[-1].version if commits else firsts[-1] - 1
    ends = [*(first - 1 for first in firsts[1:]), max(newest, firsts[-1] - 1)]
    return [
        SegmentSummary(first, end, size_of(files.segment(first)) or 0) for first, end in zip(firsts, ends, strict=True)
    ]
