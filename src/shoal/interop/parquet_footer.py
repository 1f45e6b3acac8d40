"""What a Parquet file's footer claims, looked at before Arrow reads it.

Its reader makes room for as many columns and row groups as a list says that it has, some hundred bytes each, though one
may be a byte long in the file. Here each is passed by first.
"""

from collections.abc import Callable

from shoal.errors import InputError, StorageError
from shoal.interop.files import Source
from shoal.interop.thrift import Compact

_MAGIC = b"PAR1"
_END_BYTES = 8  # its length and the magic
_MOST_BYTES = 32 << 20
# A key, rows and a score, and a column for each of an optimizer's: three of Adam.
MOST_COLUMNS = 64
_MOST_SCHEMA = 4 * MOST_COLUMNS
_LEAST_BYTES = 24  # of a row group, and of a column in one
_SCHEMA, _GROUPS, _COLUMNS = 2, 4, 1  # numbers of fields


def require_explained_footer(source: Source, where: str) -> None:
    """Raise StorageError where a footer is none, or makes more of its bytes than they explain; InputError where it has
    more columns than a table."""
    end = source.size - _END_BYTES
    if end < len(_MAGIC) or bytes(source.read_at(end + 4, 4)) != _MAGIC:
        raise StorageError(f"[{where}] wanted a Parquet file, which ends with {_MAGIC!r}; got another. Is it damaged?")
    size = int.from_bytes(source.read_at(end, 4), "little")
    if size > min(end - len(_MAGIC), _MOST_BYTES):
        raise StorageError(
            f"[{where}] wanted a footer of {min(end - len(_MAGIC), _MOST_BYTES)} bytes at most; got {size}. Is it "
            f"damaged?"
        )
    footer = _Footer(source.read_at(end - size, size), where)
    try:
        footer.check()
    except IndexError:
        raise StorageError(f"[{where}] wanted a footer; got bytes that are none. Is it damaged?") from None


class _Footer:
    def __init__(self, data: bytearray, where: str) -> None:
        self._thrift = Compact(data)
        self._where = where

    def check(self) -> None:
        thrift = self._thrift
        for number, kind in thrift.fields():
            if number == _SCHEMA:
                self._require_few(thrift.items(kind, self._element), _MOST_SCHEMA, "elements in its schema")
            elif number == _GROUPS:
                thrift.items(kind, lambda _kind: self._long(self._group))
            else:
                thrift.skip(kind)

    def _element(self, kind: int) -> None:
        self._thrift.skip(kind)

    def _group(self) -> None:
        thrift = self._thrift
        for number, kind in thrift.fields():
            if number == _COLUMNS:
                columns = thrift.items(kind, lambda inner: self._long(lambda: thrift.skip(inner, is_item=True)))
                self._require_few(columns, MOST_COLUMNS, "columns")
            else:
                thrift.skip(kind)

    def _long(self, passed: Callable[[], None]) -> None:
        begin = self._thrift.at
        passed()
        if self._thrift.at - begin < _LEAST_BYTES:
            raise StorageError(f"[{self._where}] wanted a footer; got one of columns that say nothing. Is it damaged?")

    def _require_few(self, found: int, most: int, what: str) -> None:
        if found > most:
            raise InputError(f"[{self._where}] wanted {most} {what} at most; got {found}. Leave some out.")
