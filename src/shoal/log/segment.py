"""A segment: a header of 64 bytes, then frames. A version's rows come first, its commit frame last.

The first commit says all; of the others, most say only what changed. A base says what the commit before the first one
said, where a repair let the segment begin with one that does not say all.

What stands behind the last whole commit is being written, or was when its writer died.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal import _native
from shoal.errors import OutOfMemoryError, StorageError
from shoal.log.commit import ID_DIGITS, Commit, id_of
from shoal.log.fields import Fields
from shoal.log.files import FilePath, holes_in
from shoal.records.excerpt import sentence, without_place
from shoal.records.frames import (
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    FrameHeader,
    Kind,
    binary_of,
    decode_commit,
)

# magic, format version, 0, log, first version, 0, crc32c of the 60 bytes before it
_HEADER = struct.Struct("<8sII16sQ20sI")
_MAGIC = b"SHOALSEG"
_FORMAT_VERSION = 1
_COMMIT_LIMIT = 1 << 30
_BINARY_LIMIT = 16 << 20  # states of generators, in a commit
_PIECE_BYTES = 4 << 20  # that are read together; a multiple of a frame's alignment
_MAGIC_WORD = int.from_bytes(MAGIC, "little", signed=True)
_WORDS = FRAME_ALIGNMENT // 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame is."""

    header: FrameHeader
    offset: int  # of its payload

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.offset - HEADER_BYTES + self.header.frame_bytes


@dataclass(frozen=True)
class WholeCommit:
    """A commit whose frames are all there, and where they are."""

    commit: Commit
    segment: int  # its first version
    frames: Sequence[Place]
    begin: int
    end: int


@dataclass
class Scan:
    """What a segment holds: whole commits, and where the last one ends. last: the commit before `end`, where it is
    known. known: commits of snapshots, by version, from which one is completed whose last one is damaged."""

    end: int
    last: Commit | None = None
    known: Mapping[int, Commit] = field(default_factory=dict)
    problem: str | None = None  # what stands behind, if it is not a whole commit
    is_damaged: bool = False  # not just the beginning of one
    stopped: int = 0  # where a frame may stand next, if there is a problem

    def before(self, version: int, known_as: str, said: Mapping[str, Any]) -> Commit | None:
        """The commit from which one can be completed: the one that it names, or itself in a snapshot."""
        for one in (self.last, self.known.get(version - 1)):
            if one is not None and not one.is_partial and one.id and one.id == said.get("before"):
                return one
        same = self.known.get(version)
        return same if same is not None and same.id == known_as else None


@dataclass(frozen=True)
class _Wrong:
    """What stands where a frame should. end: where another may begin: after the frame, where its header is right."""

    what: str
    end: int
    is_cut: bool = False  # the file ends in the middle of it


class DamagedError(StorageError):
    """The bytes of a segment are not what was written, from an offset on: the end of the last whole version.

    version: the first that cannot be read. segment: the first version of its segment.
    """

    segment = offset = version = 0

    @staticmethod
    def at(path: FilePath, segment: int, offset: int, version: int, what: str) -> "DamagedError":
        """The error for a place in a segment."""
        before = "Versions before it can still be read. " if version > 1 else ""
        error = DamagedError(
            f"[file {path}] version {version}, offset {offset}: {sentence(what)} {before}Restore the file from another "
            f"copy, or have `shoal repair` set what is damaged aside."
        )
        error.segment, error.offset, error.version = segment, offset, version
        return error

    def reading(self, version: int) -> "DamagedError":
        """The same error, which says that a version is the newest that can be read as it is."""
        text = str(self).replace("Versions before it can still be read. ", "")
        said = (
            f"Version {version} can still be read, with version={version}; a repair goes on from the highest whole one."
        )
        error = DamagedError(f"{text} {said}")
        error.segment, error.offset, error.version = self.segment, self.offset, self.version
        return error


def header_of(identity: str, first: int) -> bytes:
    """The first bytes of a segment."""
    head = _HEADER.pack(_MAGIC, _FORMAT_VERSION, 0, bytes.fromhex(identity), first, bytes(20), 0)[:-4]
    return head + struct.pack("<I", _native.crc32c(head))


