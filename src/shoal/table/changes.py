"""Which keys of a table were put or deleted, for cursors that each have a place of their own in that sequence."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal import _native

# Keys that a cursor has not looked at are made distinct when there are so many times as many.
_GROWTH = 2
_LEAST_KEYS = 1 << 16
# Keys that wait for a cursor, compared with a table's rows. Where there are more, most were deleted: then the cursor
# looks at all rows, which are fewer.
_MOST_KEYS = 2
# Logs that a table remembers: for each it keeps the keys that the log has not seen. A commit to another log holds all
# rows again.
_MOST_LOGS = 8


# A commit of a log, by its version and id: a log and its copy may both have one of that version.
Mark = tuple[int, str]
BEGINNING: Mark = (0, "")


class Cursor:
    """One consumer's place: the keys that it has not seen yet. The group's lock covers it.

    A new cursor knows nothing: to it all rows are new, until it has looked at them and called `advance`.
    """

    def __init__(self) -> None:
        self._news: list[Tensor] = []
        self._looked: Tensor | None = None  # until `advance` says that they were kept
        self._knows_nothing = True
        self._looked_at_all = False
        self._merged = 0  # how many of the news are known to be distinct

    def add(self, keys: Tensor) -> None:
        """Hear of keys that changed."""
        if self._knows_nothing and not self._looked_at_all:
            return  # it will look at all of them
        self._news.append(keys)
        if self.waiting > max(_GROWTH * self._merged, _LEAST_KEYS) and len(self._news) > 1:
            self._news = [torch.unique(torch.cat(self._news))]
            self._merged = len(self._news[0])

    @property
    def waiting(self) -> int:
        """How many keys it has not looked at; some may be counted twice."""
        return sum(map(len, self._news))

    def lose(self) -> None:
        """Hear that all rows may have changed, and others be gone."""
        self._knows_nothing, self._looked_at_all = True, False
        self._news, self._looked, self._merged = [], None, 0

    def look(self) -> Tensor | None:
        """The keys that changed since the last `advance`, in ascending order; None if all rows may have.

        They are shown again by the next look, unless `advance` is called before it.
        """
        if self._knows_nothing:
            self._looked_at_all = True
            self._news, self._merged = [], 0
            return None
        shown = ([] if self._looked is None else [self._looked]) + self._news
        self._looked = torch.unique(torch.cat(shown)) if shown else torch.empty(0, dtype=torch.int64, device="cpu")
        self._news, self._merged = [], 0
        return self._looked

    def advance(self) -> None:
        """The keys that it looked at were kept: they are not shown again."""
        if self._knows_nothing and not self._looked_at_all:
            return  # it was lost since then
        self._knows_nothing = self._looked_at_all = False
        self._looked = None


@dataclass
class _Base:
    """The commit of a log that the table equalled, and what changed since."""

    commit: Mark
    cursor: Cursor


class Counted(Protocol):
    """A table that knows about how many rows it has."""

    @property
    def rows_counted(self) -> int:
        """About how many rows there are, at no cost."""


class Changes:
    """The changes of one table. The group's lock covers it. The keys that are kept for a cursor that never looks are
    bounded by the table's rows."""

    def __init__(self, table: Counted) -> None:
        self._table = weakref.ref(table)
        self.listed = _native.ChangedRows()  # since the last seal
        self._listed = self._listed_once = 0  # keys in it, and those known to be distinct
        # Lists were dropped: rows may be flagged changed that no list has. Such flags are cleared before the next look.
        self.flags_are_stale = False
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self._bases: dict[str, _Base] = {}

    @property
    def has_cursors(self) -> bool:
        """Whether a cursor is open."""
        return len(self._cursors) > 0

    def open(self) -> Cursor:
        """Open a cursor. It hears of changes for as long as the caller keeps it."""
        cursor = Cursor()
        self._cursors.add(cursor)
        return cursor

    # ---- logs, by their identities

    def follow(self, log: str, commit: Mark, *others: Mark) -> None:
        """Open a cursor for a log whose rows of the table are those of a commit, and of others. Call it before the seal
        that the cursor is to hear of."""
        base = self._bases.get(log)
        if base is None or base.commit not in (commit, *others):
            self._bases.pop(log, None)
            self._bases[log] = _Base(commit, self.open())
            for oldest in list(self._bases)[:-_MOST_LOGS]:
                del self._bases[oldest]

    def look(self, log: str) -> Tensor | None:
        """The keys that changed since the table equalled the log; None if all rows may have changed."""
        return self._bases[log].cursor.look()

    def committed(self, log: str, commit: Mark) -> None:
        """The keys of the last `look` are in that commit of the log, which the table equalled then."""
        base = self._bases[log]
        base.cursor.advance()
        base.commit = commit

    # ---- what happens

    def add(self, keys: Tensor) -> None:
        """Say that the rows of keys were put or deleted."""
        if not self.has_cursors or not len(keys):
            return
        self.listed.add(keys)
        self._listed += len(keys)
        if self._listed > max(_GROWTH * self._listed_once, _LEAST_KEYS):
            try:
                distinct = torch.unique(self._take_keys())
                if self._are_too_many(len(distinct)):
                    self.lose()
                    return
                self.listed.add(distinct)
                self._listed = self._listed_once = len(distinct)
            except BaseException:
                self.lose()
                raise

    def _take_keys(self) -> Tensor:
        self._listed = self._listed_once = 0
        keys: Tensor = self.listed.take_keys()
        return keys

    def _are_too_many(self, keys: int) -> bool:
        table = self._table()
        return keys > _LEAST_KEYS and table is not None and keys > _MOST_KEYS * table.rows_counted

    def lose(self) -> None:
        """Say that all rows may have changed."""
        self.flags_are_stale = True
        self._take_keys()
        self.listed.take_slots()
        for cursor in self._cursors:
            cursor.lose()

    def seal(self, keys_of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Tell the cursors what changed; returns these keys, each once, in ascending order. `keys_of` finds the keys of
        the slots that were listed, where slots are listed."""
        try:
            listed = self._take_keys()
            if keys_of is not None:
                listed = torch.cat([listed, keys_of(self.listed.take_slots())])
            keys: Tensor = torch.unique(listed)
            if len(keys):
                for cursor in self._cursors:
                    cursor.add(keys)
                    if self._are_too_many(cursor.waiting):
                        cursor.lose()
        except BaseException:
            self.lose()  # some cursors may have heard of it and some not
            raise
        return keys
