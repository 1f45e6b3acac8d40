"""Writers whose LOCK, segment, manifest or folder is not theirs any more, because it was removed or replaced."""

import os
import shutil

import pytest
import torch
from support.logged import assert_rows, made, rows_of, train

import shoal
from shoal import _native
from shoal.errors import StorageError
from shoal.log import change, manifest_writer
from shoal.log.compact import compact
from shoal.log.files import Files
from shoal.log.manifest import read_manifest
from shoal.log.segment_writer import SegmentWriter
from shoal.log.snapshot_writer import SnapshotWriter
from shoal.log.verify import verify


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


def contents(path):
    return {
        file: (file.stat().st_ino, file.read_bytes())
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("LOCK", "MANIFEST.lock", "COMPACT")
    }


def remade(path):
    """Another log at the same path."""
    shutil.rmtree(path)
    bags = made()
    with shoal.ChangeLog(path) as log:
        train(bags, [90], keys=50)
        log.commit(bags)


def unlocked(path):
    """A user takes LOCK for a stale one, and another writer commits."""
    os.remove(path / "LOCK")
    bags = made()
    with shoal.ChangeLog(path) as log:
        shoal.recover(path, bags)
        train(bags, [90], keys=50)
        log.commit(bags)


def restored(path):
    """A user puts a copy of the segment in its place."""
    (segment,) = (path / "segments").iterdir()
    shutil.copy(segment, path / "copy")
    os.replace(path / "copy", segment)


def taken_over(path):
    """LOCK is back, and another writer was there meanwhile."""
    os.rename(path / "LOCK", path / "kept")
    unlocked_log = shoal.ChangeLog(path)
    bags = made()
    shoal.recover(path, bags)
    unlocked_log.commit(bags)
    unlocked_log.close()
    os.replace(path / "kept", path / "LOCK")


LOSSES = {"its folder": remade, "its lock": unlocked, "its segment": restored, "its manifest": taken_over}


