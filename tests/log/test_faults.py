"""Logs whose disk is full, whose writers are interrupted or forked, and whose calls are refused."""

import errno
import os
from contextlib import suppress
from functools import partial

import pytest
import torch
from support.counting import counted, failing
from support.inside import table_of
from support.logged import assert_rows, made, recovered, rows_of, train

import shoal
from shoal import _native
from shoal.errors import CheckpointError, ForkError, StorageError


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


class Filled:
    """A log of few bytes, and what its newest version holds. `do` is one thing that writes to it."""

    works = ("make", "first", "commit", "rotate", "compact", "rewrite", "close")

    def __init__(self, folder, work):
        self.path, self.work = folder / "log", work
        self.model = torch.nn.Linear(2, 2)
        self.bags = self.made()
        self.log = None
        if work != "make":
            self.open()
            for _version in range(0 if work == "first" else 2):
                self.change()
                self.log.commit(self.bags, dense=self.model)
        self.acknowledged = rows_of(self.bags)
        if work not in ("compact", "close"):
            self.change()

    @staticmethod
    def made():
        return shoal.EmbeddingBagCollection([shoal.Table("t", 2, optimizer=shoal.SGD(lr=0.5))])

    def open(self):
        self.log = shoal.ChangeLog(self.path, segment=1 if self.work == "rotate" else "1MiB", retain=1)

    @property
    def version(self):
        return 0 if self.log is None else self.log.version

    def change(self):
        self.bags.table("t").erase([1])
        self.bags.table("t").assign([self.version % 2, 2], torch.randn(2, 2))

    def do(self):
        if self.log is None:
            self.open()
        if self.work == "close":
            self.log.close()
        elif self.work == "compact":
            self.log.compact()
        elif self.work != "make":
            {"rewrite": self.log.rewrite}.get(self.work, self.log.commit)(self.bags, dense=self.model)

    def go_on(self):
        """In the log that failed if it lets, else in another."""
        self.change()
        if self.log is None:
            self.open()
        try:
            self.log.commit(self.bags, dense=self.model)
        except StorageError as error:
            assert "open it again" in str(error).lower()
            self.log.close()
            self.open()
            self.log.commit(self.bags, dense=self.model)


@pytest.mark.parametrize("work", Filled.works)
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path, call, work):
    """As many runs as there are writes; in each, another one fails."""
    (tmp_path / "whole").mkdir()
    filled = Filled(tmp_path / "whole", work)
    with counted(call, tmp_path / "whole", most=100) as whole:
        filled.do()
    for number in range(102):
        folder = tmp_path / str(number)
        folder.mkdir()
        filled = Filled(folder, work)
        version, is_refused = filled.version, False
        with failing(call, folder, after=number, error=errno.ENOSPC) as calls:
            try:
                filled.do()
            except StorageError as error:
                is_refused = True
                assert "space" in str(error)
        if not calls.has_failed:
            assert not is_refused
            break
        # What was acknowledged is there; what was refused is there as a whole or not at all.
        if version:
            again = filled.made()
            found = shoal.recover(filled.path, again, dense=torch.nn.Linear(2, 2))
            assert found.version in (version, version + 1)
            assert_rows(again, filled.acknowledged if found.version == version else rows_of(filled.bags))
            if not is_refused:  # only the head was not written
                assert found.version == filled.version
        filled.go_on()
        assert filled.log.verify().is_sound
        filled.log.close()
        again, model = filled.made(), torch.nn.Linear(2, 2)
        assert shoal.recover(filled.path, again, dense=model).version == filled.version
        assert_rows(again, rows_of(filled.bags))
        assert torch.equal(model.weight, filled.model.weight)
    # The padding of a commit frame is written where its text is not a multiple of 64 bytes long.
    assert abs(number - whole.count) <= 2
    assert number > 0


