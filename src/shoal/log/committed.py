"""A commit that a log holds, and its changes."""

from collections import Counter
from collections.abc import Iterator

from shoal.errors import NotFoundError, StorageError
from shoal.log.change import TableChange
from shoal.log.commit import Commit
from shoal.log.files import Files
from shoal.log.keys import KeysOnce
from shoal.log.manifest import Manifest
from shoal.log.segment import DamagedError, Place, WholeCommit
from shoal.log.segment_file import SegmentFile
from shoal.records import Layout
from shoal.records.excerpt import without_place
from shoal.records.frames import HEADER_BYTES, Kind, decode_deletes, decode_puts, require_explained
from shoal.table.changes import Mark


class CommittedChanges:
    """One commit of a log: what it says, and its changes, which are read when `changes` is called.

    damage: the damage that `changes` found; None where it found none.
    """

    def __init__(
        self, files: Files, manifest: Manifest, whole: WholeCommit, segment: SegmentFile | None = None
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._segment = segment  # kept open, as others may remove it; None: opened for each read
        self.whole = whole
        self.commit: Commit = whole.commit
        self.damage: DamagedError | None = None

    @property
    def version(self) -> int:
        """The commit's number."""
        return self.commit.version

    @property
    def mark(self) -> Mark:
        """The commit's version and id, from which `tail` goes on."""
        return self.commit.mark

    def changes(self, table: str | None = None) -> Iterator[TableChange]:
        """Yields its changes in pieces, of one table or of all. These are all rows of a table of which
        `commit.tables` says that it is replaced."""
        number = None if table is None else self._manifest.number_of(table)
        if table is not None and number is None:
            raise no_table(self._files, [layout.name for layout in self._manifest.layouts], table)
        wanted = [one for one in self.whole.frames if number is None or one.header.table == number]
        if not wanted:
            return
        segment = self._segment
        if segment is None:
            path, end = self._files.segment(self.whole.segment), self.whole.end
            segment = SegmentFile(path, self._manifest.identity, self.whole.segment, end)
        keys: dict[int, KeysOnce] = {}
        left = Counter(place.header.table for place in wanted)
        try:
            for place in wanted:
                where = f"file {segment.path}, version {self.version}, offset {place.offset}"
                if place.header.table >= len(self._manifest.layouts):
                    raise StorageError(f"[{where}] wanted a table of the manifest; got number {place.header.table}.")
                layout = self._manifest.layouts[place.header.table]
                try:
                    change = _decoded(segment, place, layout, where)
                    left[place.header.table] -= 1
                    once = keys.setdefault(place.header.table, KeysOnce(layout.buckets))
                    if (key := once.add(change.keys, left[place.header.table] == 0)) is not None:
                        raise StorageError(
                            f"[{where}] table {layout.name!r}: wanted each key once in a version; got key {key} again."
                        )
                except StorageError as error:
                    what = f"the frame at {place.offset - HEADER_BYTES}: {without_place(str(error))}"
                    self.damage = segment.damaged(self.whole.begin, self.version, what)
                    raise self.damage from None
                yield change
        finally:
            if segment is not self._segment:
                segment.close()


def _decoded(segment: SegmentFile, place: Place, layout: Layout, where: str) -> TableChange:
    """Returns the change that a frame holds."""
    require_explained(place.header, layout, where)
    data = segment.payload(place)
    if place.header.kind is Kind.PUTS:
        return TableChange(layout.name, puts=decode_puts(place.header, data, layout, where))
    return TableChange(layout.name, deletes=decode_deletes(place.header, data, layout, where))


def no_table(files: Files, tables: list[str], table: str) -> NotFoundError:
    """Returns the error for a table that is not among those of a log or a version."""
    has = ", ".join(map(repr, tables)) or "none"
    return NotFoundError(f"[log {files.root}] table: wanted one that is there: {has}; got {table!r:.100}.")
