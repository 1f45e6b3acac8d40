"""When a commit waits for the disk: syncs are counted where they leave for the operating system."""

from types import SimpleNamespace

import pytest
import torch
from support.counting import counted

import shoal
from shoal import _native
from shoal.log import writer
from shoal.log.files import Files
from shoal.log.head import read_head


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


@pytest.fixture
def clock(monkeypatch):
    """What a log takes for the time."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


class Written:
    """A log, and a collection whose tables it has already."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.log = shoal.ChangeLog(folder / "log", **options)
        self.bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
        self.commit()
        self.log.sync()

    def commit(self):
        self.bags.table("t").assign([self.log.version], torch.ones(1, 4))
        return self.log.commit(self.bags)

    def syncs(self, commits=1, part=""):
        """How many syncs that many commits make, of any file or of some."""
        with counted("sync", self.folder, part) as count:
            for _ in range(commits):
                self.commit()
        return count.count

    @property
    def kept(self):
        """The version that is known to be on the disk."""
        return read_head(Files(str(self.folder / "log"))).version


def test_counts_are_right(tmp_path):
    path = tmp_path / "file"
    with _native.File.create_new(str(path)) as file, counted("sync", tmp_path) as syncs:
        for _ in range(3):
            file.sync()
        file.write(0, b"x")
    assert syncs.count == 3
    with counted("sync", tmp_path) as syncs:
        pass
    assert syncs.count == 0


def test_each_commit_is_synced_once(tmp_path, clock):
    written = Written(tmp_path, fsync="each", interval=1e6)
    assert written.syncs() == 1
    assert written.syncs(5) == 5
    assert written.syncs(3, ".seg") == 3
    assert written.kept == written.log.version
    written.log.close()


def test_a_commit_is_synced_once_the_interval_has_passed_and_not_before(tmp_path, clock):
    written = Written(tmp_path, fsync="interval", interval=10.0)
    for _ in range(2):
        begin, kept = clock.seconds, written.kept
        for passed in (0.0, 5.0, 9.9):
            clock.seconds = begin + passed
            assert written.syncs(2) == 0
            assert written.kept == kept
        clock.seconds = begin + 10.0
        assert written.syncs() == 1
        assert written.kept == written.log.version
        assert written.syncs(3) == 0  # it begins anew
        assert written.kept == written.log.version - 3
    # Syncs of other code are counted, too.
    clock.seconds += 9.0
    written.log.sync()
    clock.seconds += 9.0
    assert written.syncs() == 0
    clock.seconds += 100.0
    assert written.syncs(3) == 1
    with counted("sync", tmp_path, ".seg") as last:
        written.log.close()
    assert last.count == 1
    assert written.kept == written.log.version


def test_an_interval_of_nothing_is_each(tmp_path, clock):
    written = Written(tmp_path, fsync="interval", interval=0.0)
    assert written.syncs(4) == 4
    written.log.close()


def test_no_commit_is_synced_where_none_is_to_be(tmp_path, clock):
    written = Written(tmp_path, fsync="never", interval=0.0)
    kept = written.kept
    for _ in range(3):
        clock.seconds += 1e6
        assert written.syncs(4) == 0
        assert written.kept == kept
    for end in (written.log.sync, written.log.close):  # who asks for it gets it
        written.commit() if end == written.log.sync else None
        with counted("sync", tmp_path, ".seg") as last:
            end()
        assert last.count == 1
        assert written.kept == written.log.version


def test_a_segment_is_synced_before_another_is_begun(tmp_path, clock):
    """Up to the last segment, all is known to be on the disk."""
    written = Written(tmp_path, fsync="never", segment=1)
    version = written.log.version
    assert written.syncs(3, ".seg") == 2 * 3  # the one before, and the header of the next
    assert written.kept == version + 2  # all before the last
    written.log.close()
