"""Reading a segment: its whole commits, what comes after the last of them, and where damage is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal import _native
from shoal.errors import OutOfMemoryError, StorageError
from shoal.log.commit import ID_DIGITS, Commit, id_of
from shoal.log.fields import Fields
from shoal.log.files import SEGMENT_HEADER_BYTES, FilePath, holes_in
from shoal.log.frame_search import PIECE_BYTES, FrameSearch
from shoal.log.segment import DamagedError, Place, WholeCommit, digest_of, header_of, is_header
from shoal.records.excerpt import without_place
from shoal.records.frames import FRAME_ALIGNMENT, HEADER_BYTES, FrameHeader, Kind, binary_of, decode_commit

_COMMIT_LIMIT = 1 << 30
_BINARY_LIMIT = 16 << 20  # states of generators, in a commit


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
        data = bytes(self.read(0, min(SEGMENT_HEADER_BYTES, self.size())))
        return is_header(data) and data != header_of(self._identity, self.first)

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
        size, kept, frames = self.size(), 0, FrameSearch(self)
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
        frames = FrameSearch(self)
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
        for begin in range(place.offset, end, PIECE_BYTES):
            yield self.read(begin, min(PIECE_BYTES, end - begin))

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
        if place.offset != SEGMENT_HEADER_BYTES + HEADER_BYTES:
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
