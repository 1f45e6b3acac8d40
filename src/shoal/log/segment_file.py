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
    """What `SegmentFile.commits` found out on its way.

    end: where the last whole commit ends. last: that commit, where it is known.
    known: commits of snapshots, by version. A commit is completed from them where the one before it is damaged.
    """

    end: int
    last: Commit | None = None
    known: Mapping[int, Commit] = field(default_factory=dict)
    problem: str | None = None  # what comes after `end`, if it is not a whole commit
    is_damaged: bool = False  # whether it is not just the beginning of a commit
    stopped: int = 0  # where the next frame may begin, if there is a problem

    def before(self, version: int, known_as: str, said: Mapping[str, Any]) -> Commit | None:
        """Returns the commit from which one can be completed: the one that it names, or itself in a snapshot."""
        for one in (self.last, self.known.get(version - 1)):
            if one is not None and not one.is_partial and one.id and one.id == said.get("before"):
                return one
        same = self.known.get(version)
        return same if same is not None and same.id == known_as else None


@dataclass(frozen=True)
class _Wrong:
    """Bytes that are no frame. end: where another frame may begin: after this one, if its header is right."""

    what: str
    end: int
    is_cut: bool = False  # the file ends in the middle of it


class SegmentFile:
    """A segment that is open for reading. most: how many bytes are read at most; without it, a file that is almost all
    holes is refused."""

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
        """Closes the file."""
        self._file.close()

    def size(self) -> int:
        """Returns how many bytes there are to read now."""
        size = int(self._file.size())
        return size if self._most is None else min(size, self._most)

    def data_from(self, offset: int) -> int:
        """Returns where the next bytes are that are not in a hole; the end where there are none."""
        return self._file.next_data(offset)

    def read(self, offset: int, count: int) -> bytearray:
        """Returns some bytes. REQUIRES: the file has them."""
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
        """Raises StorageError where the file is not this segment of this log."""
        wanted = header_of(self._identity, self.first)
        if self.size() < len(wanted) or bytes(self.read(0, len(wanted))) != wanted:
            raise self.damaged(0, self.first, "the header is damaged, or the file is not this segment of this log")

    def is_another(self) -> bool:
        """Returns whether it has a valid header of another segment."""
        data = bytes(self.read(0, min(SEGMENT_HEADER_BYTES, self.size())))
        return is_header(data) and data != header_of(self._identity, self.first)

    def payload(self, place: Place) -> bytearray:
        """Returns a frame's payload, which was not checked: decoding it does that."""
        return self.read(place.offset, place.header.payload_bytes)

    def damaged(self, offset: int, version: int, what: str) -> DamagedError:
        """Returns the error for bytes that are not what was written."""
        return DamagedError.at(self.path, self.first, offset, version, what)

    def commits(self, begin: int, scan: Scan, kept_to: int, seen: int = 0) -> Iterator[WholeCommit]:
        """Yields whole commits from an offset on, where one begins. At the end `scan` says where the last one ends, and
        what comes after it.

        kept_to: up to there all is known to be on the disk. After it, a power cut may have left a commit's frames
            without its rows, so that rows are read and checked, too.
        seen: the rows of versions up to this one are not read.
        """
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
        """Raises StorageError where anything but zeros comes after the payload of one of a commit's frames."""
        at = whole.begin
        while at < whole.end:
            where = f"file {self.path}, offset {at}"
            place = Place(FrameHeader.unpack(self.read(at, HEADER_BYTES), where), at + HEADER_BYTES)
            at, begin = place.end, place.offset + place.header.payload_bytes
            if any(self.read(begin, at - begin)):
                raise self.damaged(begin, whole.commit.version, "wanted zeros between frames; got others")

    def is_promised(self, version: int, scan: Scan) -> bool:
        """Returns whether a commit after the end of a scan says that a version was on the disk before it."""
        return scan.is_damaged and self._kept_after(scan.end) >= version

    def _kept_after(self, at: int) -> int:
        """Returns the newest version of which a commit from an offset on says that it was on the disk before it."""
        size, kept, frames = self.size(), 0, FrameSearch(self)
        while (begin := frames.next_from(at)) is not None:
            at = begin + FRAME_ALIGNMENT
            try:
                header = FrameHeader.unpack(frames.header(begin), f"file {self.path}, offset {begin}")
            except StorageError:
                continue
            # A valid header says where the next frame is: bytes in its payload that look like a header are none.
            place = Place(header, begin + HEADER_BYTES)
            at = place.end
            if header.kind is Kind.COMMIT and place.end <= size:
                kept = max(kept, self._kept_of(place))
        return kept

    def next_whole(self, at: int, fits: Callable[[int], bool], kept_to: int) -> int | None:
        """Returns where the next whole commit begins, from an offset on, of which the version fits; None where there is
        none."""
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
        """Returns the payload of a commit or a base: text, and perhaps a zero and binary data. Raises StorageError
        where it is neither, before all of it is read."""
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
        """Yields a payload piece by piece."""
        end = place.offset + place.header.payload_bytes
        for begin in range(place.offset, end, PIECE_BYTES):
            yield self.read(begin, min(PIECE_BYTES, end - begin))

    def _frame(self, at: int, size: int, kept_to: int = 0, seen: int = 0) -> Place | _Wrong | None:
        """Returns the frame at an offset, or what is wrong with it; None at the end. The payload is checked after
        `kept_to`, in versions after `seen`."""
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
        """Returns the commit of a base, where a base may be; else what is wrong."""
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
        """Returns the commit of a commit frame, if the frames before it belong to it; else what is wrong."""
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
            return f"frames at {place.offset} of different versions"
        if value.get("frames") != digest_of([one.header.pack() for one in frames]):
            return f"a commit at {place.offset} with other frames than it was written with"
        return commit
