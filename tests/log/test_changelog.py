"""Commits, and what can be had again of them."""

import threading
from dataclasses import replace

import pytest
import torch
from support.batches import kjt, train_step
from support.inside import table_of
from support.logged import assert_rows, batch, made, recovered, rows_of, train

import shoal
from shoal.errors import BackwardError, CapacityError, CheckpointError, InputError, StorageError
from shoal.log.compact import compact
from shoal.log.files import Files
from shoal.log.opening import remove_strangers
from shoal.log.reader import LogReader
from shoal.log.snapshot_writer import SnapshotWriter
from shoal.log.tables import LoggedTables


@pytest.fixture(params=["memory", "ssd"])
def kind(request):
    return request.param


def test_nothing_was_committed_yet(tmp_path):
    bags = made()
    assert shoal.recover(tmp_path / "log", bags) is None
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.version == 0
        assert log.newest is None
        assert list(log.tail()) == []
        assert log.compact() is None
        assert shoal.recover(tmp_path / "log", bags) is None


def test_what_is_committed_is_recovered_and_training_goes_on_as_if_nothing_had_been(tmp_path, kind):
    bags = made(kind, tmp_path / "one")
    with shoal.ChangeLog(tmp_path / "log") as log:
        for version in range(1, 6):
            train(bags, range(version * 10, version * 10 + 3))
            assert log.commit(bags, step=version, metadata={"at": [version, None]}) == version
    before = rows_of(bags)
    train(bags, range(100, 104))  # is lost
    again, commit = recovered(tmp_path / "log", kind, tmp_path / "two")
    assert (commit.version, commit.step, commit.metadata) == (5, 5, {"at": [5, None]})
    assert_rows(again, before)
    other, _ = recovered(tmp_path / "log")
    train(again, range(200, 205))
    train(other, range(200, 205))
    assert_rows(again, rows_of(other))
    assert [table.stats().step for table in again.tables().values()] == [20, 20, 20]


def test_a_commit_holds_what_changed_and_no_more(tmp_path, kind):
    bags = made(kind, tmp_path / "one")
    train(bags, range(8))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        first = log.newest.tables["a"]
        assert first.replaces
        assert first.puts == len(bags.table("a"))
        log.commit(bags)
        assert [(one.puts, one.deletes, one.replaces) for one in log.newest.tables.values()] == [(0, 0, False)] * 3
        train_step(bags, kjt({"a": [[1, 2, 2**40]], "b": [[]], "c": [[7, 7]]}))
        bags.table("b").assign([3, 10**9], torch.ones(2, 16))
        bags.table("c").erase([7])
        log.commit(bags)
        said = {name: (one.puts, one.deletes) for name, one in log.newest.tables.items()}
        assert said == {"a": (3, 0), "b": (2, 0), "c": (0, 1)}
        assert [change.table for change in next(log.tail(2)).changes()] == ["a", "b", "c"]
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_changes_of_rows_that_are_moved_before_they_are_committed(tmp_path):
    """A step says which slots changed; rows that others made room for are elsewhere by the next commit."""
    table = shoal.Table("t", 64, optimizer=shoal.SGD(lr=1.0))
    bags = shoal.EmbeddingBagCollection([table])
    keys = torch.arange(40_000)
    bags.table("t").assign(keys, torch.randn(len(keys), 64))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        storage = table_of(bags).storage
        before = storage.bytes
        kept = keys[-300:]
        train_step(bags, kjt({"t": [kept.tolist()]}))
        for some in keys[:-300].split(4000):
            bags.table("t").erase(some)
        assert storage.bytes < before / 4  # they were moved
        log.commit(bags)
        assert (log.newest.tables["t"].puts, log.newest.tables["t"].deletes) == (300, 39_700)
        log.commit(bags)
        assert (log.newest.tables["t"].puts, log.newest.tables["t"].deletes) == (0, 0)
    again = shoal.EmbeddingBagCollection([table])
    shoal.recover(tmp_path / "log", again)
    assert_rows(again, rows_of(bags))


def test_memory_for_keys_is_within_the_budget_before_a_log_begins(tmp_path):
    table = shoal.Table("t", 16, tiers=[shoal.Dram("1MiB")], optimizer=shoal.SGD(lr=1.0))
    bags = shoal.EmbeddingBagCollection([table])
    with pytest.raises(CapacityError):
        for some in torch.arange(100_000).split(100):
            bags.table("t").assign(some, torch.zeros(len(some), 16))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        stats = bags.stats()["t"]
        assert stats.bytes <= stats.budget_bytes