@pytest.mark.parametrize("file", ["segments", "dense", "snapshots", "MANIFEST", "HEAD"])
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_disk_that_is_full_anywhere_loses_nothing(tmp_path, call, file, after):
    """Commits that rotate, compactions and saves, each of which may be the one that fails."""
    model = torch.nn.Linear(2, 2)
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4, optimizer=shoal.SGD(lr=0.5))])
    open_log = partial(shoal.ChangeLog, tmp_path / "log", segment="4KiB", retain=1)
    log = open_log()
    _native.inject_fault(getattr(_native.FileCall, call), file, errno.ENOSPC, after=after, times=1)
    for number, work in enumerate(("commit", "commit", "compact", "commit", "rewrite", "commit", "compact", "commit")):
        bags.table("t").assign(range(number, number + 60), torch.randn(60, 4))
        try:
            log.compact() if work == "compact" else getattr(log, work)(bags, dense=model)
        except StorageError as error:
            assert "space" in str(error)
            with suppress(StorageError):
                log.close()
            log = open_log()
    _native.clear_faults()
    bags.table("t").assign([1], torch.randn(1, 4))
    log.commit(bags, dense=model)
    assert log.verify().is_sound
    log.close()
    again = shoal.EmbeddingBagCollection([shoal.Table("t", 4, optimizer=shoal.SGD(lr=0.5))])
    shoal.recover(tmp_path / "log", again, dense=torch.nn.Linear(2, 2))
    assert_rows(again, rows_of(bags))


@pytest.mark.parametrize(
    ("call", "error"), [("changed_keys", MemoryError), ("clear_changed", KeyboardInterrupt), (None, None)]
)
def test_a_seal_that_fails_loses_no_change(tmp_path, monkeypatch, call, error):
    bags = made()
    train(bags, range(4))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        train(bags, range(4, 8))
        storage = table_of(bags).storage
        if error is not None:

            def fail(_slots):
                raise error

            monkeypatch.setattr(storage, call, fail)
            with pytest.raises(error):
                log.commit(bags)
            monkeypatch.undo()
        for step in range(8, 11):
            train(bags, [step, 4])  # rows that were flagged then, too
            log.commit(bags)
            again, _ = recovered(tmp_path / "log")
            assert_rows(again, rows_of(bags))
        assert not log.newest.tables["a"].replaces


def test_an_interrupt_right_behind_a_commit_writes_no_version_twice(tmp_path, monkeypatch):
    bags = made()
    train(bags, range(3))
    log = shoal.ChangeLog(tmp_path / "log")
    log.commit(bags)
    train(bags, range(3, 5))

    def interrupt(_self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shoal.log.segment_writer.SegmentWriter.commit", interrupt)
        log.commit(bags)
    with pytest.raises(StorageError, match="open it again"):
        log.commit(bags)
    log.close()
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.version == 2  # it was complete
        train(bags, range(5, 7))
        assert log.commit(bags) == 3
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


@pytest.mark.parametrize("call", ["commit", "rewrite"])
def test_an_interrupt_behind_a_new_manifest_is_found_when_the_log_is_opened_again(tmp_path, monkeypatch, call):
    bags = made()
    train(bags, range(3))
    log = shoal.ChangeLog(tmp_path / "log", segment="4KiB")
    log.commit(bags)
    train(bags, range(3, 5))

    def interrupt(_self, _first):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shoal.log.writer.LogWriter._write_to", interrupt)
        getattr(log, call)(bags)  # the commit begins another segment
    with pytest.raises(StorageError, match="open it again"):
        log.commit(bags)
    log.close()
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.version == (1 if call == "commit" else 2)
        train(bags, range(5, 7))
        log.commit(bags)
        assert log.verify().is_sound
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_a_rollback_that_is_refused_changes_nothing(tmp_path):
    bags, model = made(), torch.nn.Linear(2, 2)
    train(bags, range(3))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        train(bags, range(3, 5))
        log.commit(bags, dense=model)
        before = rows_of(bags)
        with pytest.raises(CheckpointError, match="no dense weights"):
            log.rollback(1, bags, dense=model)
        other = shoal.EmbeddingBagCollection([shoal.Table("other", 4)])
        other.table("other").assign([1], torch.ones(1, 4))
        with pytest.raises(CheckpointError, match="no table 'other'"):
            log.rollback(1, other)
        assert len(other.table("other")) == 1
        assert log.version == 2
        assert_rows(bags, before)


def test_a_fork_does_not_write_to_a_log(tmp_path):
    bags = made()
    train(bags, range(2))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        child = os.fork()
        if not child:
            code = 1
            try:
                log.commit(bags)
            except ForkError:
                log.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        train(bags, range(2, 4))
        assert log.commit(bags) == 2
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))
