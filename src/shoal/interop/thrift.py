"""Thrift's compact protocol, of which this reads what Parquet's headers and footers need."""

from collections.abc import Callable, Iterator
from typing import Any

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_MOST_DEPTH = 16


class Compact:
    """Values of the compact protocol. IndexError where the bytes end, or are none of it."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Fields by number: integers, structs as such, and None for the rest."""
        found: dict[int, Any] = {}
        for number, kind in self.fields():
            if kind in (_I16, _I32, _I64):
                found[number] = self._zigzag()
            elif kind == _STRUCT and depth < _MOST_DEPTH:
                found[number] = self.struct(depth + 1)
            else:
                self.skip(kind, depth)
                found[number] = None
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """The number and the type of each field of a struct. Read it or skip it before the next is asked for."""
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            yield number, head & 15

    def items(self, kind: int, read: Callable[[int], object]) -> int:
        """Calls `read` with the type of each item of a list, which it reads or skips; returns how many there are."""
        if kind not in (_LIST, _SET):
            raise IndexError
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        for _ in range(count):
            read(head & 15)
        return count

    def skip(self, kind: int, depth: int = 0, is_item: bool = False) -> None:
        """Pass by a value."""
        if depth > _MOST_DEPTH:
            raise IndexError
        if kind in (_TRUE, _FALSE):
            self._pass(int(is_item))  # a field's type says which it is
        elif kind == _BYTE:
            self._pass(1)
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._pass(8)
        elif kind == _BINARY:
            self._pass(self._varint())
        elif kind in (_LIST, _SET):
            self.items(kind, lambda inner: self.skip(inner, depth + 1, is_item=True))
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self.skip(kinds >> 4, depth + 1, is_item=True)
                self.skip(kinds & 15, depth + 1, is_item=True)
        elif kind == _STRUCT:
            for _number, inner in self.fields():
                self.skip(inner, depth + 1)
        else:
            raise IndexError

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

    def _pass(self, count: int) -> None:
        if self.at + count > len(self._data):
            raise IndexError
        self.at += count