def test_scores_of_forwards_without_backward_are_changes(tmp_path):
    bags = made()
    train(bags, range(3))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        key = int(bags.table("a").keys()[3])
        out = bags(kjt({"a": [[key]], "b": [[]], "c": [[]]}))
        del out
        log.commit(bags)
        assert log.newest.tables["a"].puts == 1
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_every_version_can_be_had_again_before_and_after_compaction(tmp_path, kind):
    bags = made(kind, tmp_path / "one")
    kept = {}
    with shoal.ChangeLog(tmp_path / "log", segment=40_000, retain=3) as log:
        for version in range(1, 13):
            train(bags, range(version * 3, version * 3 + 2), keys=300)
            if version % 3 == 0:
                bags.table("a").erase(bags.table("a").keys()[:: version + 1])
            log.commit(bags, step=version)
            kept[version] = rows_of(bags)
            if version in (4, 9):
                assert log.compact() == version
                assert log.compact() is None
        report = log.verify()
        assert report.is_sound, report.problems
        assert (report.snapshots, report.commits) == (2, 12)
        for version, wanted in kept.items():
            other = made()
            assert shoal.load(tmp_path / "log", other, version=version).step == version
            assert_rows(other, wanted)
        log.compact()
        log.compact()
        train(bags, [99])
        log.commit(bags)
        log.compact()
        with pytest.raises(CheckpointError, match="the oldest that is kept"):
            log.at(1)
    again, commit = recovered(tmp_path / "log")
    assert commit.version == 13
    assert_rows(again, rows_of(bags))


def test_a_reader_that_was_there_before_other_segments_were_begun(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log", segment=20_000) as log:
        train(bags, range(3))
        log.commit(bags)
        reader = LogReader(Files(str(tmp_path / "log")))
        for step in range(3, 8):
            train(bags, [step])
            log.commit(bags)
        seen = [one.version for one in reader.commits()]
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) < log.version
        reader.refresh()
        assert [one.version for one in reader.commits()] == [1, 2, 3, 4, 5, 6]


