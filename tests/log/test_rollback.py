"""Rollbacks that fail on the way: all is as it was before."""

import errno
import subprocess
import sys

import pytest
import torch
from support.logged import assert_rows, made, recovered, rows_of, train
from torch import nn

import shoal
from shoal import _native
from shoal.errors import CheckpointError, StorageError


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


def model_of(value):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(model):
    (value,) = {one for parameter in model.parameters() for one in parameter.flatten().tolist()}
    return value


def committed(log, bags, model):
    """Two versions, and something behind the second."""
    train(bags, range(3))
    nn.init.constant_(model.bias, 1.0)
    nn.init.constant_(model.weight, 1.0)
    log.commit(bags, dense=model, step=1, event_time=10.0)
    train(bags, range(3, 6))
    bags.table("a").erase(bags.table("a").keys()[:5])
    nn.init.constant_(model.bias, 2.0)
    nn.init.constant_(model.weight, 2.0)
    log.commit(bags, dense=model, step=2, event_time=20.0)
    train(bags, range(6, 8))


@pytest.mark.parametrize("kind", ["memory", "ssd"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_where_the_log_is_full(tmp_path, kind, after):
    bags, model = made(kind, tmp_path / "rows"), model_of(0.0)
    with shoal.ChangeLog(tmp_path / "log") as log:
        committed(log, bags, model)
        before, steps = rows_of(bags), [one.stats().step for one in bags.tables().values()]
        _native.inject_fault(_native.FileCall.write, "log/", errno.ENOSPC, after=after, times=1)
        with pytest.raises(StorageError, match="No space"):
            log.rollback(1, bags, dense=model)
        assert_rows(bags, before)
        assert [one.stats().step for one in bags.tables().values()] == steps
        assert value_of(model) == 2.0
        assert log.version == 2
        _native.clear_faults()
        assert log.commit(bags) == 3
        again, _ = recovered(tmp_path / "log")
        assert_rows(again, before)
        assert log.rollback(1, bags, dense=model) == 4
        assert (log.newest.step, log.newest.event_time) == (1, 10.0)
        assert value_of(model) == 1.0
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_where_the_disk_below_a_table_fails(tmp_path):
    bags, model = made("ssd", tmp_path / "rows"), model_of(0.0)
    failed = 0
    with shoal.ChangeLog(tmp_path / "log") as log:
        committed(log, bags, model)
        before = rows_of(bags)
        for after in range(8):
            _native.inject_fault(_native.FileCall.write, ".seg", errno.EIO, after=after, times=1)
            try:
                log.rollback(1, bags, dense=model)
            except StorageError:
                failed += 1
                _native.clear_faults()
                assert_rows(bags, before)
                assert log.version == 2
                continue
            break
    assert failed


def test_where_an_optimizer_is_another(tmp_path):
    bags, model = made(), model_of(1.0)
    adam = torch.optim.Adam(model.parameters())
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(2))
        log.commit(bags, dense=model, optimizer=adam)
        train(bags, range(2, 4))
        before = rows_of(bags)
        other = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}])
        with pytest.raises(CheckpointError, match=r"groups of \[1, 1\] parameters"):
            log.rollback(1, bags, dense=model, optimizer=other)
        assert_rows(bags, before)
        assert log.version == 1


def test_what_is_not_given_stays(tmp_path):
    bags, model = made(), model_of(0.0)
    with shoal.ChangeLog(tmp_path / "log") as log:
        committed(log, bags, model)
        log.rollback(1, bags)
        assert value_of(model) == 2.0
        assert log.newest.dense.version == 2


def test_while_another_process_compacts(tmp_path):
    """It removes the files from which the version was to be made, between the moments at which weights and rows are
    read; the same version is in a snapshot by then."""
    path, bags, model = tmp_path / "log", shoal.EmbeddingBagCollection([shoal.Table("t", 1)]), model_of(1.0)
    compactions = []

    def compact(*_given):
        if compactions:
            return
        command = [sys.executable, "-m", "shoal.cli", "compact", path, "--retain", "1"]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0, done.stderr
        compactions.append(done.stdout)

    with shoal.ChangeLog(path, segment=1, fsync="never") as log:
        # More segments than a reader keeps open.
        for version in range(1, 262):
            bags.table("t").assign([version], torch.full((1, 1), float(version)))
            log.commit(bags, dense=model if version == 1 else None)
        wanted = rows_of(bags)
        bags.table("t").assign([5, 1000], torch.zeros(2, 1))
        bags.table("t").erase([7])
        model.register_state_dict_pre_hook(compact)
        assert log.rollback(261, bags, dense=model) == 262
        assert compactions
        assert len(list((path / "segments").iterdir())) < 5
        assert_rows(bags, wanted)
        assert log.verify().is_sound
    again = shoal.EmbeddingBagCollection([shoal.Table("t", 1)])
    shoal.recover(path, again)
    assert_rows(again, wanted)