class SegmentFile:
    """A segment, open for reading. most: how many bytes are looked at, of one that is refused without, as it is almost
    all holes."""

    def __init__(self, path: FilePath, identity: str, first: int, most: int | None = None) -> None:
        self.path = path
        self.first = first
        self._identity = identity
        self._file = _native.File.open_to_read(path)
        self._most = most
        if most is None and (what := holes_in(path)) is not None:
            self._file.close()
            raise self.damaged(0, first, what)

    def close(self) -> None:
        """Let it go."""
        self._file.close()

    def size(self) -> int:
        """Bytes now, of those that are looked at."""
        size = int(self._file.size())
        return size if self._most is None else min(size, self._most)

    def data_from(self, offset: int) -> int:
        """Where the next bytes are that are not a hole's, which has any number of zeros; the end where none are."""
        return self._file.next_data(offset)

    def read(self, offset: int, count: int) -> bytearray:
        """Some bytes. REQUIRES: the file has them."""
        try:
            out = bytearray(count)
        except MemoryError:
            raise OutOfMemoryError(
                f"[file {self.path}] the operating system refused memory for {count} bytes at {offset}. Free memory."
            ) from None
        if count:
            self._file.read(offset, out)
        return out

    def check_header(self) -> None:
        """Raise StorageError where the file is not this segment of this log."""
        wanted = header_of(self._identity, self.first)
        if self.size() < len(wanted) or bytes(self.read(0, len(wanted))) != wanted:
            raise self.damaged(0, self.first, "the header is damaged, or the file is not this segment of this log")

    def is_another(self) -> bool:
        """Whether it has a whole header, and not this segment's."""
        data = bytes(self.read(0, min(_HEADER.size, self.size())))
        is_whole = len(data) == _HEADER.size and data[-4:] == struct.pack("<I", _native.crc32c(data[:-4]))
        return is_whole and data != header_of(self._identity, self.first)

    def payload(self, place: Place) -> bytearray:
        """What a frame holds; who decodes it checks it."""
        return self.read(place.offset, place.header.payload_bytes)

    def damaged(self, offset: int, version: int, what: str) -> DamagedError:
        """The error for bytes that are not what was written."""
        return DamagedError.at(self.path, self.first, offset, version, what)

    def commits(self, begin: int, scan: Scan, kept_to: int, seen: int = 0) -> Iterator[WholeCommit]:
        """Whole commits from an offset on, where one begins. `scan` knows at the end where the last one ends, and what
        stands behind it. `kept_to`: up to there all is known to be on the disk; behind it, a power cut may have left
        the frames of a commit and not its rows, so that these are read, too. Not those of versions up to `seen`."""
        at = scan.end = begin
        frames: list[Place] = []
        size = self.size()
        while True:
            place = self._frame(at, size, kept_to, seen)
            if isinstance(place, _Wrong):
                scan.problem, scan.is_damaged = place.what, not place.is_cut
                scan.stopped = place.end
                return
            if place is None:
                scan.problem = "a commit that is not complete" if frames else None
                scan.stopped = at
                return
            at = place.end
            if place.header.kind not in (Kind.COMMIT, Kind.BASE):
                frames.append(place)
                continue
            is_base = place.header.kind is Kind.BASE
            found = self._base(place) if is_base else self._commit(place, frames, scan)
            if isinstance(found, str):
                scan.problem, scan.is_damaged = found, True
                scan.stopped = at
                return
            if is_base:
                scan.last = found
                continue
            whole = WholeCommit(found, self.first, tuple(frames), scan.end, at)
            frames = []
            scan.end, scan.last = at, found
            yield whole

    def check_paddings(self, whole: WholeCommit) -> None:
        """Raise StorageError where not zeros stand behind the payloads of a commit's frames."""
        at = whole.begin
        while at < whole.end:
            where = f"file {self.path}, offset {at}"
            place = Place(FrameHeader.unpack(self.read(at, HEADER_BYTES), where), at + HEADER_BYTES)
            at, begin = place.end, place.offset + place.header.payload_bytes
            if any(self.read(begin, at - begin)):
                raise self.damaged(begin, whole.commit.version, "wanted zeros between frames; got others")

    def is_promised(self, version: int, scan: Scan) -> bool:
        """Whether a commit behind the place where a scan ended says that a version was on the disk before it."""
        return scan.is_damaged and self._kept_behind(scan.end) >= version

    def _kept_behind(self, at: int) -> int:
        """The newest version that a commit from an offset on says was on the disk before it."""
        size, kept, frames = self.size(), 0, _Frames(self)
        while (begin := frames.next_from(at)) is not None:
            at = begin + FRAME_ALIGNMENT
            try:
                header = FrameHeader.unpack(frames.header(begin), f"file {self.path}, offset {begin}")
            except StorageError:
                continue
            # A header that is right says where the next one is: nothing in its payload is one.
            place = Place(header, begin + HEADER_BYTES)
            at = place.end
            if header.kind is Kind.COMMIT and place.end <= size:
                kept = max(kept, self._kept_of(place))
        return kept

    def next_whole(self, at: int, fits: Callable[[int], bool], kept_to: int) -> int | None:
        """Where the next whole commit begins, from an offset on, whose version fits; None where there is none."""
        frames = _Frames(self)
        while (begin := frames.next_from(at)) is not None:
            scan = Scan(begin)
            whole = next(self.commits(begin, scan, kept_to), None)
            if whole is not None and fits(whole.commit.version):
                return begin
            at = max(scan.stopped if whole is None else whole.end, begin + FRAME_ALIGNMENT)
        return None

    def _kept_of(self, place: Place) -> int:
        where = f"file {self.path}, offset {place.offset}"
        try:
            value = decode_commit(place.header, self._said(place), where)
            return Fields(where, value.get("commit")).integer("kept")
        except StorageError:
            return 0

    def _said(self, place: Place) -> bytearray:
        """The payload of a commit or a base: text, and perhaps a zero and some binary. Raises StorageError where it is
        not, before all of it is read."""
        size = place.header.payload_bytes
        if size > _COMMIT_LIMIT:
            raise StorageError(f"[file {self.path}] wanted a commit of {_COMMIT_LIMIT} bytes at most; got {size}.")
        said = bytearray()
        for piece in self._pieces(place):
            text = piece.find(0)
            if text >= 0 and size - len(said) - text > _BINARY_LIMIT:
                raise StorageError(
                    f"[file {self.path}] wanted a commit, which is text, with {_BINARY_LIMIT} other bytes at most; got "
                    f"{size - len(said) - text} after a zero."
                )
            said += piece
        return said

    def _pieces(self, place: Place) -> Iterator[bytearray]:
        """A payload, piece by piece."""
        end = place.offset + place.header.payload_bytes
        for begin in range(place.offset, end, _PIECE_BYTES):
            yield self.read(begin, min(_PIECE_BYTES, end - begin))

    def _frame(self, at: int, size: int, kept_to: int = 0, seen: int = 0) -> Place | _Wrong | None:
        """The frame at an offset, or what is wrong with it; None at the end. Its payload is checked behind `kept_to`,
        in versions behind `seen`."""
        if at >= size:
            return None
        if at + HEADER_BYTES > size:
            return _Wrong(f"{size - at} bytes at {at} that are less than a frame's header", size, is_cut=True)
        try:
            header = FrameHeader.unpack(bytes(self.read(at, HEADER_BYTES)), f"file {self.path}, offset {at}")
        except StorageError as error:
            return _Wrong(f"the frame at {at}: {without_place(str(error))}", at + FRAME_ALIGNMENT)
        place = Place(header, at + HEADER_BYTES)
        if place.end > size:
            what = f"a frame at {at} of which only {size - at} bytes are there"
            return _Wrong(what, at + FRAME_ALIGNMENT, is_cut=True)
        if at >= kept_to and header.version > seen:
            crc = 0
            for piece in self._pieces(place):
                crc = _native.crc32c(piece, crc)
            if crc != header.payload_crc:
                what = f"wanted a payload with CRC {header.payload_crc:#010x}; got {crc:#010x}. It is damaged"
                return _Wrong(f"the frame at {at}: {what}", place.end)
        return place

    def _base(self, place: Place) -> Commit | str:
        """The commit of a base, where one may be; else what is wrong."""
        where = f"file {self.path}, offset {place.offset}"
        if place.offset != _HEADER.size + HEADER_BYTES:
            return f"a base at {place.offset}, which is not the segment's beginning"
        try:
            payload = self._said(place)
            value = Fields(where, decode_commit(place.header, payload, where, Kind.BASE))
            known_as = value.digits("id", ID_DIGITS)
            found = Commit.from_json(where, value.value.get("commit"), known_as, binary_of(payload))
            return f"a base at {place.offset} that does not say all" if found.is_partial else found
        except StorageError as error:
            return f"the base at {place.offset}: {without_place(str(error))}"

    def _commit(self, place: Place, frames: Sequence[Place], scan: Scan) -> Commit | str:
        """The commit of a commit frame, if the frames before it are its own; else what is wrong."""
        where = f"file {self.path}, offset {place.offset}"
        try:
            payload = self._said(place)
            value = decode_commit(place.header, payload, where)
            known_as, said = id_of(payload), Fields(where, value.get("commit")).value
            commit = Commit.from_json(
                where, said, known_as, binary_of(payload), scan.before(place.header.version, known_as, said)
            )
        except StorageError as error:
            return f"the commit frame at {place.offset}: {without_place(str(error))}"
        if commit.version != place.header.version or any(one.header.version != commit.version for one in frames):
            return f"frames at {place.offset} whose versions differ"
        if value.get("frames") != digest_of([one.header.pack() for one in frames]):
            return f"a commit at {place.offset} whose frames are not those that it had"
        return commit


