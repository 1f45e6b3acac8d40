"""Cursors over a table's changes, each with a place of its own, compared with a model that keeps all changes."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.sweeps import examples

from shoal.table import changes
from shoal.table.changes import BEGINNING, Changes

SOME_KEYS = st.lists(st.integers(-4, 12) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=8)
LOGS = ("x", "y", "z")
LARGE = type("Large", (), {"rows_counted": 1 << 40})()  # a table of so many rows that no list is too long
MOST_LOGS = 2


class Place:
    """Where a cursor is in the list of all changes; None if all rows are new to it."""

    def __init__(self):
        self.seen = None
        self.looked = None  # to where, since its last advance

    def look(self, happened):
        self.looked = len(happened)
        return None if self.seen is None else sorted(set().union(*happened[self.seen :]))

    def advance(self):
        if self.looked is not None:
            self.seen, self.looked = self.looked, None

    def lose(self):
        self.seen = self.looked = None


class Cursors(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        # Small, so that a few keys reach them.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(changes, "_LEAST_KEYS", 6)
        self.patch.setattr(changes, "_MOST_LOGS", MOST_LOGS)
        self.changes = Changes(LARGE)
        self.happened = []  # keys of each seal
        self.listed = set()  # keys since the last one
        self.cursors = []  # cursors and places
        self.logs = {}  # marks and places, those that were followed last at the end
        self.commits = 0
        self.open()

    def teardown(self):
        self.patch.undo()

    def places(self):
        return [place for _, place in self.cursors] + [place for _, place in self.logs.values()]

    @precondition(lambda self: len(self.cursors) < 3)
    @rule()
    def open(self):
        self.cursors.append((self.changes.open(), Place()))

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def leave(self, data):
        self.cursors.pop(data.draw(st.integers(0, len(self.cursors) - 1)))

    @rule(keys=SOME_KEYS, is_sealed=st.booleans(), slots=st.none() | SOME_KEYS)
    def change(self, keys, is_sealed, slots):
        self.changes.add(torch.tensor(keys, dtype=torch.int64))
        if self.places():  # else no cursor asks
            self.listed |= set(keys)
        if not is_sealed:
            return
        keys_of = None if slots is None else lambda _listed: torch.tensor(slots, dtype=torch.int64)
        wanted = self.listed | set(slots or ())
        assert self.changes.seal(keys_of).tolist() == sorted(wanted)
        self.happened.append(wanted)
        self.listed = set()

    @rule(is_sealed=st.booleans())
    def lose(self, is_sealed):
        def fail(_listed):
            raise MemoryError

        if is_sealed:  # and that fails
            with pytest.raises(MemoryError):
                self.changes.seal(fail)
        else:
            self.changes.lose()
        self.listed = set()
        for place in self.places():
            place.lose()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), times=st.integers(1, 2), advances=st.booleans())
    def look(self, data, times, advances):
        cursor, place = self.cursors[data.draw(st.integers(0, len(self.cursors) - 1))]
        for _ in range(times):  # shown again
            self.assert_shown(cursor.look(), place)
        if advances:
            cursor.advance()
            place.advance()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def advance(self, data):
        """Later than it looked, or without a look."""
        cursor, place = self.cursors[data.draw(st.integers(0, len(self.cursors) - 1))]
        cursor.advance()
        place.advance()

    @rule(log=st.sampled_from(LOGS), is_same=st.booleans())
    def follow(self, log, is_same):
        """A log that is where the table left it, as one of several marks says, or that went on elsewhere."""
        mark, _ = self.logs.get(log, (BEGINNING, None))
        if not is_same:
            self.commits += 1
            mark = (self.commits, 0.5)
        self.changes.follow(log, (10**6, 0.0), mark) if is_same else self.changes.follow(log, mark)
        if log not in self.logs or not is_same:
            self.logs.pop(log, None)
            self.logs[log] = ((10**6, 0.0) if is_same else mark, Place())
            for oldest in list(self.logs)[:-MOST_LOGS]:
                del self.logs[oldest]

    @precondition(lambda self: self.logs)
    @rule(data=st.data(), is_committed=st.booleans())
    def commit(self, data, is_committed):
        log = data.draw(st.sampled_from(sorted(self.logs)))
        _, place = self.logs[log]
        self.assert_shown(self.changes.look(log), place)
        if is_committed:
            self.commits += 1
            mark = (self.commits, 0.25)
            self.changes.committed(log, mark)
            place.advance()
            self.logs[log] = (mark, place)

    def assert_shown(self, found, place):
        wanted = place.look(self.happened)
        assert (None if found is None else found.tolist()) == wanted

    @invariant()
    def has_cursors_while_one_is_open(self):
        assert self.changes.has_cursors == bool(self.places())


Cursors.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40)
TestCursors = Cursors.TestCase


def test_a_cursor_that_never_looks_keeps_each_key_about_once(monkeypatch):
    monkeypatch.setattr(changes, "_LEAST_KEYS", 50)
    table = Changes(LARGE)
    cursor, other = table.open(), table.open()
    for one in (cursor, other):
        one.look()
        one.advance()
    for step in range(500):
        table.add(torch.arange(step % 7, step % 7 + 40))
        table.seal()
        assert sum(map(len, cursor._news)) <= 2 * 46 + 40
        other.look()
        other.advance()
    assert cursor.look().tolist() == list(range(46))
    assert len(other.look()) == 0


def test_what_was_shown_and_not_kept_is_shown_among_the_news():
    table = Changes(LARGE)
    cursor = table.open()
    assert cursor.look() is None
    table.add(torch.tensor([9]))
    table.seal()
    assert cursor.look() is None  # it has not said that it kept them; 9 is among all rows
    cursor.advance()
    table.add(torch.tensor([3, 1]))
    table.seal()
    assert cursor.look().tolist() == [1, 3]
    table.add(torch.tensor([2, 3]))
    table.seal()
    assert cursor.look().tolist() == [1, 2, 3]
    table.add(torch.tensor([1]))
    table.seal()
    cursor.advance()  # of what it saw: 1 changed again since
    assert cursor.look().tolist() == [1]
    table.lose()
    for _ in range(2):
        cursor.advance()  # nothing that it saw counts
        assert cursor.look() is None
        table.lose()
