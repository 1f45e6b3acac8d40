"""All that a log held at one version: rows of a snapshot, and the commits after it."""

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.errors import StorageError
from shoal.log.change import TableChange
from shoal.log.commit import Commit
from shoal.log.committed import CommittedChanges, no_table
from shoal.log.dense import read_dense
from shoal.log.files import Files
from shoal.log.manifest import Manifest
from shoal.log.snapshot import Snapshot, SnapshotError, buckets_of
from shoal.records import Layout, Rows

Older = Callable[[StorageError, Commit], "Version"]


class Version:
    """All that a log held at one version: a snapshot or none, and the commits after it."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        commit: Commit,
        snapshot: Snapshot | None,
        commits: list[CommittedChanges],
        dense: Any = None,
        older: "Older | None" = None,
    ) -> None:
        self._older = older  # gives the same version without its snapshot, which an error says is damaged
        self._files = files
        self._dense = dense  # its file, where it is kept open
        self._snapshot = snapshot
        self._commits = commits
        self.manifest = manifest
        self.commit = commit

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of its tables, by name."""
        return {layout.name: layout for layout in self.manifest.layouts if layout.name in self.commit.tables}

    def dense(self) -> dict[str, Any]:
        """Returns the state dicts that were committed last, up to this version."""
        if self.commit.dense is None:
            return {}
        return read_dense(self._files.dense_of(self.commit.dense.version), self.commit.dense, self._dense)

    def steps(
        self, table: str, first_bucket: int = 0, end_bucket: int | None = None
    ) -> Generator[TableChange, None, None]:
        """Yields changes that make the table's rows when they are applied in order: rows of the snapshot, then the
        changes after it. Rows of other buckets may be among them."""
        base, commits = self.base_of(table)
        if base is not None:
            try:
                for rows in base.rows(table, first_bucket, end_bucket):
                    yield TableChange(table, puts=rows)
            except SnapshotError as error:
                # All steps from the beginning: they put or delete again each key that was yielded so far.
                yield from self.without_snapshot(error).steps(table, first_bucket, end_bucket)
                return
        for one in commits:
            yield from one.changes(table)

    def without_snapshot(self, error: StorageError) -> "Version":
        """Returns the same version from an older snapshot, or from the log's beginning. Raises `error`, which says that
        the snapshot is damaged, where the log does not have it."""
        if self._older is None:
            raise error
        return self._older(error, self.commit)

    def most_rows(self, table: str) -> int:
        """Returns the most rows of a table that files of their sizes can hold, whatever the files say."""
        base, commits = self.base_of(table)
        number = self.manifest.number_of(table)
        held = 0 if base is None or table not in base.tables else base.size_of(table)
        for one in commits:
            held += sum(place.header.content_bytes for place in one.whole.frames if place.header.table == number)
        return held // self.layouts[table].row_bytes

    def changes(self, table: str) -> int:
        """Returns how many rows and deletes the `steps` of a table have."""
        base, commits = self.base_of(table)
        held = 0 if base is None or table not in base.tables else base.tables[table].rows
        said = [one.commit.tables[table] for one in commits if table in one.commit.tables]
        return held + sum(one.puts + one.deletes for one in said)

    def base_of(self, table: str) -> tuple[Snapshot | None, list[CommittedChanges]]:
        """Returns the snapshot and the commits that make a table's rows. Where a commit replaced all of them, these are
        no snapshot, and the commits from the last such one on."""
        for at in range(len(self._commits) - 1, -1, -1):
            said = self._commits[at].commit.tables.get(table)
            if said is not None and said.replaces:
                return None, self._commits[at:]
        return self._snapshot, self._commits

    def rows(self, table: str, first_bucket: int = 0, end_bucket: int | None = None) -> Iterator[Rows]:
        """Yields the rows of a table, each once, in pieces: first those that did not change since the snapshot, in the
        order of their buckets; then the others."""
        if table not in self.layouts:
            raise no_table(self._files, list(self.layouts), table)
        base, commits = self.base_of(table)
        winners = Winners(table, commits)
        if base is not None:
            blocks = 0
            try:
                for rows in base.rows(table, first_bucket, end_bucket):
                    yield _some(rows, ~winners.has(rows.keys) & self._is_in(table, rows, first_bucket, end_bucket))
                    blocks += 1
            except SnapshotError as error:
                whole = [rows.keys.clone() for rows in islice(base.rows(table, first_bucket, end_bucket), blocks)]
                seen = torch.cat(whole) if whole else torch.empty(0, dtype=torch.int64, device="cpu")
                seen = seen[~winners.has(seen)]
                for rows in self.without_snapshot(error).rows(table, first_bucket, end_bucket):
                    yield _some(rows, ~torch.isin(rows.keys, seen))
                return
        for rows in winners.rows():
            yield _some(rows, self._is_in(table, rows, first_bucket, end_bucket))

    def _is_in(self, table: str, rows: Rows, first: int, end: int | None) -> Tensor:
        """Returns whether each row is of these buckets."""
        if first == 0 and end is None:
            return torch.ones(len(rows), dtype=torch.bool, device="cpu")
        buckets = buckets_of(rows.keys, self.layouts[table].buckets)
        return (buckets >= first) & (buckets < (self.layouts[table].buckets if end is None else end))

    @property
    def begins_at(self) -> int:
        """The version of the snapshot that it begins with; 0 where there is none."""
        return 0 if self._snapshot is None else self._snapshot.commit.version

    @property
    def is_after_snapshot(self) -> bool:
        """Whether it has commits after the snapshot that it begins with."""
        return len(self._commits) > 0


def _some(rows: Rows, chosen: Tensor) -> Rows:
    return rows if bool(chosen.all()) else rows.some(chosen)


class Winners:
    """The last change of each key, of changes in order. keys: all keys that changed, in ascending order."""

    def __init__(self, table: str, commits: list[CommittedChanges]) -> None:
        self._table = table
        self._commits = commits
        keys = [change.keys.clone() for one in commits for change in one.changes(table)]
        self._sizes = [len(some) for some in keys]
        everything = torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64, device="cpu")
        # The last position of each key, by a stable sort.
        order = torch.sort(everything, stable=True)
        changes = order.values[1:] != order.values[:-1] if len(everything) > 1 else torch.empty(0, dtype=torch.bool)
        is_last = torch.cat([changes, torch.ones(min(len(everything), 1), dtype=torch.bool)])
        self.keys = order.values[is_last]
        self._wins = torch.zeros(len(everything), dtype=torch.bool, device="cpu")
        self._wins[order.indices[is_last]] = True

    def __len__(self) -> int:
        return len(self.keys)

    def has(self, keys: Tensor) -> Tensor:
        """Returns whether each key was put or deleted."""
        if not len(self.keys):
            return torch.zeros(len(keys), dtype=torch.bool, device="cpu")
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return self.keys[at] == keys

    def rows(self) -> Iterator[Rows]:
        """Yields the rows of keys whose last change is a put."""
        number = begin = 0
        for one in self._commits:
            for change in one.changes(self._table):
                wins = self._wins[begin : begin + self._sizes[number]]
                begin, number = begin + self._sizes[number], number + 1
                if change.puts is not None and bool(wins.any()):
                    yield change.puts if bool(wins.all()) else change.puts.some(wins)
