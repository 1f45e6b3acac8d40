"""What the pages of a Parquet file claim, looked at before any is read.

A page says how large it is when it is decompressed, and its reader asks for that much memory before it looks at the
bytes. Here every page's header is read first: a claim that the values in it do not explain is an error.
"""

from dataclasses import dataclass
from typing import Any

from shoal.errors import InputError, StorageError
from shoal.interop.files import Source
from shoal.interop.thrift import Compact

# A page's bytes: a value takes 8 at most and its levels a few more; statistics and dictionaries of one value have room.
_BYTES_A_VALUE = 16
_BYTES_A_PAGE = 1 << 16
# Values of a row group: as many as take 32 MiB as float32, however well they are compressed, and two more for each of
# its bytes. A value takes up to 36 bytes of memory while its group is read.
_VALUES_A_GROUP = 1 << 23
_VALUES_A_BYTE = 2
_HEADER_BYTES = 1 << 12  # one is some dozen bytes; its statistics may be longer, and are asked for again
_MOST_HEADER_BYTES = 1 << 20

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADER_OF = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}


def require_explained_groups(metadata: Any, source: Source, where: str) -> None:
    """Raise InputError where a row group has more values than its bytes explain: all of them may be in one row, and a
    row is read as a whole. Raise StorageError where row groups have more bytes than the file."""
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(at) for at in range(group.num_columns)]
        values, stored = sum(one.num_values for one in columns), sum(one.total_compressed_size for one in columns)
        total += stored
        if values > _VALUES_A_GROUP + _VALUES_A_BYTE * stored:
            raise InputError(
                f"[{where}] row group {number}: {values} values are more than its {stored} bytes explain. Write it "
                f"with fewer rows in a row group."
            )
    if total > source.size:
        raise StorageError(
            f"[{where}] wanted row groups of {source.size} bytes at most, as the file; got {total}. Is it damaged?"
        )


def require_honest_pages(metadata: Any, source: Source, where: str) -> None:
    """Raise StorageError where the pages are not those of the metadata, or claim more than their values explain."""
    rows = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows += group.num_rows
        for at in range(group.num_columns):
            column = group.column(at)
            name = f"{where}, row group {number}, column {column.path_in_schema!r:.100}"
            _Chunk(column, source, name).check()
    if metadata.num_rows < 0 or rows != metadata.num_rows:
        raise StorageError(f"[{where}] wanted {metadata.num_rows} rows; its row groups have {rows}. Is it damaged?")


@dataclass(frozen=True)
class _Page:
    kind: int
    memory: int
    stored: int
    values: int
    header: int  # bytes


class _Chunk:
    """A column of a row group."""

    def __init__(self, column: Any, source: Source, where: str) -> None:
        self._where = where
        self._source = source
        self._values = column.num_values
        first = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < first:
            first = column.dictionary_page_offset
        self._begin, self._bytes = first, column.total_compressed_size
        if first < 0 or self._values < 0 or self._bytes < 0 or first + self._bytes > source.size:
            raise self._wrong(f"wanted pages within its {source.size} bytes; got {self._bytes} at {first}")

    def _wrong(self, what: str) -> StorageError:
        return StorageError(f"[{self._where}] {what}. Is it damaged?")

    def check(self) -> None:
        """Raise StorageError for what is wrong."""
        at, end, values = self._begin, self._begin + self._bytes, 0
        while at < end and values < self._values:
            page = self._page(at, end)
            at += page.header + page.stored
            if at > end:
                raise self._wrong(f"wanted a page that ends at {end} at last; got {at}")
            if page.values < 0 or page.values > self._values:
                raise self._wrong(f"wanted at most {self._values} values in a page; got {page.values}")
            if page.memory > _BYTES_A_VALUE * page.values + _BYTES_A_PAGE:
                raise self._wrong(f"a page of {page.values} values claims {page.memory} bytes of memory")
            if page.kind in (_DATA, _DATA_V2):
                values += page.values
        if values != self._values:
            raise self._wrong(f"wanted {self._values} values; its pages have {values}")

    def _page(self, at: int, end: int) -> _Page:
        size = _HEADER_BYTES
        while True:
            data = self._source.read_at(at, min(size, end - at))
            try:
                thrift = Compact(data)
                fields = thrift.struct()
                return self._read(fields, thrift.at)
            except IndexError:
                if size >= _MOST_HEADER_BYTES or size >= end - at:
                    raise self._wrong(f"wanted a page's header at {at}; got bytes that are none") from None
                size *= 16

    def _read(self, fields: dict[int, Any], header: int) -> _Page:
        kind = fields.get(1)
        numbers = fields.get(_HEADER_OF.get(kind, -1) if isinstance(kind, int) else -1)
        values = numbers.get(1) if isinstance(numbers, dict) else 0
        page: tuple[Any, ...] = (kind, fields.get(2), fields.get(3), values, header)
        if not all(isinstance(one, int) for one in page) or page[1] < 0 or page[2] < 0:
            raise self._wrong("wanted a page's header; got one without its sizes")
        return _Page(*page)
