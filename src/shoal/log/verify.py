"""Reading every byte of a log, and comparing it with its checksum."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import ShoalError, StorageError
from shoal.log.changing import while_it_changes
from shoal.log.dense import read_dense
from shoal.log.files import Files
from shoal.log.reader import LogReader
from shoal.log.snapshot import Snapshot


@dataclass
class Report:
    """What was read, and what is wrong."""

    snapshots: int = 0
    commits: int = 0
    rows: int = 0
    dense: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether all of it is as it was written."""
        return not self.problems


def verify(files: Files, progress: Callable[[int], None] = lambda _rows: None) -> Report:
    """Read everything that the manifest names, while others may write and compact. `progress` hears of rows."""
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
    try:
        reader = LogReader(files)
    except ShoalError as error:
        report.problems.append(str(error))
        return report
    dense = {}
    for entry in reader.manifest.snapshots:
        try:
            snapshot = Snapshot(files, entry, reader.manifest.layouts)
            for name in snapshot.tables:
                for rows in snapshot.rows(name):
                    report.rows += len(rows)
                    progress(len(rows))
            report.snapshots += 1
            if snapshot.commit.dense is not None:
                dense[snapshot.commit.dense.version] = snapshot.commit.dense
        except ShoalError as error:
            report.problems.append(str(error))
    try:
        for one in reader.commits(reader.manifest.segments[0] - 1):
            for change in one.changes():
                report.rows += len(change.keys)
                progress(len(change.keys))
            report.commits += 1
            # Of versions before the oldest that can be had, it may be gone.
            if one.commit.dense is not None and one.version >= reader.manifest.oldest:
                dense[one.commit.dense.version] = one.commit.dense
    except ShoalError as error:
        report.problems.append(str(error))
    for version, wanted in sorted(dense.items()):
        try:
            read_dense(files.dense_of(version), wanted)
            report.dense += 1
        except ShoalError as error:
            report.problems.append(str(error))
    return report
