"""Each key of a table once: what is promised of the rows of a version, and of a snapshot.

A key that comes twice would have two places in a table's index, and a put and a delete of one key no order. So rows are
looked at as they are read: those that are handed on together before they are, those of several pieces with the last.
"""

import torch
from torch import Tensor

from shoal import _native


class KeysOnce:
    """The keys of one table, in pieces, which are held in memory until the last one comes. Pieces in the order of their
    keys' buckets, as a table is first written, take less time than others."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._pieces: list[Tensor] = []
        self._in_order: InOrder | None = InOrder(buckets)

    def add(self, keys: Tensor, is_last: bool) -> int | None:
        """A key that is in a piece twice; with the last piece, in all of them; None where there is none."""
        found = None
        if self._in_order is not None:
            if self._in_order.misplaced(keys, 0, self._buckets - 1) is None:
                found = self._in_order.add(keys, is_last)
            else:
                self._in_order = None
        if self._in_order is None:
            found = _native.repeated_key([*self._pieces, keys] if is_last else [keys])
        if not is_last:
            self._pieces.append(keys.clone())  # of the memory of a whole frame
        return found


class InOrder:
    """The keys of one table, in pieces in the order of their keys' buckets. Only those of the bucket that a piece ends
    with are held in memory."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._bucket = 0  # with which the pieces so far end
        self._open: list[Tensor] = []  # its keys, which others of the next piece may follow

    def misplaced(self, keys: Tensor, first: int, last: int) -> int | None:
        """The position of a key that is not of these buckets, or comes after one of a higher bucket; None where there
        is none."""
        at = _native.first_out_of_order(keys, self._buckets, max(first, self._bucket), last)
        return None if at < 0 else at

    def add(self, keys: Tensor, is_last: bool) -> int | None:
        """A key that is in a piece twice, or in several pieces of a bucket that has ended; None where there is none.
        REQUIRES: none is misplaced."""
        if not len(keys):
            return _native.repeated_key(self._open) if is_last else None
        bucket = _bucket_of(keys[-1:], self._buckets)
        begin = _native.first_out_of_order(keys, self._buckets, 0, bucket - 1) if bucket else 0
        if begin == 0 and bucket == self._bucket and self._open:  # it goes on: all of it is looked at when it ends
            self._open.append(keys.clone())
            return _native.repeated_key(self._open if is_last else [keys])
        found = _native.repeated_key([*self._open, keys])
        self._open, self._bucket = [keys[begin:].clone()], bucket
        return found


def _bucket_of(key: Tensor, buckets: int) -> int:
    out = torch.empty_like(key)
    _native.buckets(key, buckets, out)
    return int(out)
