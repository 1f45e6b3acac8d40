"""Reading a log's files to their end, also after damage, where a LogReader stops."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shoal import _native
from shoal.errors import StorageError
from shoal.log.chain import Chain
from shoal.log.commit import Commit
from shoal.log.committed import CommittedChanges
from shoal.log.files import MOST_WITH_HOLES, FilePath, Files, holes_in, size_of
from shoal.log.head import Head, read_head
from shoal.log.manifest import Manifest, read_manifest
from shoal.log.reader import PARTIAL
from shoal.log.segment import DamagedError, Place, header_of
from shoal.log.segment_file import Scan, SegmentFile
from shoal.log.snapshot import Snapshot
from shoal.records.excerpt import sentence, without_place


@dataclass(frozen=True)
class Unfinished:
    """Bytes after the last whole commit: a commit that is being written, or was when its writer died.

    is_damaged: whether they are not the beginning of a commit. A power cut may leave such bytes, and so may damage to
        bytes that were not known to be on the disk.
    """

    path: FilePath
    offset: int
    bytes: int
    version: int
    what: str
    is_damaged: bool

    def __str__(self) -> str:
        return f"[file {self.path}] version {self.version}, offset {self.offset}: {sentence(self.what)}"


def walk(
    files: Files, manifest: Manifest, head: Head, snapshots: Iterable[Snapshot] = (), checked: bool = False
) -> Iterator[CommittedChanges | DamagedError | Unfinished]:
    """Yields all whole commits of a log's segments, in order; an error where a commit is missing or does not follow the
    one before it; and at the end what is not finished. checked: whether rows are read, and a commit with damaged rows
    does not count as whole."""
    known = {one.commit.version: one.commit for one in snapshots}
    chain = Chain(manifest, known.values())
    newest = manifest.snapshots[-1].version if manifest.snapshots else 0
    for number, first in enumerate(manifest.segments):
        end = manifest.segments[number + 1] if number + 1 < len(manifest.segments) else None
        path = files.segment(first)
        if size_of(path) is None:
            yield DamagedError.at(path, first, 0, first, "the file is not there")
            continue
        most = None
        if (what := holes_in(path)) is not None:
            yield DamagedError.at(path, first, 0, first, what)
            # A power cut may leave holes after commits that are whole.
            entry = _native.look_at(path)
            most = MOST_WITH_HOLES + (0 if entry is None else entry.disk_bytes)
        segment = SegmentFile(path, manifest.identity, first, most)
        try:
            for one in _Walk(files, manifest, head, chain, known, segment, end, newest, checked).items():
                if isinstance(one, CommittedChanges):
                    newest = max(newest, one.version)
                yield one
        finally:
            segment.close()


class _Walk:
    """Walks one segment."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        head: Head,
        chain: Chain,
        known: Mapping[int, Commit],
        segment: SegmentFile,
        end: int | None,
        newest: int,
        checked: bool,
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._chain = chain
        self._known = known  # commits of snapshots, by version
        self._segment = segment
        self._end = end  # the first version of the next segment
        self._promised = 0 if manifest.is_skipped(head.version) else head.version
        self._promised_to = head.end if self._promised and head.segment == segment.first else 0
        self._kept_to = 0 if checked else self._promised_to if end is None else segment.size()
        self._newest = newest  # in segments and snapshots before
        self._wanted = segment.first

    def items(self) -> Iterator[CommittedChanges | DamagedError | Unfinished]:
        segment = self._segment
        at = len(header_of(self._manifest.identity, segment.first))
        is_said = is_damaged = False
        last: Commit | None = None
        try:
            segment.check_header()
        except DamagedError as error:
            yield error
            is_said = True
            if segment.size() < at or segment.is_another():
                return
        while True:
            scan = Scan(at, last, self._known)
            for whole in segment.commits(at, scan, self._kept_to):
                version = whole.commit.version
                if version != self._wanted and not is_said:
                    yield segment.damaged(whole.begin, self._wanted, f"version {version} stands there")
                if not self._fits(version):
                    is_said = True
                    continue
                is_said = False
                if (broken := self._chain.add(whole.commit)) is not None:
                    yield segment.damaged(whole.begin, version, broken)
                elif whole.commit.is_partial and not is_damaged:
                    yield segment.damaged(whole.begin, version, PARTIAL)
                yield CommittedChanges(self._files, self._manifest, whole)
                self._wanted = version + 1
                if self._manifest.is_skipped(self._wanted):  # a repair ended the segment here
                    return
            problem = scan.problem
            resume = None if problem is None else segment.next_whole(scan.stopped, self._fits, self._kept_to)
            if resume is None:
                if not is_said:
                    yield from self._at_end(scan)
                return
            # Bytes before a whole commit are written by now: what is still broken is damaged.
            again = next(segment.commits(scan.end, Scan(scan.end), self._kept_to), None)
            if again is not None:
                at, last = scan.end, scan.last
                continue
            if not is_said:
                yield segment.damaged(scan.end, self._wanted, problem or "")
            at, last, is_said, is_damaged = resume, None, True, True

    def _fits(self, version: int) -> bool:
        """Returns whether a version may be in the rest of the segment."""
        is_before = self._end is None or version < self._end
        return self._wanted <= version and is_before and not self._manifest.is_skipped(version)

    def _at_end(self, scan: Scan) -> Iterator[DamagedError | Unfinished]:
        """Yields what is missing after the last whole commit."""
        segment, wanted = self._segment, self._wanted
        if self._end is not None:
            if self._manifest.after(wanted - 1) != self._end or scan.problem is not None:
                what = f"versions up to {self._end - 1} should stand there; the file ends"
                yield segment.damaged(scan.end, wanted, scan.problem or what)
            return
        newest = max(self._newest, wanted - 1)
        if scan.end < self._promised_to or segment.is_promised(wanted, scan):
            what = scan.problem or f"{self._promised_to} bytes were on the disk"
            yield segment.damaged(scan.end, wanted, what)
        elif newest < self._promised:
            what = f"version {self._promised} was on the disk; the newest that can be read is {newest}"
            yield segment.damaged(scan.end, newest + 1, what)
        elif scan.problem is not None:
            rest = segment.size() - scan.end
            yield Unfinished(segment.path, scan.end, rest, wanted, scan.problem, scan.is_damaged)