@pytest.mark.parametrize("call", ["commit", "rollback", "rewrite", "sync", "compact", "close", "rotate"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_writer_that_lost_its_log_stops_and_changes_nothing(tmp_path, loss, call):
    path, bags, model = tmp_path / "log", made(), torch.nn.Linear(2, 2)
    log = shoal.ChangeLog(path, segment=1 if call == "rotate" else "1MiB")
    for step in range(1 if call == "rotate" else 2):
        train(bags, [step], keys=50)
        log.commit(bags, dense=model)
    LOSSES[loss](path)
    before = contents(path)
    train(bags, [9], keys=50)
    now = rows_of(bags)
    calls = {
        "commit": lambda: log.commit(bags, dense=model),
        "rotate": lambda: log.commit(bags, dense=model),
        "rollback": lambda: log.rollback(1, bags, dense=model),
        "rewrite": lambda: log.rewrite(bags, dense=model),
        "sync": log.sync,
        "compact": log.compact,
        "close": log.close,
    }
    with pytest.raises(StorageError, match=r"another process may write the log. Open it again"):
        calls[call]()
    assert_rows(bags, now)
    assert contents(path) == before
    if call != "close":
        with pytest.raises(StorageError, match=r"open it again"):
            log.commit(bags)
    try:
        log.close()
    finally:
        assert contents(path) == before
    with shoal.ChangeLog(path) as other:  # what the other one wrote is there, and goes on
        assert other.verify().is_sound
        assert other.version == {"its folder": 1, "its segment": 1 if call == "rotate" else 2}.get(
            loss, 2 if call == "rotate" else 3
        )
        again = made()
        shoal.recover(path, again)
        other.commit(again)


def test_a_lock_that_is_gone_can_be_put_back(tmp_path):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        log.commit(bags)
        os.rename(path / "LOCK", path / "away")
        for call in (lambda: log.commit(bags), log.sync, log.compact):
            with pytest.raises(StorageError, match=r"LOCK is not there any more.*Put it back"):
                call()
        os.rename(path / "away", path / "LOCK")
        assert log.commit(bags) == 2
    assert verify(Files(str(path))).is_sound


@pytest.mark.parametrize("fsync", ["each", "never"])
def test_a_commit_is_not_acknowledged_where_the_log_was_lost_while_it_was_written(tmp_path, monkeypatch, fsync):
    path, bags = tmp_path / "log", made()
    log = shoal.ChangeLog(path, fsync=fsync)
    log.commit(bags)
    original = SegmentWriter.append

    def then_lost(self, frame):
        original(self, frame)
        if self.headers[-1][4] == 3:  # the commit frame
            os.remove(path / "LOCK")
            (path / "LOCK").touch()

    monkeypatch.setattr(SegmentWriter, "append", then_lost)
    train(bags, [1], keys=50)
    size = (path / "segments" / f"{1:020}.seg").stat().st_size
    with pytest.raises(StorageError, match=r"LOCK is not the one.*Nothing of this call is acknowledged"):
        log.commit(bags)
    monkeypatch.undo()
    assert log.version == 1
    assert (path / "segments" / f"{1:020}.seg").stat().st_size > size  # it is not cut off, either
    with pytest.raises(StorageError, match="open it again"):
        log.commit(bags)
    log.close()
    with shoal.ChangeLog(path) as log:  # which says what is there
        assert log.version == 2 and log.verify().is_sound
        log.commit(bags)
        again = made()
        shoal.recover(path, again)
        assert_rows(again, rows_of(bags))


def test_rows_of_a_large_commit_are_not_written_to_a_log_that_was_lost(tmp_path, monkeypatch):
    """It looks before each frame, not before each commit."""
    path, bags = tmp_path / "log", made()
    log = shoal.ChangeLog(path)
    log.commit(bags)
    original = change.encode_puts

    def then_lost(*arguments, **options):
        os.remove(path / "LOCK")
        (path / "LOCK").touch()
        monkeypatch.setattr(change, "encode_puts", original)
        return original(*arguments, **options)

    train(bags, [1], keys=50)
    before = contents(path)
    monkeypatch.setattr(change, "encode_puts", then_lost)
    with pytest.raises(StorageError, match="LOCK is not the one"):
        log.commit(bags)
    assert contents(path) == before
    log.close()


def test_a_log_that_is_opened_for_nothing_keeps_its_manifest(tmp_path):
    path, bags = tmp_path / "log", made()
    for epoch in (1, 2):
        with shoal.ChangeLog(path) as log:
            log.commit(bags)
        assert read_manifest(Files(str(path))).epoch == epoch
        before = contents(path)
        for _ in range(3):
            shoal.ChangeLog(path).close()
        after = contents(path)
        assert {file: data for file, (_, data) in before.items()} == {file: data for file, (_, data) in after.items()}
        assert before[path / "MANIFEST.json"] == after[path / "MANIFEST.json"]


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_directory"])
def test_the_epoch_is_on_the_disk_before_the_first_commit(tmp_path, call):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        log.commit(bags)
    size = (path / "segments" / f"{1:020}.seg").stat().st_size
    with shoal.ChangeLog(path) as log:
        where = str(path) if call == "sync_directory" else "MANIFEST.json"
        _native.inject_fault(getattr(_native.FileCall, call), where, 5, after=0, times=1)
        with pytest.raises(StorageError):
            log.commit(bags)
        _native.clear_faults()
        assert (path / "segments" / f"{1:020}.seg").stat().st_size == size
        inode = (path / "MANIFEST.json").stat().st_ino
        assert log.commit(bags) == 2
        # Written again, though it may be in its place already: it is not known whether its name was on the disk.
        assert (path / "MANIFEST.json").stat().st_ino != inode
        assert (log.newest.epoch, read_manifest(Files(str(path))).epoch) == (2, 2)
        inode = (path / "MANIFEST.json").stat().st_ino
        log.commit(bags)
        assert (path / "MANIFEST.json").stat().st_ino == inode


def test_another_process_compacts_and_the_writer_goes_on(tmp_path):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path, retain=1, segment=1) as log:
        for step in range(6):
            train(bags, [step], keys=50)
            log.commit(bags)
            if step % 2:
                assert compact(Files(str(path)), retain=1) == log.version
        assert log.verify().is_sound
    assert read_manifest(Files(str(path))).epoch == 1


def test_a_repair_is_seen_by_a_writer_that_lost_its_lock(tmp_path):
    path, bags = tmp_path / "log", made()
    log = shoal.ChangeLog(path)
    log.commit(bags)
    log.commit(bags)
    os.rename(path / "LOCK", path / "kept")
    (segment,) = (path / "segments").iterdir()
    content = bytearray(segment.read_bytes())
    content[-100] ^= 1
    segment.write_bytes(content)
    with pytest.warns(shoal.log.RepairWarning):
        shoal.ChangeLog(path, repair=True).close()
    os.replace(path / "kept", path / "LOCK")
    with pytest.raises(StorageError, match=r"MANIFEST\.json is not the one"):
        log.commit(bags)
    log.close()


def test_a_compaction_lets_nothing_go_of_a_log_that_was_replaced(tmp_path, monkeypatch):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        log.commit(bags)
    original = SnapshotWriter.finish

    def then_replaced(self, commit):
        monkeypatch.setattr(SnapshotWriter, "finish", original)
        entry = original(self, commit)
        os.remove(path / "COMPACT")
        return entry

    monkeypatch.setattr(SnapshotWriter, "finish", then_replaced)
    before = read_manifest(Files(str(path)))
    with pytest.raises(StorageError, match=r"COMPACT.* was removed or replaced"):
        compact(Files(str(path)))
    assert read_manifest(Files(str(path))) == before
    assert compact(Files(str(path))) == 1


def test_a_manifest_is_not_changed_by_two(tmp_path):
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        log.commit(bags)
        before = (path / "MANIFEST.json").read_bytes()
        original = manifest_writer.read_manifest

        def then_unlocked(files):
            if (path / "MANIFEST.lock").exists():
                os.remove(path / "MANIFEST.lock")
            return original(files)

        manifest_writer.read_manifest = then_unlocked
        try:
            with pytest.raises(StorageError, match=r"MANIFEST\.lock\] was removed or replaced"):
                log.commit(shoal.EmbeddingBagCollection([shoal.Table("new", 2)]))
        finally:
            manifest_writer.read_manifest = original
        assert (path / "MANIFEST.json").read_bytes() == before
        assert log.commit(bags) == 2
