"""What the pages of a Parquet file claim, looked at before any is read.

A page says how large it is when it is decompressed, and its reader asks for that much memory before it looks at the
bytes. Here every page's header is read first: a claim that the values in it do not explain is an error. The headers are
in Thrift's compact protocol, of which this reads what they need.
"""

from dataclasses import dataclass
from typing import Any

from shoal.errors import StorageError
from shoal.interop.files import Source

# A page's bytes: a value takes 8 at most and its levels a few more; statistics and dictionaries of one value have room.
_BYTES_A_VALUE = 16
_BYTES_A_PAGE = 1 << 16
_HEADER_BYTES = 1 << 12  # one is some dozen bytes; its statistics may be longer, and are asked for again
_MOST_HEADER_BYTES = 1 << 20
_MOST_DEPTH = 8

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADER_OF = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}


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
                thrift = _Thrift(data)
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


_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


class _Thrift:
    """Values of the compact protocol. IndexError where the bytes end, or are none of it."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Fields by number: integers, structs as such, and None for the rest."""
        if depth > _MOST_DEPTH:
            raise IndexError
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise IndexError

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        if count < 0 or self.at + count > len(self._data):
            raise IndexError
        self.at += count

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _BYTE:
            self._skip(1)
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind == _BINARY:
            self._skip(self._varint())
        else:  # no page has lists or maps
            raise IndexError
        return None
