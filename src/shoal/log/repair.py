"""Setting aside what is damaged in a log's segments, so that it goes on from the last version that is whole.

Nothing is deleted: what leaves the log is copied to set-aside/<number>/ first, under the name it had, with WHY.txt.
Then the manifest, HEAD and the segment change, each at once. Who dies on the way has changed nothing, or leaves a log
that the next repair finds damaged at the same place, and mends.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from shoal import _native
from shoal.errors import ShoalError, ShoalWarning, StorageError
from shoal.log.compact import compacting
from shoal.log.files import Files, make_file, names_in, remove_file, size_of
from shoal.log.head import Head, HeadWriter, read_head
from shoal.log.manifest import Manifest, changing_manifest, read_manifest
from shoal.log.opening import new_segment
from shoal.log.reader import LogReader
from shoal.log.segment import DamagedError, Scan, SegmentFile, header_of
from shoal.log.snapshot import Snapshot
from shoal.records.frames import FRAME_ALIGNMENT, HEADER_BYTES, MAGIC, FrameHeader

_PIECE_BYTES = 4 << 20


class RepairWarning(ShoalWarning):
    """A log was damaged; what could not be read is set aside."""


@dataclass(frozen=True)
class Repair:
    """What was done about one place that was damaged.

    version: the newest of the log since. damage: the error that named the place.
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
    """Mend all places of a log's segments that are damaged; what was done, none where there was nothing to do. Raises
    StorageError, and changes nothing, where a snapshot that is needed or the manifest is damaged. REQUIRES: the log's
    write lock."""
    done: list[Repair] = []
    with compacting(files) as alone:
        if not alone:
            raise StorageError(f"[{where}] another process compacts the log. Repair it when that is over.")
        while (damage := find_damage(files)) is not None:
            done.append(_mend(files, where, damage))
        if not done:
            return done
        newest = LogReader(files).newest()
    return [replace(one, version=0 if newest is None else newest.version) for one in done]


def find_damage(files: Files) -> DamagedError | None:
    """The first place in a log's segments that is damaged; all of their rows are read."""
    try:
        reader = LogReader(files, checked=True)
    except StorageError as error:
        error.add_note("A repair sets damaged segments aside, and cannot mend a manifest. Nothing was changed.")
        raise
    try:
        for _whole in reader.commits(reader.manifest.segments[0] - 1):
            pass
    except DamagedError as error:
        return error
    return None


def _mend(files: Files, where: str, damage: DamagedError) -> Repair:
    manifest = read_manifest(files)
    behind = [one for one in manifest.snapshots if one.version >= damage.version]
    problem = None
    for entry in behind:
        try:
            snapshot = Snapshot(files, entry, manifest.layouts)
            for name in snapshot.tables:
                for _rows in snapshot.rows(name):
                    pass
        except ShoalError as error:
            problem = error
        else:
            return _drop_beginning(files, manifest, damage, entry.version)
    if problem is not None:
        raise StorageError(
            f"[{where}] version {damage.version} is damaged in its segment, and so is every snapshot behind it: "
            f"{problem} A repair cannot mend a snapshot, and has changed nothing; versions before {damage.version} can "
            f"still be loaded, with version=."
        ) from problem
    return _cut_end(files, manifest, damage)


def _cut_end(files: Files, manifest: Manifest, damage: DamagedError) -> Repair:
    """No snapshot is behind the damage: the log ends before it."""
    first, version = damage.segment, damage.version - 1
    header = header_of(manifest.identity, first)
    begin = damage.offset if damage.offset >= len(header) else 0
    aside = _Aside(files)
    aside.take(files.segment(first), begin)
    for later in manifest.segments:
        if later > first:
            aside.take(files.segment(later))
    for name in names_in(files.dense):
        stem = name.partition(".")[0]
        if stem.isdecimal() and int(stem) > version:
            aside.take(files.dense / name)
    done = aside.finish(version, damage)
    with changing_manifest(files) as write:
        now = read_manifest(files)
        write(replace(now, segments=tuple(one for one in now.segments if one <= first)))
    end = max(begin, len(header))
    _write_head(files, Head(version, first, end))
    if begin == 0:
        new_segment(files, manifest, first)
    else:
        with _native.File.open_to_write(str(files.segment(first))) as file:
            file.truncate(end)
            file.sync()
    return done