def test_rows_from_elsewhere_are_a_version(tmp_path):
    bags = made()
    train(bags, range(3))
    layout = LoggedTables("", bags)["b"].layout
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        pieces = list(log.at(1).rows("b"))
        bags.table("b").erase(bags.table("b").keys()[:9])
        assert log.commit_rows(layout, pieces, step=4) == 2
        said = log.newest.tables["b"]
        assert (said.step, said.rows, said.replaces) == (4, sum(map(len, pieces)), True)
        with pytest.raises(CheckpointError, match="dim 16 and 17"):
            log.commit_rows(replace(layout, dim=17), [])
        with pytest.raises(ZeroDivisionError):
            log.commit_rows(layout, (pieces[1 // 0] for _ in "x"))
        assert log.commit(bags) == 3
    then, now = made(), made()
    shoal.load(tmp_path / "log", then, version=2)
    assert len(then.table("b")) == len(bags.table("b")) + 9
    shoal.recover(tmp_path / "log", now)
    assert_rows(now, rows_of(bags))


def test_several_logs_each_have_their_own_place(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "x") as x, shoal.ChangeLog(tmp_path / "y") as y:
        for step in range(6):
            train(bags, [step], keys=400)
            x.commit(bags)
            if step % 3 == 2:
                y.commit(bags)
        assert (x.version, y.version) == (6, 2)
        assert not y.newest.tables["a"].replaces
    for name in "xy":
        again, _ = recovered(tmp_path / name)
        assert_rows(again, rows_of(bags))


def test_a_log_that_is_opened_again_goes_on(tmp_path):
    bags = made()
    for version in range(1, 4):
        train(bags, [version])
        with shoal.ChangeLog(tmp_path / "log") as log:
            assert log.commit(bags) == version
            assert log.newest.tables["a"].replaces == (version == 1)
    again, _ = recovered(tmp_path / "log")
    train(again, [9])
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(again)
        assert not log.newest.tables["a"].replaces
        # Tables that do not equal the log are committed whole.
        log.commit(bags)
        assert log.newest.tables["a"].replaces
    last, _ = recovered(tmp_path / "log")
    assert_rows(last, rows_of(bags))


def test_recover_while_the_log_is_open(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        train(bags, range(3, 5))
        shoal.recover(tmp_path / "log", bags)
        train(bags, [7])
        log.commit(bags)
        assert not log.newest.tables["a"].replaces
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_collections_that_are_recovered_together_and_commit_in_turn(tmp_path):
    x, y = (shoal.EmbeddingBagCollection([shoal.Table(name, 4)]) for name in "xy")
    with shoal.ChangeLog(tmp_path / "log") as log:
        for name, bags in (("x", x), ("y", y)):
            bags.table(name).assign(range(50), torch.ones(50, 4))
            log.commit(bags)
        shoal.recover(tmp_path / "log", [x, y])
        x.table("x").assign([1], torch.zeros(1, 4))
        log.commit([x, y])
        assert [(one.puts, one.replaces) for one in log.newest.tables.values()] == [(1, False), (0, False)]


def test_what_is_not_given_of_dense_weights_and_optimizers_stays(tmp_path):
    bags, model = made(), torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    for reopened in (False, True):
        path = tmp_path / f"{reopened}"
        log = shoal.ChangeLog(path)
        log.commit(bags, dense=model)
        if reopened:
            log.close()
            log = shoal.ChangeLog(path)
        log.commit(bags, optimizer=adam)
        log.commit(bags)
        weights = model.weight.detach().clone()
        model.weight.data.zero_()
        other = torch.optim.Adam(model.parameters())
        shoal.recover(path, bags, dense=model, optimizer=other)
        assert torch.equal(model.weight, weights)
        assert other.param_groups[0]["lr"] == 0.5
        log.close()


def test_a_forward_from_before_a_rollback_has_no_backward(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(2))
        log.commit(bags)
        wanted = rows_of(bags)
        train(bags, [2])
        log.commit(bags)
        loss = bags(batch(3)).values().sum()
        log.rollback(1, bags)
        with pytest.raises(BackwardError, match="rolled back"):
            loss.backward()
        assert_rows(bags, wanted)
        train(bags, [4])
        log.commit(bags)
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_tables_that_are_loaded_are_committed_whole(tmp_path):
    bags = made()
    train(bags, range(3))
    other = made()
    train(other, range(5, 8))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        bags.load_state_dict(other.state_dict())
        log.commit(bags)
        assert log.newest.tables["a"].replaces
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(other))


@pytest.mark.parametrize("kind", ["memory", "ssd"])
def test_rollback(tmp_path, kind):
    bags = made(kind, tmp_path / "one")
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(4))
        log.commit(bags, step=4)
        then = rows_of(bags)
        for step in range(5, 9):
            train(bags, [step])
            bags.table("a").erase(bags.table("a").keys()[:5])
            log.commit(bags)
        train(bags, [20])  # not committed
        assert log.rollback(1, bags) == 6
        assert_rows(bags, then)
        assert log.newest.metadata == {"rollback": 1}
        assert log.newest.step == 4
        assert not log.newest.tables["a"].replaces
        again, _ = recovered(tmp_path / "log")
        assert_rows(again, then)
        train(bags, range(30, 33))
        train(again, range(30, 33))
        assert_rows(again, rows_of(bags))


def test_one_writer(tmp_path):
    with shoal.ChangeLog(tmp_path / "log"), pytest.raises(StorageError, match=r"process \d+"):
        shoal.ChangeLog(tmp_path / "log")
    shoal.ChangeLog(tmp_path / "log").close()


def test_bad_arguments_change_nothing(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        for arguments in ({"metadata": {1: 2}}, {"metadata": {"x": {3}}}, {"event_time": "now"}, {"step": 1.5}):
            with pytest.raises(ValueError):
                log.commit(bags, **arguments)
        with pytest.raises(InputError, match="wanted a collection"):
            log.commit(torch.nn.Linear(2, 2))
        assert log.version == 0
    with pytest.raises(StorageError, match="closed"):
        log.commit(bags)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        shoal.ChangeLog(tmp_path / "other")


def test_a_table_of_another_layout(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        other = shoal.EmbeddingBagCollection([shoal.Table("a", 6)])
        with pytest.raises(CheckpointError, match="dim 5 and 6"):
            log.commit(other)
        with pytest.raises(CheckpointError, match="dim"):
            shoal.recover(tmp_path / "log", other)


@pytest.mark.threads
def test_lookups_and_several_logs_beside_training(tmp_path):
    """Lookups stamp rows, and a commit clears the flags of rows: no change may be lost between the two."""
    bags = made("ssd", tmp_path / "one")
    bags.train()
    train(bags, range(4))
    stop, failed = threading.Event(), []

    def beside(work):
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    with shoal.ChangeLog(tmp_path / "x", fsync="never") as x, shoal.ChangeLog(tmp_path / "y", fsync="never") as y:
        others = [
            threading.Thread(target=beside, args=(work,))
            for work in (
                lambda: bags.table("a").lookup(list(range(50))),
                lambda: x.commit(bags),
                lambda: y.commit(bags),
            )
        ]
        for other in others:
            other.start()
        train(bags, range(10, 40), keys=400)
        stop.set()
        for other in others:
            other.join()
        assert not failed, failed
        x.commit(bags)
        y.commit(bags)
    for name in "xy":
        again, _ = recovered(tmp_path / name)
        assert_rows(again, rows_of(bags))


def test_a_snapshot_that_is_made_while_a_writer_opens_stays(tmp_path, monkeypatch):
    bags = made()
    train(bags, range(3))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)

    def beside_a_compaction(files, manifest, version):
        assert compact(files, retain=1) == 1
        remove_strangers(files, manifest, version)

    monkeypatch.setattr("shoal.log.writer.remove_strangers", beside_a_compaction)
    shoal.ChangeLog(tmp_path / "log").close()
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_a_log_that_is_rewritten_while_it_is_compacted(tmp_path, monkeypatch):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        original = SnapshotWriter.finish

        def beside_a_save(self, commit):
            monkeypatch.setattr(SnapshotWriter, "finish", original)
            entry = original(self, commit)
            train(bags, [5])
            log.rewrite(bags)
            return entry

        monkeypatch.setattr(SnapshotWriter, "finish", beside_a_save)
        assert log.compact() is None
        train(bags, [6])
        log.commit(bags)
        assert log.verify().is_sound
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_dense_weights_that_do_not_fit_change_no_table(tmp_path):
    bags = made()
    train(bags, range(3))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags, dense=torch.nn.Linear(3, 2))
    other = made()
    train(other, range(5, 7))
    before = rows_of(other)
    for read in (shoal.recover, shoal.load):
        with pytest.raises(CheckpointError, match="has the shape"):
            read(tmp_path / "log", other, dense=torch.nn.Linear(4, 2))
        assert_rows(other, before)


def test_logs_that_are_left_behind_are_forgotten(tmp_path):
    bags = made()
    train(bags, [1])
    for number in range(12):
        with shoal.ChangeLog(tmp_path / f"{number}", fsync="never") as log:
            log.commit(bags)
    for number, replaces in ((11, False), (0, True)):
        with shoal.ChangeLog(tmp_path / f"{number}", fsync="never") as log:
            log.commit(bags)
            assert log.newest.tables["a"].replaces is replaces


def test_collections_that_commit_in_turn_commit_what_changed(tmp_path):
    one, two = (
        shoal.EmbeddingBagCollection([shoal.Table(name, 4, optimizer=shoal.SGD(lr=1.0))]) for name in ("one", "two")
    )
    for bags, name in ((one, "one"), (two, "two")):
        bags.table(name).assign(range(50), torch.randn(50, 4))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(one)
        log.commit(two)
        for _ in range(2):
            for bags, name in ((one, "one"), (two, "two")):
                bags.table(name).assign([7], torch.randn(1, 4))
                log.commit(bags)
                said = log.newest.tables[name]
                assert (said.puts, said.deletes, said.replaces) == (1, 0, False)
        log.rollback(3, one)
        assert log.newest.tables["one"].puts == 1
    shoal.recover(tmp_path / "log", [one, two])
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit([one, two])
        assert [(said.puts, said.replaces) for said in log.newest.tables.values()] == [(0, False)] * 2


def test_metadata_is_not_deeper_than_readers_can_go(tmp_path):
    deep = {}
    for _ in range(200):
        deep = {"in": deep}
    with shoal.ChangeLog(tmp_path / "log") as log:
        with pytest.raises(InputError, match="at most 64 deep"):
            log.commit(made(), metadata=deep)
        with pytest.raises(InputError, match="event_time"):
            log.commit(made(), event_time=10**400)
        assert log.commit(made(), metadata={"in": [{"in": 1}]}) == 1
