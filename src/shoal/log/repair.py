"""Setting aside what is damaged in a log, so that it goes on from the highest version that is whole.

All of the log is read. A version is whole if the rows of each of its tables are: those of a snapshot, of a commit that
replaced them, or of the log's beginning, and those of all commits since. The log keeps a run of whole versions up to
the highest one. The numbers of versions above it are skipped: no other version ever gets them.

Nothing is deleted: what leaves the log is kept in set-aside/<number>/ first. Files that the new log needs are written
under names that the log does not use yet. Then the manifest is replaced, which is where a LogReader begins. A repair
that dies has changed nothing that a LogReader reads, and is run again.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from shoal import _native
from shoal.errors import ShoalWarning, StorageError
from shoal.log.chain import broken
from shoal.log.commit import Commit
from shoal.log.compact import compacting, write_snapshot
from shoal.log.files import SEGMENT_HEADER_BYTES, Files, names_in, remove_file, size_of
from shoal.log.manifest import Manifest, SnapshotEntry, changing_manifest, next_epoch, read_manifest
from shoal.log.segment import DamagedError, header_of
from shoal.log.set_aside import Aside
from shoal.log.snapshot import Snapshot
from shoal.log.survey import Found, Survey, Unfinished, survey
from shoal.log.version import Version
from shoal.records.frames import Kind, encode_commit

_PIECE_BYTES = 4 << 20
# The first repair mends all; the others are for damage that comes while the first one works.
_MOST_TIMES = 3


class RepairWarning(ShoalWarning):
    """A log was damaged; what could not be read is set aside."""


@dataclass(frozen=True)
class Repair:
    """What a repair did about the damaged places of a log.

    version: the log's newest version now. damage: the errors that name the places.
    folder: where the bytes are that left the log; None where there were none, because the file had been cut.
    """

    version: int
    damage: str
    folder: Path | None
    bytes: int

    def __str__(self) -> str:
        kept = "There was nothing to set aside." if self.folder is None else f"{self.bytes} bytes are in {self.folder}."
        return f"{self.damage} The log goes on from version {self.version}. {kept}"


def repair(files: Files, where: str) -> list[Repair]:
    """Mends all damaged places of a log. Returns what was done; an empty list where there was no damage. Raises
    StorageError, and changes nothing, where no version is whole, or where the manifest is damaged. REQUIRES: the log's
    write lock is held."""
    done: list[Repair] = []
    with compacting(files) as lock:
        if not lock:
            raise StorageError(f"[{where}] another process compacts the log. Repair it once the compaction has ended.")
        for _time in range(_MOST_TIMES):
            found = survey(files)
            if found.damage:
                done.append(_mend(files, where, found))
                continue
            if found.unfinished is not None:
                done.append(_keep_unfinished(files, found, found.unfinished))
            return done
    raise StorageError(f"[{where}] it is damaged again after {_MOST_TIMES} repairs. Look at its disk.")


def find_damage(files: Files) -> StorageError | None:
    """Returns the first damaged place of a log; None where there is none. Reads all rows."""
    return next(iter(survey(files).damage), None)


@dataclass(frozen=True)
class _Base:
    """A place where a run of versions can begin: a snapshot, the log's beginning, or after damage.

    known: tables whose rows are whole there. is_whole: whether all of its tables are.
    """

    version: int
    snapshot: Snapshot | None = None
    known: frozenset[str] = frozenset()
    is_whole: bool = True


@dataclass(frozen=True)
class _Kept:
    """The versions that a log keeps, all of which are whole.

    first: the lowest one; 0 where the log begins with nothing. newest: the highest one.
    commit: the commit of the first one. made_of: where the first one has no snapshot yet, what it is made from.
    commits: the commits after the first one.
    """

    first: int
    newest: int
    commit: Commit | None
    made_of: Version | None
    commits: list[Found]


def _mend(files: Files, where: str, found: Survey) -> Repair:
    damage = " ".join(map(str, found.damage))
    kept = _best(files, found)
    if kept is None:
        raise StorageError(
            f"[{where}] no version of it can be read whole. {damage} A repair has nothing to go on from, and has "
            f"changed nothing: restore the log from another copy, or begin one at another path."
        )
    manifest = found.manifest
    segments, written = _segments(files, found, kept)
    snapshots, lost = _snapshots(found, kept)
    aside, made, is_replaced = Aside(files), [], False
    try:
        for first in manifest.segments:
            if first not in segments or first in written:
                aside.take(files.segment(first))
        if kept.commits and (last := kept.commits[-1].changes.whole).segment in set(segments) - set(written):
            aside.take(files.segment(last.segment), last.end)
        for version in lost:
            for name in names_in(files.snapshot(version)):
                aside.take(files.snapshot(version) / name)
        _take_dense(files, aside, kept)
        aside.finish("\n".join(map(str, found.damage)))
        # Files under names that the manifest has are replaced last: they are damaged, and were set aside.
        for first in sorted(written, key=lambda one: one in manifest.segments):
            is_replaced = is_replaced or first in manifest.segments
            if not is_replaced:
                made.append(files.segment(first))
            _write_segment(files, manifest, first, written[first], _base_of(kept, first))
        if kept.made_of is not None:
            is_replaced = is_replaced or kept.first in lost
            snapshots = (write_snapshot(files, kept.made_of, lambda _rows: None), *snapshots)
    except BaseException:
        if not is_replaced:
            aside.abandon()
        for path in made:
            with suppress(StorageError):
                remove_file(path)
        raise
    skipped = tuple(one for one in manifest.skipped if one[1] > kept.first and one[0] <= kept.newest)
    if found.shown > kept.newest:
        skipped = (*skipped, (kept.newest + 1, found.shown))
    with changing_manifest(files) as write:
        write(
            replace(
                next_epoch(read_manifest(files)),  # a writer that lost its lock then sees another writer
                snapshots=snapshots,
                segments=segments,
                kept_from=max(kept.first, min(manifest.kept_from, kept.newest)),
                skipped=skipped,
            )
        )
    return Repair(kept.newest, damage, Path(aside.folder) if aside.bytes else None, aside.bytes)


def _keep_unfinished(files: Files, found: Survey, rest: Unfinished) -> Repair:
    """Sets aside what a writer that died left, which the next writer cuts off."""
    newest = rest.version - 1
    aside = Aside(files)
    try:
        aside.take(rest.path, rest.offset)
        _take_dense(files, aside, _Kept(0, newest, None, None, []))
        aside.finish(str(rest))
    except BaseException:
        aside.abandon()
        raise
    newest = max([newest, *(one.version for one in found.manifest.snapshots)])
    return Repair(newest, f"{rest} Its writer died.", Path(aside.folder), aside.bytes)


# ---- what is kept


def _best(files: Files, found: Survey) -> _Kept | None:
    """Returns the highest version that is whole and the whole versions right before it; None where none is whole."""
    manifest, commits = found.manifest, found.commits
    after = {one.version: at for at, one in enumerate(commits)}
    bases = [_Base(0)] if manifest.begins_with_nothing else []
    for snapshot, lost in found.snapshots:
        known = frozenset(snapshot.commit.tables) - lost
        bases.append(_Base(snapshot.commit.version, snapshot, known, not lost))
    tried = []
    for base in bases:
        at = after.get(manifest.after(base.version), len(commits))
        is_next = at < len(commits) and (base.snapshot is None or _is_next(manifest, base.snapshot.commit, commits[at]))
        tried.append((base, at if is_next else len(commits)))
    for at, one in enumerate(commits):
        if at == 0 or not _is_next(manifest, commits[at - 1].changes.commit, one):
            tried.append((_Base(one.version - 1, is_whole=False), at))
    best: tuple[tuple[int, int, bool], _Base, list[Found]] | None = None
    for base, at in tried:
        run = _run(manifest, commits[at:])
        if (reach := _reach(base, run)) is None:
            continue
        newest, first = reach
        # Of runs that end equally high, the one that begins lowest; of equal ones, one that needs no new snapshot.
        rank = newest, -first, base.is_whole and first == base.version
        if best is None or rank > best[0]:
            best = rank, base, run
    if best is None:
        return None
    (newest, first, is_there), base, run = best
    first = -first
    commit = None if base.snapshot is None else base.snapshot.commit
    made_of = None
    if not is_there:
        some = [one.changes for one in run if one.version <= first]
        commit = some[-1].commit
        made_of = Version(files, manifest, commit, base.snapshot, some)
    return _Kept(first, newest, commit, made_of, [one for one in run if first < one.version <= newest])


def _run(manifest: Manifest, commits: list[Found]) -> list[Found]:
    """Returns the first of these commits up to where a version is missing, or was not written after the one before."""
    for at in range(1, len(commits)):
        if not _is_next(manifest, commits[at - 1].changes.commit, commits[at]):
            return commits[:at]
    return commits


def _is_next(manifest: Manifest, before: Commit, one: Found) -> bool:
    return manifest.after(before.version) == one.version and broken(before, one.changes.commit) is None


def _reach(base: _Base, run: list[Found]) -> tuple[int, int] | None:
    """Returns the highest version that is whole, and the lowest from which on all are whole; None where none is."""
    known = set(base.known)
    names = set(base.snapshot.commit.tables if base.snapshot is not None else ())
    begins = base.is_whole or base.snapshot is not None
    low = base.version if base.is_whole else None
    best = None if low is None else (low, low)
    for one in run:
        tables = one.changes.commit.tables
        for name, said in tables.items():
            if name in one.lost:
                known.discard(name)
            elif said.replaces or (begins and name not in names):
                known.add(name)
        names |= set(tables)
        if known >= set(tables) and not one.changes.commit.is_partial:
            low = one.version if low is None else low
            best = one.version, low
        else:
            low = None
    return best


# ---- how it is kept

_Range = tuple[int, int, int]  # a segment's first version, and two offsets in the segment


def _segments(files: Files, found: Survey, kept: _Kept) -> tuple[tuple[int, ...], dict[int, list[_Range]]]:
    """Returns the first versions of the segments that the log has, and for those that must be written, the ranges that
    they are made of."""
    manifest = found.manifest
    no_header = {one.segment for one in found.damage if isinstance(one, DamagedError) and one.offset == 0}
    segments: list[int] = []
    written: dict[int, list[_Range]] = {}
    for segment, group in groupby(kept.commits, key=lambda one: one.changes.whole.segment):
        some = list(group)
        here = [one for one in found.commits if one.changes.whole.segment == segment]
        here = here[: here.index(some[-1]) + 1]
        at, is_whole = len(header_of(manifest.identity, segment)), segment not in no_header
        for one in here:
            is_whole = is_whole and one.changes.whole.begin == at and not one.lost
            at = one.changes.whole.end
        is_whole = is_whole and here[0].version == segment
        if some[-1] is not kept.commits[-1]:
            is_whole = is_whole and size_of(files.segment(segment)) == at
        segments.append(segment if is_whole else some[0].version)
        if not is_whole:
            written[segments[-1]] = [(segment, one.changes.whole.begin, one.changes.whole.end) for one in some]
    # The next commits get a segment of their own, unless they can go on where the last version ends.
    last = segments[-1] if segments else None
    if last is None or found.shown > kept.newest or (last not in written and last != manifest.segments[-1]):
        segments.append(found.shown + 1)
        written[found.shown + 1] = []
    return tuple(segments), written


def _snapshots(found: Survey, kept: _Kept) -> tuple[tuple[SnapshotEntry, ...], list[int]]:
    """Returns the snapshots that the log keeps, and the versions of the others."""
    ids = {one.version: one.changes.commit.id for one in kept.commits}
    whole = {
        snapshot.commit.version
        for snapshot, lost in found.snapshots
        if not lost and snapshot.commit.id in ("", ids.get(snapshot.commit.version, snapshot.commit.id))
    }
    stay = tuple(
        one for one in found.manifest.snapshots if one.version in whole and kept.first <= one.version <= kept.newest
    )
    return stay, [one.version for one in found.manifest.snapshots if one not in stay]


def _take_dense(files: Files, aside: Aside, kept: _Kept) -> None:
    """Sets aside dense weights that no kept version needs."""
    needed = 0
    if kept.commit is not None:
        needed = kept.first if kept.commit.dense is None else kept.commit.dense.version
    for name in names_in(files.dense):
        stem = name.partition(".")[0]
        if stem.isdecimal() and not needed <= int(stem) <= kept.newest:
            aside.take(files.dense / name)


def _base_of(kept: _Kept, first: int) -> Commit | None:
    """Returns the commit before the first one of a segment, where that one came later in its old segment: then it may
    not say all."""
    before = kept.commit
    for one in kept.commits:
        if one.version == first:
            commit, begins = one.changes.commit, one.changes.whole.begin == SEGMENT_HEADER_BYTES
            return None if begins or before is None or commit.before is None else replace(before, id=commit.before)
        before = one.changes.commit
    return None


def _write_segment(files: Files, manifest: Manifest, first: int, ranges: list[_Range], base: Commit | None) -> None:
    """Writes a segment of commits from other segments, in the place of one that may be there."""
    path = files.segment(first)
    temporary = path.with_name(path.name + ".tmp")
    remove_file(temporary)  # of a repair that died
    header = header_of(manifest.identity, first)
    try:
        with _native.File.create_new(temporary) as file:
            file.write(0, header)
            at = len(header)
            if base is not None:
                said, binary = base.to_frame(None)
                content = {"commit": said, "id": base.id}
                for piece in encode_commit(content, version=base.version, binary=binary, kind=Kind.BASE):
                    file.write(at, piece)
                    at += len(piece)
            for segment, begin, end in ranges:
                with _native.File.open_to_read(files.segment(segment)) as source:
                    for offset in range(begin, end, _PIECE_BYTES):
                        data = bytearray(min(_PIECE_BYTES, end - offset))
                        source.read(offset, data)
                        file.write(at, data)
                        at += len(data)
            file.sync()
        _native.rename_file(temporary, path)
    except BaseException:
        with suppress(StorageError):
            remove_file(temporary)
        raise
    _native.sync_directory(files.segments)