def _drop_beginning(files: Files, manifest: Manifest, damage: DamagedError, base: int) -> Repair:
    """A whole snapshot is behind the damage: the log begins with it. What whole versions the damaged segment has behind
    the snapshot go on in a segment of their own."""
    kept = tuple(one for one in manifest.segments if one > damage.segment)
    covering = [one for one in kept if one <= base + 1]
    kept = tuple(one for one in kept if not covering or one >= covering[-1])
    aside = _Aside(files)
    for first in manifest.segments:
        if first not in kept:
            aside.take(files.segment(first))
    for entry in manifest.snapshots:
        if entry.version < base:
            for name in names_in(files.snapshot(entry.version)):
                aside.take(files.snapshot(entry.version) / name)
    for name in names_in(files.dense):  # of versions that leave the log, which the next writer removes
        aside.take(files.dense / name)
    done = aside.finish(base, damage)
    head = read_head(files)
    if not covering:
        data, version = _whole_behind(files, manifest, damage, base + 1)
        header = header_of(manifest.identity, base + 1)
        make_file(files.segment(base + 1), header + data)
        _native.sync_directory(str(files.segments))
        kept = (base + 1, *kept)
        if head.segment not in kept:
            head = Head(version, base + 1, len(header) + len(data))
    snapshots = tuple(one for one in manifest.snapshots if one.version >= base)
    with changing_manifest(files) as write:
        write(replace(read_manifest(files), snapshots=snapshots, segments=kept, kept_from=base))
    if head != read_head(files):
        _write_head(files, head)
    return done


def _whole_behind(files: Files, manifest: Manifest, damage: DamagedError, wanted: int) -> tuple[bytes, int]:
    """The bytes of whole commits from a version on that stand behind damage in a segment, and the last's version."""
    path = files.segment(damage.segment)
    if size_of(path) is None:
        return b"", wanted - 1
    segment = SegmentFile(path, manifest.identity, damage.segment)
    try:
        data = bytes(segment.read(0, segment.size()))
        at = data.find(MAGIC, damage.offset)
        while at >= 0:
            if at % FRAME_ALIGNMENT == 0 and _version_of(data[at : at + HEADER_BYTES]) == wanted:
                scan, version = Scan(at), wanted - 1
                for whole in segment.commits(at, scan, kept_to=0):
                    if whole.commit.version != version + 1:
                        break
                    version, end = whole.commit.version, whole.end
                if version >= wanted:
                    return data[at:end], version
            at = data.find(MAGIC, at + 1)
    finally:
        segment.close()
    return b"", wanted - 1


def _version_of(header: bytes) -> int | None:
    try:
        return FrameHeader.unpack(header, "segment").version
    except StorageError:
        return None


def _write_head(files: Files, head: Head) -> None:
    writer = HeadWriter(files)
    try:
        writer.write(head, sync=True)
    finally:
        writer.close()


class _Aside:
    """A new folder of set-aside/, made with the first file that is taken there."""

    def __init__(self, files: Files) -> None:
        self._files = files
        numbers = [int(name) for name in names_in(files.set_aside) if name.isdecimal()]
        self._folder = files.set_aside / f"{max(numbers, default=0) + 1:04}"
        self._bytes = 0

    def take(self, path: Path, begin: int = 0) -> None:
        """Copy a file of the log, from an offset on, as it is; it is on the disk then."""
        size = size_of(path)
        if size is None or size <= begin:
            return
        to = self._folder / path.relative_to(self._files.root)
        to = to if begin == 0 else to.with_name(f"{to.name}.from-{begin}")
        _native.make_directories(str(to.parent))
        remove_file(to)
        with _native.File.open_to_read(str(path)) as source, _native.File.create_new(str(to)) as file:
            for at in range(begin, size, _PIECE_BYTES):
                data = bytearray(min(_PIECE_BYTES, size - at))
                source.read(at, data)
                file.write(at - begin, data)
            file.sync()
        _native.sync_directory(str(to.parent))
        self._bytes += size - begin

    def finish(self, version: int, damage: DamagedError) -> Repair:
        """All was taken: say why."""
        done = Repair(version, str(damage), self._folder if self._bytes else None, self._bytes)
        if self._bytes:
            make_file(self._folder / "WHY.txt", f"{damage}\n".encode())
            for folder in (self._folder, self._files.set_aside, self._files.root):
                _native.sync_directory(str(folder))
        return done