@dataclass(frozen=True)
class Found:
    """A commit of which all frames are there. lost: tables of which it has damaged rows."""

    changes: CommittedChanges
    lost: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        """Its number."""
        return self.changes.version


@dataclass
class Survey:
    """What is whole in a log, and what is not.

    snapshots: those with a whole list of blocks, each with the names of tables that have damaged blocks.
    """

    manifest: Manifest
    head: Head
    snapshots: list[tuple[Snapshot, frozenset[str]]] = field(default_factory=list)
    commits: list[Found] = field(default_factory=list)
    damage: list[StorageError] = field(default_factory=list)
    unfinished: Unfinished | None = None

    @property
    def shown(self) -> int:
        """The highest version that the log ever had, as far as its files say."""
        manifest = self.manifest
        numbers = [self.head.version, manifest.segments[-1] - 1, *(one.version for one in manifest.snapshots)]
        numbers += [one.version for one in self.commits]
        numbers += [one.version for one in self.damage if isinstance(one, DamagedError)]
        return max(numbers)


def survey(files: Files) -> Survey:
    """Reads all of a log but its dense files."""
    try:
        found = Survey(read_manifest(files), read_head(files))
    except StorageError as error:
        error.add_note("A repair sets damaged segments aside, and cannot mend a manifest. Nothing was changed.")
        raise
    of_snapshots: list[StorageError] = []
    for entry in found.manifest.snapshots:
        try:
            snapshot = Snapshot(files, entry, found.manifest.layouts)
        except StorageError as error:
            of_snapshots.append(error)
            continue
        gone = set()
        for name in snapshot.tables:
            try:
                for _rows in snapshot.rows(name):
                    pass
            except StorageError as error:
                of_snapshots.append(error)
                gone.add(name)
        found.snapshots.append((snapshot, frozenset(gone)))
    for one in walk(files, found.manifest, found.head, [snapshot for snapshot, _lost in found.snapshots]):
        if isinstance(one, CommittedChanges):
            damage, lost = _lost(files, found.manifest, one)
            found.commits.append(Found(one, lost))
            found.damage += [] if damage is None else [damage]
        elif isinstance(one, DamagedError):
            found.damage.append(one)
        elif one.is_damaged:
            found.damage.append(_as_damage(found.manifest, one))
        else:
            found.unfinished = one
    found.damage += of_snapshots
    return found


def _as_damage(manifest: Manifest, one: Unfinished) -> DamagedError:
    return DamagedError.at(one.path, manifest.segments[-1], one.offset, one.version, one.what)


def _lost(files: Files, manifest: Manifest, one: CommittedChanges) -> tuple[DamagedError | None, frozenset[str]]:
    """Returns the first error in a commit's rows, and the tables of which its rows are damaged or not allowed."""
    whole, names = one.whole, [layout.name for layout in manifest.layouts]
    segment = SegmentFile(files.segment(whole.segment), manifest.identity, whole.segment, whole.end)
    by_table: dict[int, list[Place]] = {}
    for place in whole.frames:
        by_table.setdefault(place.header.table, []).append(place)
    lost: set[str] = set()
    first: DamagedError | None = None
    try:
        for number, frames in by_table.items():
            try:
                for _change in CommittedChanges(files, manifest, replace(whole, frames=frames), segment).changes():
                    pass
            except StorageError as error:
                if first is None:
                    placed = segment.damaged(whole.begin, one.version, without_place(str(error)))
                    first = error if isinstance(error, DamagedError) else placed
                lost |= set(names[number : number + 1]) or set(one.commit.tables)
    finally:
        segment.close()
    return first, frozenset(lost)
