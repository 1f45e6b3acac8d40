"""Logs that somebody damaged: an error, or exactly what was committed; never wrong rows, never a crash."""

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged import assert_rows, made, rows_of, train
from sweeps import examples

import shoal
from shoal import _native
from shoal.errors import CheckpointError, ShoalError, StorageError
from shoal.log.files import sealed_json


class Made:
    """A log with a snapshot, several segments and dense weights, and the rows of each of its versions."""

    def __init__(self, folder):
        self.path = folder / "log"
        self.rows = {}
        bags, model = made(), torch.nn.Linear(4, 3)
        with shoal.ChangeLog(self.path, segment=30_000) as log:
            for version in range(1, 8):
                train(bags, [version], keys=80)
                log.commit(bags, dense=model if version % 2 else None)
                self.rows[version] = rows_of(bags)
                if version == 3:
                    log.compact()
        self.files = sorted(
            str(path.relative_to(self.path))
            for path in self.path.rglob("*")
            if path.is_file() and "LOCK" not in path.name and "lock" not in path.name and path.name != "COMPACT"
        )


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


def check(log, path):
    """Whoever reads it gets an error or what was committed."""
    for read in (recover, load, verify, reopen):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(log, path)
        except ShoalError:
            pass


def recover(log, path):
    bags = made()
    commit = shoal.recover(path, bags, dense=torch.nn.Linear(4, 3))
    assert_rows(bags, log.rows[commit.version])


def load(log, path):
    for version in (3, 5):
        bags = made()
        shoal.load(path, bags, version=version)
        assert_rows(bags, log.rows[version])


def verify(log, path):
    from shoal.log.files import Files
    from shoal.log.verify import verify

    verify(Files(str(path)))


def reopen(log, path):
    with shoal.ChangeLog(path) as opened:
        bags = made()
        commit = shoal.recover(path, bags)
        assert commit.version == opened.version
        assert_rows(bags, log.rows[commit.version])
        train(bags, [50])
        opened.commit(bags)
        again = made()
        shoal.recover(path, again)
        assert_rows(again, rows_of(bags))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_noticed(log, tmp_path, data):
    path = tmp_path / "copy"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(log.path, path)
    file = path / data.draw(st.sampled_from(log.files))
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "grow", "gone", "noise"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        content = content[:at]
    elif kind == "zeros":
        content[at : at + 100] = bytes(len(content[at : at + 100]))
    elif kind == "grow":
        content += data.draw(st.binary(min_size=1, max_size=200))
    elif kind == "noise":
        content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    file.unlink()
    if kind != "gone":
        file.write_bytes(content)
    check(log, path)


@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_the_last_commit_is_not_cut_off_where_it_was_promised(log, tmp_path, kind):
    shutil.copytree(log.path, tmp_path / "copy")
    last = sorted((tmp_path / "copy" / "segments").iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-200] ^= 4
    last.write_bytes(content if kind == "flip" else content[:-64])
    for read in (lambda: shoal.ChangeLog(tmp_path / "copy"), lambda: shoal.recover(tmp_path / "copy", made())):
        with pytest.raises(StorageError, match=r"offset|version"):
            read()


def test_a_torn_tail_is_cut_off_and_said(log, tmp_path):
    for cut in (1, 60, 64, 100, 2000):
        path = tmp_path / f"{cut}"
        shutil.copytree(log.path, path)
        last = sorted((path / "segments").iterdir())[-1]
        whole = last.read_bytes()
        bags = made()
        shoal.recover(path, bags)
        with shoal.ChangeLog(path) as opened:
            train(bags, [77])
            opened.commit(bags)
        grown = last.read_bytes()
        shutil.copyfile(log.path / "HEAD", path / "HEAD")  # as it was before: the commit was never promised
        last.write_bytes(grown[: len(whole) + cut])
        with pytest.warns(shoal.log.TornTailWarning, match="died in version 8"):
            opened = shoal.ChangeLog(path)
        assert opened.version == 7
        assert last.read_bytes() == whole
        opened.close()
        recover(log, path)


def test_a_newer_format(log, tmp_path):
    shutil.copytree(log.path, tmp_path / "copy")
    manifest = tmp_path / "copy" / "MANIFEST.json"
    value = json.loads(manifest.read_bytes().rpartition(b"\ncrc32c")[0])
    manifest.write_bytes(sealed_json(value | {"version": 2}))
    for read in (lambda: shoal.ChangeLog(tmp_path / "copy"), lambda: shoal.load(tmp_path / "copy", made())):
        with pytest.raises(CheckpointError, match="newer Shoal"):
            read()


@pytest.mark.parametrize(
    "change",
    [
        {"segments": ["../../etc"]},
        {"segments": []},
        {"segments": [5, 4]},
        {"segments": [-1]},
        {"segments": [10**30]},
        {"snapshots": [{"version": "../3", "crc32c": 0}]},
        {"snapshots": [{"version": 3, "crc32c": 0}]},
        {"snapshots": [{"version": 2**62, "crc32c": 0}]},
        {"tables": [{"name": "../a", "dim": 5}]},
        {"tables": "a"},
        {"id": "../.."},
        {"format": "another"},
    ],
)
def test_manifests_that_lie(log, tmp_path, change):
    shutil.copytree(log.path, tmp_path / "copy")
    manifest = tmp_path / "copy" / "MANIFEST.json"
    value = json.loads(manifest.read_bytes().rpartition(b"\ncrc32c")[0])
    manifest.write_bytes(sealed_json(value | change))
    with suppress(ShoalError):  # or it is not asked
        bags = made()
        shoal.load(tmp_path / "copy", bags, version=3)
        assert_rows(bags, log.rows[3])
    files = sorted(tmp_path.rglob("*"))
    with suppress(ShoalError):
        shoal.ChangeLog(tmp_path / "copy").close()
    assert set(files) <= set(tmp_path.rglob("*")), "files were removed"


def test_what_is_no_log(tmp_path):
    bags = made()
    with pytest.raises(CheckpointError, match="Is the path right"):
        shoal.load(tmp_path / "nothing", bags)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ShoalError):
        shoal.ChangeLog(tmp_path / "file")
    assert _native.file_size(str(Path(tmp_path / "file"))) == 1