class _Frames:
    """Looks for frames in a segment, from offsets that ascend. Each byte is read once."""

    def __init__(self, segment: SegmentFile) -> None:
        self._segment = segment
        self._size = segment.size()
        self._begin = 0
        self._data = bytearray()
        self._found: list[int] = []  # in these bytes, those not asked for yet, the last one first

    def next_from(self, at: int) -> int | None:
        """Where the next frame seems to begin, from an offset on, which is a multiple of a frame's alignment."""
        while True:
            while self._found:
                if self._found[-1] >= at:
                    return self._found[-1]
                self._found.pop()
            begin = max(at, self._begin + len(self._data) // FRAME_ALIGNMENT * FRAME_ALIGNMENT)
            begin = max(begin, self._segment.data_from(begin) // FRAME_ALIGNMENT * FRAME_ALIGNMENT)
            if begin + HEADER_BYTES > self._size:
                return None
            self._begin = begin
            self._data = self._segment.read(begin, min(_PIECE_BYTES, self._size - begin))
            whole = len(self._data) // FRAME_ALIGNMENT * FRAME_ALIGNMENT
            words = torch.frombuffer(self._data, dtype=torch.int32, count=whole // 4)[::_WORDS]
            self._found = [begin + FRAME_ALIGNMENT * one for one in (words == _MAGIC_WORD).nonzero()[:, 0].tolist()]
            self._found.reverse()

    def header(self, begin: int) -> bytes:
        """The header of the frame that was found last."""
        return bytes(self._data[begin - self._begin : begin - self._begin + HEADER_BYTES])


def digest_of(headers: Sequence[bytes]) -> dict[str, int]:
    """What a commit frame says of the frames before it: how many, and a checksum of their headers, which have those of
    their payloads."""
    return {"count": len(headers), "crc32c": _native.crc32c(b"".join(headers))}


class SegmentWriter:
    """The end of a segment that is being written. require_own: called before each write, with this; it raises where
    the file is not the writer's any more."""

    def __init__(self, path: FilePath, end: int, require_own: "Callable[[SegmentWriter], None]") -> None:
        self.path = path
        self._require_own = require_own
        self.end = end  # behind the last whole commit
        self._at = end
        self._file = _native.File.open_to_write(path)
        self.headers: list[bytes] = []  # of the commit that is being written
        self.holds_commit = False  # a commit frame that is not known to be kept
        self.is_clean = True  # whether nothing stands after the last whole commit

    def append(self, frame: Sequence[memoryview]) -> None:
        """Write a frame, in pieces of which the first is its header, behind those before it."""
        self._require_own(self)
        self.is_clean = False
        for piece in frame:
            if len(piece):
                self._file.write(self._at, piece)
                self._at += len(piece)
        self.headers.append(bytes(frame[0]))

    def append_commit(self, frame: Sequence[memoryview]) -> None:
        """Write the frame that ends a commit."""
        self.append(frame)
        self.holds_commit = True

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        return self._file.is_in_place

    @property
    def is_empty(self) -> bool:
        """Whether it has no whole commit yet."""
        return self.end == _HEADER.size

    def commit(self) -> None:
        """What was appended is a whole commit."""
        self.end = self._at
        self.headers = []
        self.holds_commit, self.is_clean = False, True

    def abandon(self) -> None:
        """Take what was appended since the last whole commit away again."""
        self.headers = []
        self._require_own(self)
        self._at = self.end
        if not self.is_clean:
            self._file.truncate(self.end)
        self.holds_commit, self.is_clean = False, True

    def sync(self) -> None:
        """What was written is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Let it go."""
        self._file.close()
