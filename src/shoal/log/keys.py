"""Each key of a table comes once in a version, and once in a snapshot: this is checked while rows are read.

A key that comes twice would have two places in a table's index, and a put and a delete of one key would have no order.
A piece of rows is checked before it is handed on; all pieces together are checked with the last one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _native


class KeysOnce:
    """Checks the keys of one table, which come in pieces and are held in memory until the last one. Pieces in the order
    of their keys' buckets, as a table's first commit has them, take less time than others."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._pieces: list[Tensor] = []
        self._in_order: InOrder | None = InOrder(buckets)

    def add(self, keys: Tensor, is_last: bool) -> int | None:
        """Takes a piece. Returns a key that is in it twice or, with the last piece, in all pieces twice; None where
        there is none."""
        found = None
        if self._in_order is not None:
            seen = self._in_order.add(keys, 0, self._buckets - 1, is_last)
            found = seen.repeated
            if seen.misplaced is not None:
                self._in_order = None
        if self._in_order is None:
            found = _native.repeated_key([*self._pieces, keys] if is_last else [keys])
        if not is_last:
            self._pieces.append(keys.clone())  # a view would keep the memory of a whole frame
        return found


@dataclass(frozen=True)
class Seen:
    """What is wrong with a piece of keys: the position of a key that is out of order, and a key that is repeated."""

    misplaced: int | None = None
    repeated: int | None = None


class InOrder:
    """Checks the keys of one table, which come in pieces in the order of their buckets. Only the keys of the bucket
    that a piece ends with are held in memory."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._bucket = 0  # the last bucket of the pieces so far
        self._open: list[Tensor] = []  # the keys of that bucket, of which the next piece may have more

    def add(self, keys: Tensor, first: int, last: int, is_last: bool) -> Seen:
        """Takes the next piece, and returns what is wrong with it. Its buckets should be in [first, last]. A key that
        is in several pieces is found when its bucket ends."""
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
        """Returns a key that the pieces of a bucket have twice. Each piece was checked by itself before."""
        return _native.repeated_key(self._open) if len(self._open) > 1 else None


def _bucket_of(key: Tensor, buckets: int) -> int:
    out = torch.empty_like(key)
    _native.buckets(key, buckets, out)
    return int(out)
