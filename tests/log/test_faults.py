"""Logs whose disk is full, whose writers are interrupted or forked, and whose calls are refused."""

import errno
import os
from contextlib import suppress
from functools import partial

import pytest
import torch
from logged import assert_rows, made, recovered, rows_of, train

import shoal
from shoal import _native
from shoal.errors import CheckpointError, ForkError, StorageError


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


@pytest.mark.parametrize("after", range(12))
def test_a_disk_that_is_full_loses_nothing(tmp_path, after):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        train(bags, range(3, 6))
        _native.inject_fault(_native.FileCall.write, "segments", errno.ENOSPC, after=after, times=1)
        with pytest.raises(StorageError, match="space"):
            for _ in range(10):
                log.commit(bags)
                train(bags, [7])
        _native.clear_faults()
        version = log.version
        log.commit(bags)
        assert log.version == version + 1
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


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
        storage = bags._group.tables[0].storage
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
        patch.setattr("shoal.log.segment.SegmentWriter.commit", interrupt)
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
        patch.setattr(shoal.ChangeLog, "_write_to", interrupt)
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
