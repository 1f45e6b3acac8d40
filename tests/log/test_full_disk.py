"""Commits of which one step fails: the log goes on, and what is on the disk is sound."""

import errno
import os
import re
import shutil
import subprocess
import warnings
from contextlib import contextmanager

import pytest
import torch
from support.counting import failing
from support.logged import assert_rows, rows_of

import shoal
from shoal import _native
from shoal.errors import StorageError


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


class Written:
    """A log of two versions. The next commit begins a segment, adds a table, and has rows of two tables, deletes and
    dense weights; `rewrite` is what `shoal.save` does."""

    def __init__(self, folder, work="commit", segment=1):
        self.path, self.work = folder / "log", work
        self.model = torch.nn.Linear(2, 2)
        self.first = shoal.EmbeddingBagCollection([shoal.Table("first", 2)], seed=0)
        self.second = shoal.EmbeddingBagCollection([shoal.Table("second", 2)], seed=0)
        self.log = shoal.ChangeLog(self.path, segment=segment)
        for version in range(2):
            self.first.table("first").assign(range(version, version + 40), torch.randn(40, 2))
            self.log.commit(self.first, dense=self.model)
        self.kept = rows_of(self.first)
        self.change()

    def change(self):
        self.first.table("first").erase([1])
        self.first.table("first").assign([0, 50], torch.randn(2, 2))
        self.second.table("second").assign([7], torch.randn(1, 2))

    def commit(self):
        return getattr(self.log, self.work)([self.first, self.second], dense=self.model)

    def assert_sound(self, folder, version, may_be_torn=False):
        """Checks a log that is read while its writer has it open, and a copy of it as a process that died leaves it.
        version: None allows the one before the commit and the commit's own."""
        with shoal.open_log(self.path) as reader:
            report = reader.verify()
            assert report.is_sound, report.problems
            assert reader.version == version or (version is None and reader.version in (2, 3))
            version = reader.version
        shutil.copytree(self.path, folder / "copy")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if may_be_torn else "error", shoal.log.TornTailWarning)
            again = shoal.ChangeLog(folder / "copy")
        assert again.version == version
        assert again.verify().is_sound
        found = shoal.EmbeddingBagCollection([shoal.Table("first", 2)], seed=0)
        shoal.recover(folder / "copy", found, dense=torch.nn.Linear(2, 2))
        assert_rows(found, self.kept if version == 2 else rows_of(self.first))
        found.table("first").assign([99], torch.ones(1, 2))
        assert again.commit(found) == version + 1
        assert again.verify().is_sound
        again.close()

    def assert_whole(self):
        """Opened again, the log has all that the tables have."""
        version = self.log.version
        self.log.close()
        with shoal.ChangeLog(self.path) as log:
            assert log.version == version
            assert log.verify().is_sound
        first = shoal.EmbeddingBagCollection([shoal.Table("first", 2)], seed=0)
        second = shoal.EmbeddingBagCollection([shoal.Table("second", 2)], seed=0)
        model = torch.nn.Linear(2, 2)
        assert shoal.recover(self.path, [first, second], dense=model).version == version
        assert_rows(first, rows_of(self.first))
        assert_rows(second, rows_of(self.second))
        assert torch.equal(model.weight, self.model.weight)


CALLS = ("open", "write", "sync", "remove", "rename", "truncate", "sync_directory", "make_directory")
ERRORS = [(call, errno.ENOSPC) for call in CALLS] + [
    (call, error) for error in (errno.EDQUOT, errno.EIO) for call in ("write", "sync")
]
_ENDS = r"segments/\d{20}\.seg\] could not be brought|log\] the directory could not be brought"


@pytest.mark.parametrize("work", ["commit", "rewrite"])
@pytest.mark.parametrize(("call", "error"), ERRORS)
def test_a_step_that_fails_leaves_a_sound_log_that_goes_on(tmp_path, call, error, work):
    """As many runs as the commit makes calls of that kind; in each, another one fails."""
    ended = []
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        written = Written(folder, work)
        is_refused = False
        with failing(call, folder, after=number, error=error) as calls:
            try:
                assert written.commit() == 3
            except StorageError:
                is_refused = True
        if not calls.has_failed:
            assert not is_refused
            break
        assert written.log.version == (2 if is_refused else 3)
        written.assert_sound(folder, None if is_refused and call.startswith("sync") else written.log.version)
        written.change()
        try:
            written.commit()
        except StorageError as refusal:
            # After a sync of what is in the log that failed, and after nothing else.
            assert re.search(_ENDS, str(refusal)), refusal
            ended.append(number)
            written.log.close()
            written.log = shoal.ChangeLog(written.path)
            written.commit()
        written.assert_whole()
    assert number > 0 or (call, work) in (("truncate", "commit"), ("truncate", "rewrite"), ("make_directory", "commit"))
    assert len(ended) == {("sync", "commit"): 2, ("sync_directory", "rewrite"): 1}.get((call, work), 0)


@pytest.mark.parametrize("times", [1, 2])
def test_half_of_a_commit_that_cannot_be_cut_off_is_cut_off_by_the_next(tmp_path, times):
    written = Written(tmp_path)
    written.log.close()
    written.log = shoal.ChangeLog(written.path)  # whose commits stand in one segment
    _native.inject_fault(_native.FileCall.write, "segments", errno.ENOSPC, after=3)
    _native.inject_fault(_native.FileCall.truncate, "log/segments", errno.EIO, times=times)
    with pytest.raises(StorageError, match="No space"):
        written.commit()
    written.assert_sound(tmp_path, 2, may_be_torn=True)
    if times == 2:
        with pytest.raises(StorageError, match="Input/output"):
            written.commit()
    assert written.commit() == 3
    written.assert_whole()


@pytest.mark.parametrize("segment", [1, "1MiB"], ids=["another segment", "the same segment"])
def test_a_disk_without_room_for_a_step_of_a_commit(tmp_path, segment):
    """A real disk, with more and more room, from none to enough."""
    with mounted(tmp_path / "disk", "2m") as disk:
        refusals = set()
        for spare in range(0, 40960, 4096):
            folder = disk / str(spare)
            folder.mkdir()
            written = Written(folder, segment=segment)
            free = os.statvfs(disk)
            (disk / "filling").write_bytes(bytes(free.f_bavail * free.f_frsize - spare))
            is_refused = False
            try:
                written.commit()
            except StorageError as error:
                is_refused = True
                refusals.add(re.sub(r"\d+", "0", str(error).partition("]")[0].rpartition("/")[2]))
            with shoal.open_log(written.path) as reader:
                assert reader.verify().is_sound
                assert reader.version == (2 if is_refused else 3)
            os.remove(disk / "filling")
            assert written.commit() == (3 if is_refused else 4)
            written.assert_whole()
            shutil.rmtree(folder)
        assert not is_refused
        assert len(refusals) >= 2, refusals  # it was full at several steps


@contextmanager
def mounted(folder, size):
    """A disk of a few bytes."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
