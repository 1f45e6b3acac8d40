"""Logs that somebody damaged: an error, or exactly what was committed; never wrong rows, never a crash."""

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged import assert_rows, made, rows_of, train
from sweeps import examples

import shoal
from shoal import _native
from shoal.errors import CheckpointError, ShoalError, StorageError
from shoal.log import changelog
from shoal.log.files import Files, sealed_json
from shoal.log.verify import verify as verify_files

# Their text is no format: what counts is who has them locked.
LOCKS = {"LOCK", "MANIFEST.lock", "COMPACT"}


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
            if path.is_file() and path.name not in LOCKS
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
    verify_files(Files(str(path)))


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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A log of few bytes with a file of each kind, deletes, several segments, and a snapshot of an empty table."""
    path = tmp_path_factory.mktemp("small") / "log"
    bags = shoal.EmbeddingBagCollection(
        [
            shoal.Table("a", 3, optimizer=shoal.RowwiseAdagrad(), dtype="bfloat16"),
            shoal.Table("b", 2, optimizer=shoal.SGD()),
        ]
    )
    with pytest.MonkeyPatch.context() as patch, shoal.ChangeLog(path, segment=2500) as log:
        patch.setattr(changelog, "random_states", dict)  # most of a small commit
        for version in range(1, 5):
            bags.table("a").assign(range(version, version + 5), torch.randn(5, 3))
            if version > 2:
                bags.table("a").erase([version])
                bags.table("b").assign([version], torch.randn(1, 2))
            log.commit(bags, dense=torch.nn.Linear(1, 1) if version % 2 else None)
            if version == 2:
                log.compact()
    assert verify_files(Files(str(path))).is_sound
    return path


def contents(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name not in LOCKS}


def test_a_small_log_has_files_of_each_kind(small):
    assert {file.suffix or file.name for file in contents(small)} == {
        ".arrow", ".json", ".safetensors", ".seg", "HEAD"
    }  # fmt: skip
    assert len(list((small / "segments").iterdir())) > 1


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_no_byte_can_change_without_notice(small, tmp_path, every, monkeypatch):
    """None of them, in no file that is part of the log."""
    monkeypatch.setattr("shoal.log.verify._BETWEEN_S", 0.0)  # nobody writes the head meanwhile
    shutil.copytree(small, tmp_path / "copy")
    missed = []
    for file, content in contents(tmp_path / "copy").items():
        is_bare = file.name == "HEAD" or file.suffix == ".arrow"  # has bytes without checksums
        for at in range(len(content)):
            often = min(every, 3 if file.suffix == ".arrow" else 1 if is_bare else 7 if not content[at] else every)
            if at % often and at < len(content) - 10:
                continue
            for bit in range(8) if every == 1 and is_bare else [(at * 5 + at // 8) % 8]:
                changed = bytearray(content)
                changed[at] ^= 1 << bit
                file.write_bytes(changed)
                if verify_files(Files(str(tmp_path / "copy"))).is_sound:
                    missed.append((file.name, at, bit))
        file.write_bytes(content)
    assert not missed
    assert verify_files(Files(str(tmp_path / "copy"))).is_sound


def test_no_file_can_be_gone_cut_or_grow_without_notice(small, tmp_path):
    shutil.copytree(small, tmp_path / "copy")
    files = contents(tmp_path / "copy")
    last_segment = max(file for file in files if file.suffix == ".seg")
    for file, content in files.items():
        for changed in (None, b"", content[:-1], content[: len(content) // 2], content + b"\n", content + bytes(64)):
            if file == last_segment and changed is not None and len(changed) > len(content):
                continue  # there a commit is being written, or was when its writer died
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
            report = verify_files(Files(str(tmp_path / "copy")))
            assert not report.is_sound, (file.name, changed and len(changed), len(content))
            if file.name == "HEAD":
                assert "HEAD" in report.problems[0]
                assert "Opening the log for writing" in report.problems[0]
            file.write_bytes(content)
    (tmp_path / "copy" / "HEAD").unlink()
    with shoal.ChangeLog(tmp_path / "copy") as log:  # as the report said
        assert log.verify().is_sound


def test_a_head_that_promises_more_than_there_is(small, tmp_path):
    shutil.copytree(small, tmp_path / "copy")
    bags = shoal.EmbeddingBagCollection([shoal.Table("new", 2)])
    before = contents(tmp_path / "copy")
    with shoal.ChangeLog(tmp_path / "copy") as log:
        log.commit(bags)
    for file in contents(tmp_path / "copy"):
        if file.name != "HEAD":
            file.write_bytes(before[file]) if file in before else file.unlink()
    report = verify_files(Files(str(tmp_path / "copy")))
    assert "version 5" in report.problems[0]
    assert "on the disk" in report.problems[0]


def test_a_schema_that_another_arrow_wrote_is_sound(small, tmp_path, monkeypatch):
    """The same schema, in the bytes of another encoder: here with another order of the schema's and a field's parts."""
    from shoal.log import verify as module

    seen = []

    def encoded(where, data, wanted):
        seen.append(where)
        real(where, moved(data), wanted)

    def moved(data):
        # The message 8 bytes further on: its first word says where it begins.
        size, root = (int.from_bytes(data[at : at + 4], "little") for at in (4, 8))
        return data[:4] + (size + 8).to_bytes(4, "little") + (root + 8).to_bytes(4, "little") + bytes(8) + data[12:]

    real = module._check_schema
    monkeypatch.setattr(module, "_check_schema", encoded)
    assert verify_files(Files(str(small))).is_sound
    assert len(seen) == 2


@pytest.mark.timeout(120)
def test_a_log_is_sound_while_it_is_written_and_compacted(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
    done, problems, looks = Event(), [], 0
    with shoal.ChangeLog(tmp_path / "log", segment=20_000, retain=1, fsync="never") as log:

        def look():
            nonlocal looks
            while not done.is_set():
                problems.extend(verify_files(Files(str(tmp_path / "log"))).problems)
                looks += 1

        reader = Thread(target=look)
        reader.start()
        try:
            for version in range(60):
                bags.table("t").assign(range(version, version + 50), torch.randn(50, 4))
                log.commit(bags, dense=torch.nn.Linear(2, 2))
                log.sync()  # writes the head
                if version % 10 == 9:
                    log.compact()
        finally:
            done.set()
            reader.join()
    assert not problems
    assert looks > 3


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
