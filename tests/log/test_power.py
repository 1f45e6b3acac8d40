"""Logs after power cuts of a certain kind: what was on the disk is a whole log, and is gone on with."""

import errno
import os
import shutil

import pytest
from support.logged import assert_rows, made, recovered, rows_of, train

import shoal
from shoal import _native
from shoal.errors import StorageError
from shoal.log.opening import TornTailWarning


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


def only_segment(path):
    (segment,) = (path / "segments").iterdir()
    return segment


def test_a_commit_whose_rows_did_not_reach_the_disk_though_its_last_frame_did(tmp_path):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        train(bags, range(3))
        log.commit(bags)
        kept, head = rows_of(bags), (path / "HEAD").read_bytes()
        size = only_segment(path).stat().st_size
        train(bags, range(3, 6))
        log.commit(bags)
    (path / "HEAD").write_bytes(head)  # as it was before the second
    content = bytearray(only_segment(path).read_bytes())
    content[size + 1024 : size + 1536] = bytes(512)  # rows, between the frames' headers
    only_segment(path).write_bytes(content)
    # It is read before a writer cuts it off, and after that.
    for cut in (False, True):
        if cut:
            with pytest.warns(TornTailWarning, match="after version 1"), shoal.ChangeLog(path) as log:
                assert log.version == 1
        for read in (shoal.recover, shoal.load):
            again = made()
            assert read(path, again).version == 1
            assert_rows(again, kept)
    assert only_segment(path).stat().st_size == size


@pytest.mark.parametrize("fsync", ["never", "interval"])
def test_a_snapshot_is_of_what_is_on_the_disk(tmp_path, fsync):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log", fsync=fsync, interval=1e6) as log:
        train(bags, range(3))
        log.commit(bags)
        _native.inject_fault(_native.FileCall.sync, ".seg", errno.EIO)
        with pytest.raises(StorageError, match=r"\.seg"):
            log.compact()
        _native.clear_faults()
        assert not list((tmp_path / "log" / "snapshots").iterdir())
        assert log.compact() == 1


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_segment_that_ends_before_a_snapshot(tmp_path, is_synced):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path, fsync="never") as log:
        for version in range(1, 5):
            train(bags, [version])
            log.commit(bags)
            if version == 2:
                size = only_segment(path).stat().st_size
                if is_synced:
                    log.sync()
        log.compact()
        kept = rows_of(bags)
        shutil.copytree(path, tmp_path / "cut")
    path = tmp_path / "cut"
    os.truncate(only_segment(path), size)
    for version in (4, 5, 6):
        again, commit = recovered(path)
        assert commit.version == version
        assert_rows(again, kept)
        with shoal.ChangeLog(path) as log:
            assert log.version == version
            train(again, [version])
            assert log.commit(again) == version + 1
        kept = rows_of(again)


def test_a_segment_that_was_cut_before_what_was_promised(tmp_path):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        for version in range(1, 4):
            train(bags, [version])
            log.commit(bags)
            if version == 1:
                size = only_segment(path).stat().st_size
        log.compact()
    os.truncate(only_segment(path), size)
    with pytest.raises(StorageError, match="were on the disk"):
        shoal.ChangeLog(path)
