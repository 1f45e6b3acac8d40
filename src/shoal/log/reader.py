"""Reading a log while it is written, in the process that writes it or in another: whole commits only."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

from shoal import _native
from shoal.errors import CheckpointError, ShoalWarning, StorageError
from shoal.log.chain import Chain
from shoal.log.commit import Commit
from shoal.log.committed import CommittedChanges
from shoal.log.files import Files, names_in, size_of
from shoal.log.head import Head, read_head
from shoal.log.manifest import Manifest, SnapshotEntry, read_manifest
from shoal.log.retry import manifests_in, while_it_changes
from shoal.log.segment import DamagedError, WholeCommit, header_of
from shoal.log.segment_file import Scan, SegmentFile
from shoal.log.snapshot import Snapshot
from shoal.log.version import Older, Version
from shoal.records.excerpt import sentence
from shoal.table.changes import Mark

# Segments that one LogReader keeps open, of the 1024 files that a process may have open by default.
_MOST_HELD = 256
PARTIAL = "it says what changed since a commit that is not there"
# The folders of a checkpoint that ranks saved.
_PART = re.compile(r"rank-\d{5}-of-\d{5}")


class SnapshotWarning(ShoalWarning):
    """A snapshot is damaged; what it should hold is read from elsewhere in the log."""


class DivergedError(StorageError):
    """A log does not go on from a commit that was read before: a power cut took the commit, or it was another log's.
    Begin again with `at`."""


class LogReader:
    """Reads a log as it is when this is made, and as it grows.

    checked: whether all rows of a commit are read before the commit is believed. hold: whether commits and versions
    keep their files open, so that they can be read after others removed the files.
    """

    def __init__(self, files: Files, checked: bool = False, hold: bool = False) -> None:
        self.files = files
        self._checked = checked
        self._may_hold = _MOST_HELD if hold else 0
        self._hold = hold
        if size_of(files.manifest) is None:
            raise CheckpointError(f"[log {files.root}] wanted a log; {_instead_of_a_log(files)}")
        self.refresh()

    def refresh(self) -> None:
        """Reads the head and the manifest again, which name the segments and snapshots that came since."""
        # First the head: read later, it might promise commits of a segment that this manifest does not name.
        self._head = read_head(self.files)
        self.manifest: Manifest = read_manifest(self.files)
        if self.manifest.is_skipped(self._head.version):  # from before the repair that took this version out
            self._head = Head()

    # ---- commits

    def commits(
        self, after: int = 0, until: int | None = None, base: Commit | None = None
    ) -> Iterator[CommittedChanges]:
        """Yields the whole commits after a version, in order, up to the newest, or up to `until`: what comes after that
        is not read. Yields the commits before damage, then raises DamagedError, which is also raised for a commit that
        does not follow the one before it. base: the commit of version `after`, where a snapshot has it."""
        manifest, head = self.manifest, self._head
        chain = Chain(manifest, () if base is None else (base,))
        self.require_not_skipped(after)
        if manifest.after(after) < manifest.segments[0]:
            raise CheckpointError(
                f"[log {self.files.root}] versions up to {manifest.segments[0] - 1} are in a snapshot alone; changes "
                f"after {after} were asked for. Begin with at(version), from {manifest.oldest} on."
            )
        last, place = after, (manifest.segments[-1], 0)
        if until is not None and until <= after:
            return
        for number, first in enumerate(manifest.segments):
            is_last = number + 1 == len(manifest.segments)
            if not is_last and manifest.segments[number + 1] <= manifest.after(after):
                continue
            place = (first, len(header_of(manifest.identity, first)))
            for whole, segment in self._of_segment(first, is_last, head, after, chain):
                if whole.commit.version > after:
                    yield CommittedChanges(self.files, manifest, whole, segment)
                last, place = max(last, whole.commit.version), (first, whole.end)
                if last == until:
                    return
            if not is_last and manifest.after(last) != manifest.segments[number + 1]:
                what = f"versions up to {manifest.segments[number + 1] - 1} should stand there; the file ends"
                raise DamagedError.at(self.files.segment(first), first, place[1], last + 1, what)
        newest = max(last, manifest.snapshots[-1].version if manifest.snapshots else 0)
        if newest < head.version:
            what = f"version {head.version} was on the disk; the newest that can be read is {newest}"
            raise DamagedError.at(self.files.segment(place[0]), place[0], place[1], newest + 1, what)

    def _of_segment(
        self, first: int, is_last: bool, head: Head, seen: int, chain: Chain
    ) -> Iterator[tuple[WholeCommit, SegmentFile | None]]:
        path = self.files.segment(first)
        if size_of(path) is None:
            raise DamagedError.at(path, first, 0, first, "the file is not there")
        segment = SegmentFile(path, self.manifest.identity, first)
        held = segment if self._may_hold > 0 else None
        self._may_hold -= 1
        try:
            segment.check_header()
            scan = Scan(0)
            wanted = first
            kept_to = head.end if head.segment == first else 0
            known_to = kept_to if is_last else segment.size()  # a segment is synced before another is begun
            if self._checked:
                known_to = seen = 0
            for whole in segment.commits(len(header_of(self.manifest.identity, first)), scan, known_to, seen):
                if whole.commit.version != wanted:
                    raise segment.damaged(whole.begin, wanted, f"version {whole.commit.version} stands there")
                if (problem := chain.add(whole.commit)) is not None:
                    raise segment.damaged(whole.begin, wanted, problem)
                if whole.commit.is_partial:
                    raise segment.damaged(whole.begin, wanted, PARTIAL)
                yield whole, held
                wanted += 1
                if self.manifest.is_skipped(wanted):  # a repair ended the segment here
                    return
            if scan.end < kept_to:
                raise segment.damaged(scan.end, wanted, scan.problem or f"{kept_to} bytes were on the disk")
            # After the last commit of the last segment, another one may be being written, or was when its writer died.
            if scan.problem is not None and (not is_last or segment.is_promised(wanted, scan)):
                raise segment.damaged(scan.end, wanted, scan.problem)
        finally:
            if held is None:
                segment.close()

    def commits_since(self, mark: Mark) -> Iterator[CommittedChanges]:
        """Yields the whole commits after one that was read before, which its version and id name. Raises DivergedError
        where the log has another commit in its place or none, or goes on from another."""
        version, met = mark[0], False
        for one in self.commits(self.manifest.before(version) if self._has(version) else version):
            if not met:
                self._require_same(mark, one.commit)
                met = True
            if one.version > version:
                yield one
        if not met:
            self._require_same(mark, self.newest())

    def _has(self, version: int) -> bool:
        """Returns whether a version's commit is in the segments."""
        return version >= self.manifest.segments[0] and not self.manifest.is_skipped(version)

    def _require_same(self, mark: Mark, found: Commit | None) -> None:
        """Raises DivergedError where a commit is neither the one of a mark nor the next one after that."""
        version, known_as = mark
        if found is None or found.version < version:
            what = f"the newest is {0 if found is None else found.version}"
        elif found.version == version and found.mark != mark:
            what = f"that version is {found.mark[1]} by now"
        elif found.version > version and found.before not in (None, known_as):
            what = f"version {found.version} goes on from {found.before}"
        else:
            return
        raise DivergedError(
            f"[log {self.files.root}] wanted the commits after version {version} as it was read, {known_as}; {what}. A "
            f"power cut or a repair took it, or this is another copy of the log: what was read is not in it. Begin "
            f"again with at(version)."
        )

    def newest(self) -> Commit | None:
        """Returns the newest commit; None before the first."""
        found: Commit | None = None
        for first in self.manifest.segments[:-3:-1]:  # the last one may be empty
            for one in self.commits(self.manifest.before(first)):
                found = one.commit
            if found is not None:
                break
        if self.manifest.snapshots:
            entry = self.manifest.snapshots[-1]
            if found is None or found.version < entry.version:
                found = self._identified(Snapshot(self.files, entry, self.manifest.layouts).commit)
        return found

    def _identified(self, commit: Commit) -> Commit:
        """Returns the commit of a snapshot with its id: where the snapshot has none, a segment may still have it."""
        if not commit.id and self._has(commit.version):
            for one in self.commits(self.manifest.before(commit.version), commit.version):
                return replace(commit, id=one.commit.id)
        return commit

    # ---- a version

    def at(self, version: int | None = None) -> "Version | None":
        """Returns what the log held at a version, or at the newest; None where nothing was committed yet. Damage after
        the version does not matter. A damaged snapshot is passed over, with a SnapshotWarning, where the log has all of
        its rows elsewhere: in the segments since an older snapshot, or since the log's beginning."""
        manifest = self.manifest
        if version is not None and version < manifest.oldest:
            raise CheckpointError(
                f"[log {self.files.root}] version {version} was asked for; the oldest that is kept is "
                f"{manifest.oldest}."
            )
        if version is not None:
            self.require_not_skipped(version)
        snapshots = [one for one in manifest.snapshots if version is None or one.version <= version]
        try:
            return self._at(version, snapshots)
        except DamagedError as error:
            newest = max([manifest.before(error.version), *(one.version for one in snapshots)])
            if newest < manifest.oldest:
                raise
            raise error.reading(newest) from None

    def _at(self, version: int | None, snapshots: list[SnapshotEntry]) -> "Version | None":
        """Returns the same from the last of these snapshots that is whole."""
        manifest = self.manifest
        if not snapshots:
            return self._since(version, None, None)
        try:
            snapshot = Snapshot(self.files, snapshots[-1], manifest.layouts, self._hold)
        except StorageError as error:
            return self._without(error, snapshots, version)

        def older(error: StorageError, commit: Commit) -> Version:
            found = self._without(error, snapshots, commit.version)
            if found.commit.mark != commit.mark:
                raise error
            return found

        return self._since(version, snapshot, older)

    def _without(self, error: StorageError, snapshots: list[SnapshotEntry], version: int | None) -> "Version":
        """Returns a version without the last of these snapshots, which is damaged. Raises `error` where the log does
        not have it."""
        if read_manifest(self.files) != self.manifest:
            raise error  # another process may have removed it
        try:
            found = self._at(version, snapshots[:-1])
        except (CheckpointError, StorageError):
            raise error from None
        if found is None or found.commit.version < snapshots[-1].version:
            raise error
        warnings.warn(
            SnapshotWarning(
                f"{sentence(str(error))} Its rows come from the segments instead. `shoal repair` sets it aside."
            ),
            stacklevel=2,
        )
        return found

    def _since(self, version: int | None, snapshot: Snapshot | None, older: "Older | None") -> "Version | None":
        manifest = self.manifest
        after = snapshot.commit.version if snapshot is not None else 0
        commits: list[CommittedChanges] = []
        if version is None or version > after:
            commits.extend(self.commits(after, version, None if snapshot is None else snapshot.commit))
        commit = commits[-1].commit if commits else (None if snapshot is None else self._identified(snapshot.commit))
        if version is not None and (commit is None or commit.version != version):
            newest = 0 if commit is None else commit.version
            raise CheckpointError(f"[log {self.files.root}] version {version} was asked for; the newest is {newest}.")
        if commit is None:
            return None
        dense = None
        if self._hold and commit.dense is not None and size_of(path := self.files.dense_of(commit.dense.version)):
            dense = _native.File.open_to_read(path)
        return Version(self.files, manifest, commit, snapshot, commits, dense, older)

    def require_not_skipped(self, version: int) -> None:
        """Raises CheckpointError where a repair took a version out of the log."""
        manifest = self.manifest
        if manifest.is_skipped(version):
            first, last = next(one for one in manifest.skipped if one[0] <= version <= one[1])
            raise CheckpointError(
                f"[log {self.files.root}] version {version} was asked for; a repair set versions {first} to {last} "
                f"aside, and the log goes on from another one. Begin again with at(version), of a version that it has."
            )


def _instead_of_a_log(files: Files) -> str:
    if parts := sorted(name for name in names_in(files.root) if _PART.fullmatch(name)):
        return (
            f"got a folder that ranks saved to ({parts[0]}). Each part is a log: open one of them, or read all with "
            f"shoal.load."
        )
    return "there is no MANIFEST.json. Is the path right?"


def whole_commits(files: Files, since: Mark) -> Iterator[CommittedChanges]:
    """Yields the commits of a log after one that was read, up to the newest, while others may compact the log. Where
    the id of `since` is "", any commit of that version may stand before them."""
    while True:
        before = manifests_in(files.root)
        try:
            reader = LogReader(files, hold=True)
            for one in reader.commits_since(since) if since[1] else reader.commits(since[0]):
                yield one
                if one.damage is not None:
                    raise one.damage
                since = one.mark
            return
        except (StorageError, CheckpointError):
            if manifests_in(files.root) == before:
                raise


def version_at(files: Files, version: int) -> "Version":
    """Returns all that a log held at a version. Its files stay open, so that others may compact the log."""
    found = while_it_changes(files.root, lambda: LogReader(files, hold=True).at(version))
    assert found is not None
    return found
