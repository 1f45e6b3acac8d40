"""Setting aside what is damaged in a log, so that it goes on from the highest version that is whole.

All of the log is read. A version is whole if the rows of each of its tables are: those of a snapshot, of a commit that
replaced them, or of the log's beginning, and of all commits since. The log keeps the versions from such a one on up to
the highest; the numbers of those that were higher are skipped, so that no other version ever has them.

Nothing is deleted: what leaves the log is kept in set-aside/<number>/ first. Files that the new log needs are written
under names that the log does not use yet. Then the manifest changes, which is all that readers see. A repair that dies
has changed nothing that they read, and is run again.
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
# The first mends all; others are for what is damaged while the first is at work.
_MOST_TIMES = 3


class RepairWarning(ShoalWarning):
    """A log was damaged; what could not be read is set aside."""


@dataclass(frozen=True)
class Repair:
    """What was done about the places of a log that were damaged.

    version: the newest of the log since. damage: the errors that name the places.
    folder: where the bytes are that left the log; None where there were none, as the file had been cut.
    """

    version: int
    damage: str
    folder: Path | None
    bytes: int

    def __str__(self) -> str:
        kept = "There was nothing to set aside." if self.folder is None else f"{self.bytes} bytes are in {self.folder}."
        return f"{self.damage} The log goes on from version {self.version}. {kept}"


def repair(files: Files, where: str) -> list[Repair]:
    """Mend all places of a log that are damaged; what was done, none where there was nothing to do. Raises
    StorageError, and changes nothing, where no version is whole, or the manifest is damaged. REQUIRES: the log's write
    lock."""
    done: list[Repair] = []
    with compacting(files) as alone:
        if not alone:
            raise StorageError(f"[{where}] another process compacts the log. Repair it when that is over.")
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
    """The first place in a log that is damaged; all of its rows are read."""
    return next(iter(survey(files).damage), None)


@dataclass(frozen=True)
class _Base:
    """Where versions can begin: a snapshot, nothing before version 1, or damage.

    known: tables whose rows are whole there. is_whole: whether that is all that it has.
    """

    version: int
    snapshot: Snapshot | None = None
    known: frozenset[str] = frozenset()
    is_whole: bool = True


@dataclass(frozen=True)
class _Kept:
    """The versions that a log keeps, all of which are whole.

    first: of the lowest; 0 where the log begins with nothing. newest: the highest.
    commit: the first one's. made_of: where there is no snapshot of the first one yet, what it is made from.
    commits: those after the first.
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
        # Names that the manifest has come last: what stands there is damaged, and is kept from then on.
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
                next_epoch(read_manifest(files)),  # a writer that lost its lock sees that it is not alone
                snapshots=snapshots,
                segments=segments,
                kept_from=max(kept.first, min(manifest.kept_from, kept.newest)),
                skipped=skipped,
            )
        )
    return Repair(kept.newest, damage, Path(aside.folder) if aside.bytes else None, aside.bytes)


def _keep_unfinished(files: Files, found: Survey, rest: Unfinished) -> Repair:
    """Keep what a writer that died left, which the next one cuts off."""
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
    """The versions up to the highest that is whole, as many as there are without one that is not."""
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
        # Of those that come as high, the one that begins the lowest; and one that is there, not one to be made.
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
    """The first of these commits, as far as no version is missing, and each was written after the one before."""
    for at in range(1, len(commits)):
        if not _is_next(manifest, commits[at - 1].changes.commit, commits[at]):
            return commits[:at]
    return commits


def _is_next(manifest: Manifest, before: Commit, one: Found) -> bool:
    return manifest.after(before.version) == one.version and broken(before, one.changes.commit) is None


def _reach(base: _Base, run: list[Found]) -> tuple[int, int] | None:
    """The highest version that is whole, and from which one on all up to it are. None where none is."""
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

_Range = tuple[int, int, int]  # of a segment, named by its first version: from an offset to another


def _segments(files: Files, found: Survey, kept: _Kept) -> tuple[tuple[int, ...], dict[int, list[_Range]]]:
    """The segments that the log has, and what those are made of that are not there as they have to be."""
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
    # What is to come stands in a segment of its own, unless it can go on where the last version ends.
    last = segments[-1] if segments else None
    if last is None or found.shown > kept.newest or (last not in written and last != manifest.segments[-1]):
        segments.append(found.shown + 1)
        written[found.shown + 1] = []
    return tuple(segments), written


def _snapshots(found: Survey, kept: _Kept) -> tuple[tuple[SnapshotEntry, ...], list[int]]:
    """The snapshots that the log keeps, and the versions of the others."""
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
    """Set dense weights aside that no version needs which is kept."""
    needed = 0
    if kept.commit is not None:
        needed = kept.first if kept.commit.dense is None else kept.commit.dense.version
    for name in names_in(files.dense):
        stem = name.partition(".")[0]
        if stem.isdecimal() and not needed <= int(stem) <= kept.newest:
            aside.take(files.dense / name)


def _base_of(kept: _Kept, first: int) -> Commit | None:
    """The commit before the first one of a segment, where that stood behind it in another: it need not say all."""
    before = kept.commit
    for one in kept.commits:
        if one.version == first:
            commit, begins = one.changes.commit, one.changes.whole.begin == SEGMENT_HEADER_BYTES
            return None if begins or before is None or commit.before is None else replace(before, id=commit.before)
        before = one.changes.commit
    return None


def _write_segment(files: Files, manifest: Manifest, first: int, ranges: list[_Range], base: Commit | None) -> None:
    """A segment of commits that stand in others, in place of one that may be there."""
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
