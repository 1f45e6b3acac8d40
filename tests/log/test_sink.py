"""The seam between gathering changes and keeping them: what a sink is promised, and what it promises."""

import ast
from pathlib import Path

import pytest
import torch
from support.logged import assert_rows, made, rows_of, train

import shoal
from shoal.log import append_sink, gather, rewrite_sink, sink
from shoal.log.files import Files
from shoal.log.gather import AllRows, ChangedRows, GivenRows
from shoal.log.label import Label
from shoal.log.reader import LogReader
from shoal.log.sink import MemorySink, commit_to
from shoal.log.tables import LoggedTables
from shoal.records.frames import HEADER_BYTES, FrameHeader, Kind, decode_deletes, decode_puts


def changed(bags, dense=None, optimizer=None):
    return ChangedRows("test", LoggedTables("test", bags), dense, optimizer, True)


def label(**given):
    return Label.checked("test", given.get("step"), given.get("event_time"), given.get("metadata"))


def frames_in(path):
    """The frames of rows and deletes that a log's segments have, by version."""
    found = {}
    for one in LogReader(Files(str(path))).commits():
        data = Path(Files(str(path)).segment(one.whole.segment)).read_bytes()
        begins = [place.offset - HEADER_BYTES for place in one.whole.frames]
        ends = [place.end for place in one.whole.frames]
        found[one.version] = [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return found


def test_a_log_and_memory_get_the_same_frames(tmp_path):
    bags, memory, model = made(), MemorySink("memory"), torch.nn.Linear(2, 2)
    with shoal.ChangeLog(tmp_path / "log") as log:
        for step in range(4):
            train(bags, [step], keys=200)
            if step == 2:
                bags.table("a").erase(bags.table("a").keys()[:20])
            dense = model if step == 1 else None
            log.commit(bags, step=step, dense=dense)
            commit_to(memory, changed(bags, dense), label(step=step))
    found = frames_in(tmp_path / "log")
    assert list(found) == [1, 2, 3, 4]
    for one in memory.commits:
        assert list(one.frames) == found[one.commit.version]
    logged = [one.commit for one in LogReader(Files(str(tmp_path / "log"))).commits()]
    for one, other in zip(memory.commits, logged, strict=True):
        assert dict(one.commit.tables) == dict(other.tables) and one.commit.step == other.step
        assert one.commit.rng == other.rng
    assert memory.commits[2].commit.tables["a"].deletes == 20
    assert [list(one.states) for one in memory.commits] == [[], ["model"], [], []]


class Failing(MemorySink):
    """Raises in one of its methods, as often as it is told to; in `append` after some frames."""

    def __init__(self, identity):
        super().__init__(identity)
        self.fails_in = None
        self.abandoned = []

    def _may_fail(self, name):
        if self.fails_in == name:
            raise OSError(f"no room in {name}")

    def begin(self, layouts):
        base = super().begin(layouts)
        self._may_fail("begin")
        return base

    def append(self, change):
        super().append(change)
        if len(self._frames) == 2:
            self._may_fail("append")

    def commit(self, commit, states):
        self._may_fail("commit")
        return super().commit(commit, states)

    def abandon(self, error):
        super().abandon(error)
        self.abandoned.append(str(error))
        self._may_fail("abandon")


@pytest.mark.parametrize("method", ["begin", "append", "commit"])
@pytest.mark.parametrize("also_abandon", [False, True])
def test_what_a_sink_did_not_take_is_in_its_next_commit(tmp_path, method, also_abandon, monkeypatch):
    bags, other, failing = made(), MemorySink("other"), Failing("failing")
    train(bags, [0], keys=200)
    commit_to(failing, changed(bags), label())
    commit_to(other, changed(bags), label())
    train(bags, [1], keys=100)
    failing.fails_in = method
    if also_abandon:
        original = failing.abandon

        def abandon(error):
            original(error)
            raise OSError("no room in abandon")

        monkeypatch.setattr(failing, "abandon", abandon)
    for _again in range(2):
        with pytest.raises(OSError, match="no room in abandon" if also_abandon and method != "begin" else method):
            commit_to(failing, changed(bags), label())
    assert failing.abandoned == ([] if method == "begin" else [f"no room in {method}"] * 2)
    assert failing.newest.version == 1
    failing.fails_in = None
    commit_to(other, changed(bags), label())  # between them another sink is served
    train(bags, [2], keys=100)
    bags.table("b").erase(bags.table("b").keys()[:5])
    made_again = commit_to(failing, changed(bags), label())
    assert made_again.version == 2 and not any(one.replaces for one in made_again.tables.values())
    assert_rows(replayed(failing), rows_of(bags))
    commit_to(other, changed(bags), label())
    assert_rows(replayed(other), rows_of(bags))


def test_tables_that_fail_while_they_are_gathered_leave_no_commit(monkeypatch):
    bags, memory = made(), Failing("memory")
    train(bags, [0], keys=200)
    commit_to(memory, changed(bags), label())
    train(bags, [1], keys=100)
    with monkeypatch.context() as patch:
        patch.setattr(gather, "random_states", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            commit_to(memory, changed(bags), label())
    assert len(memory.abandoned) == 1 and memory.newest.version == 1
    commit_to(memory, changed(bags), label())
    assert_rows(replayed(memory), rows_of(bags))


def test_a_commit_of_which_the_tables_did_not_hear_is_followed_by_all_rows(monkeypatch):
    """An interrupt came after the sink had the commit, and before the cursors moved."""
    bags, memory = made(), Failing("memory")
    train(bags, [0], keys=200)
    commit_to(memory, changed(bags), label())
    train(bags, [1], keys=100)

    def interrupt(_source, _sink, _commit):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ChangedRows, "committed", interrupt)
        commit_to(memory, changed(bags), label())
    assert memory.newest.version == 2 and len(memory.abandoned) == 1
    train(bags, [2], keys=100)
    third = commit_to(memory, changed(bags), label())
    assert third.version == 3 and all(one.replaces for one in third.tables.values())
    assert_rows(replayed(memory), rows_of(bags))


def test_a_cursor_moves_once_the_sink_has_the_commit():
    bags, memory = made(), MemorySink("memory")
    train(bags, [0], keys=200)
    commit_to(memory, changed(bags), label())
    before = commit_to(memory, changed(bags), label())
    assert not any(one.puts or one.deletes for one in before.tables.values())
    assert memory.commits[1].frames == ()
    assert before.before == memory.commits[0].commit.id and before.id != before.before


def test_another_copy_of_a_sink_gets_all_rows():
    """A commit that the tables do not know, of the number that they know."""
    bags, memory = made(), MemorySink("memory")
    train(bags, [0], keys=200)
    commit_to(memory, changed(bags), label())
    copy = MemorySink("memory")
    commit_to(copy, changed(made()), label())
    copy_commit = commit_to(copy, changed(bags), label())
    assert all(one.replaces for one in copy_commit.tables.values())
    assert_rows(replayed(copy), rows_of(bags))


def test_all_rows_and_given_rows_go_the_same_way():
    bags, memory, seen = made(), MemorySink("memory"), []
    train(bags, [0], keys=200)
    tables = LoggedTables("test", bags)
    made_commit = commit_to(memory, AllRows("test", tables, None, None, False, seen.append), label(step=3))
    assert sum(seen) == sum(len(bags.table(name)) for name in "abc")
    assert made_commit.step == 3 and not made_commit.rng
    layout = tables["a"].layout
    rows = list(tables["a"].table.by_bucket(50))
    given = commit_to(memory, GivenRows(layout, rows, 7), label())
    assert given.tables["a"].replaces and given.tables["a"].puts == len(bags.table("a"))
    assert given.tables["a"].step == 7 and given.tables["b"].step == made_commit.tables["b"].step


def test_tables_know_no_files_and_sinks_know_no_tables():
    for module, unknown in (
        (gather, ("files", "segment", "segment_writer", "manifest", "writer", "snapshot", "head", "hold")),
        (sink, ("files", "segment", "manifest", "writer", "tables", "gather")),
        (append_sink, ("tables", "gather")),
        (rewrite_sink, ("tables", "gather")),
    ):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {f"shoal.log.{name}" for name in unknown}, module.__name__
        if module is not gather:
            assert not any(name.startswith("shoal.table") and name != "shoal.table.changes" for name in imported)


def replayed(memory):
    """A collection with the rows that a sink's commits make."""
    bags = made()
    tables = LoggedTables("test", bags)
    names = list(tables)
    for one in memory.commits:
        for name, said in one.commit.tables.items():
            if said.replaces:
                bags.table(name).erase(bags.table(name).keys())
        for frame in one.frames:
            header = FrameHeader.unpack(frame, "frame")
            payload = bytearray(frame[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
            table = tables[names[header.table]]
            if header.kind is Kind.PUTS:
                table.table.put(decode_puts(header, payload, table.layout, "frame"))
            else:
                table.group.erase(table.number, decode_deletes(header, payload, table.layout, "frame"))
        for name, said in one.commit.tables.items():
            tables[name].remember(said)
    return bags
