"""What several tables have below their memory, read at a time.

A disk is slow with few requests in hand, and a storage of the user's may be far away: disks are read together, and
others are asked at the same time, each on a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.storage import Answer
from shoal.storage.packed import empty_packed
from shoal.table.lower.staged import Staged
from shoal.table.lower.threads import IoThreads
from shoal.table.lower.tier import Below

# Rows that are read ahead may take bytes outside of the table's memory: this part of it, and no more than so many.
_AHEAD_PART = 4
_MOST_AHEAD_BYTES = 16 << 20


@dataclass(frozen=True)
class Asked:
    """Keys of a table, all different, and what was read of them ahead."""

    below: Below
    keys: Tensor
    staged: Staged | None = None


def read_below(asked: Sequence[Asked], io_threads: IoThreads) -> list[Answer]:
    """What the tables have of their keys."""
    unread = [_Unread(one) for one in asked]
    waiting = [one for one in unread if len(one.rest)]
    disks = [one for one in waiting if one.below.is_disk]
    calls = [[one] for one in waiting if not one.below.is_disk] + ([disks] if disks else [])
    io_threads.map(_read, calls)
    return [one.answer() for one in unread]


class _Unread:
    """One table's keys: what is known of them, and the rest, which is to be read."""

    def __init__(self, asked: Asked) -> None:
        self.below, self._count, self.rest = asked.below, len(asked.keys), asked.keys
        self.more: Answer | None = None  # of the rest
        self._known: tuple[Tensor, Tensor] | None = None
        if asked.staged is not None:
            self._holds, at = asked.staged.known(asked.keys)
            if self._holds.any():
                self._known = asked.staged.rows_at(at[self._holds])
                self.rest = asked.keys[~self._holds]

    def answer(self) -> Answer:
        """Of all keys. REQUIRES: the rest was read, if there is one."""
        more = self.more if self.more is not None else self.below.read(self.rest)
        if self._known is None:
            return more
        known_rows, known_found = self._known
        found = torch.zeros(self._count, dtype=torch.bool, device="cpu")
        found[self._holds] = known_found
        has = int(known_found.sum())
        if not has and not len(self.rest):
            return Answer(torch.empty(self._count, 0, dtype=torch.uint8, device="cpu"), found, 0)
        rows = empty_packed(self._count, self.below.row_bytes)
        if has:
            rows[self._holds] = known_rows
        rows[~self._holds], found[~self._holds] = more.rows, more.found
        return Answer(rows, found, has + more.has)


def _read(some: Sequence[_Unread]) -> None:
    """Read what one storage has, or several that are all disks."""
    answers = (
        [some[0].below.read(some[0].rest)]
        if len(some) == 1
        else Below.read_together([one.below for one in some], [one.rest for one in some])
    )
    for one, answer in zip(some, answers, strict=True):
        one.more = answer


def may_read_ahead(asked: Sequence[tuple[Below, Staged, int | None]], is_first: bool) -> bool:
    """Whether a batch's rows may be read now, in addition to those of other batches that have no place yet. `asked`: of
    each table the lower tier, the keys, and the bytes of its memory. The first batch in line always may, or none
    would."""
    return is_first or not any(
        len(staged.keys)
        and budget is not None
        and below.ahead_bytes - staged.bytes > min(budget // _AHEAD_PART, _MOST_AHEAD_BYTES)
        for below, staged, budget in asked
    )
