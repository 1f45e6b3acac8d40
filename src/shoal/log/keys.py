"""Each key of a table once: what is promised of the rows of a version, and of a snapshot.

A key that comes twice would have two places in a table's index, and a put and a delete of one key no order. So rows are
looked at as they are read: those that are handed on together before they are, those of several pieces with the last.
"""

from dataclasses import dataclass

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
            seen = self._in_order.add(keys, 0, self._buckets - 1, is_last)
            found = seen.repeated
            if seen.misplaced is not None:
                self._in_order = None
        if self._in_order is None:
            found = _native.repeated_key([*self._pieces, keys] if is_last else [keys])
        if not is_last:
            self._pieces.append(keys.clone())  # of the memory of a whole frame
        return found


@dataclass(frozen=True)
class Seen:
    """What is wrong with a piece of keys: the position of one that is out of order, a key that is repeated."""

    misplaced: int | None = None
    repeated: int | None = None


class InOrder:
    """The keys of one table, in pieces in the order of their keys' buckets. Only those of the bucket that a piece ends
    with are held in memory."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._bucket = 0  # with which the pieces so far end
        self._open: list[Tensor] = []  # its keys, which others of the next piece may follow

    def add(self, keys: Tensor, first: int, last: int, is_last: bool) -> Seen:
        """What is wrong with the next piece, whose buckets should be in [first, last]. A key that is in several pieces
        is found when its bucket ends."""
        misplaced, repeated, head, tail = _native.look_by_bucket(keys, self._buckets, max(first, self._bucket), last)
        if misplaced >= 0 or repeated is not None:
            return Seen(None if misplaced < 0 else misplaced, repeated)
        goes_on = self._open and len(keys) and _bucket_of(keys[:1], self._buckets) == self._bucket
        if goes_on:
            self._open.append(keys[:head].clone())
        if not len(keys) or (goes_on and head == len(keys)):
            return Seen(repeated=self._closed() if is_last else None)
        repeated = self._closed()
        self._open, self._bucket = [keys[tail:].clone()], _bucket_of(keys[-1:], self._buckets)
        return Seen(repeated=repeated)

    def _closed(self) -> int | None:
        """A key that pieces of a bucket have twice. Each was looked at alone."""
        return _native.repeated_key(self._open) if len(self._open) > 1 else None


def _bucket_of(key: Tensor, buckets: int) -> int:
    out = torch.empty_like(key)
    _native.buckets(key, buckets, out)
    return int(out)
