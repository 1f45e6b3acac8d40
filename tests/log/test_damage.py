"""Damaged logs: an error, or exactly what was committed; never wrong rows, never a crash."""

import json
import shutil
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forged import Forged
from support.limits import IS_SANITIZED, little_memory
from support.logged import assert_rows, made, rows_of, train
from support.sweeps import examples

import shoal
from shoal import _native
from shoal.errors import CheckpointError, NonFiniteWarning, ShoalError, StorageError
from shoal.log.files import Files, sealed_json
from shoal.log.opening import TornTailWarning
from shoal.log.reader import LogReader, SnapshotWarning
from shoal.log.verify import verify as verify_files
from shoal.records import join
from shoal.records.frames import Kind

# Their text is no format: only the locks on them count.
LOCKS = {"LOCK", "MANIFEST.lock", "COMPACT"}


class Made:
    """A log with a snapshot, several segments and dense weights; the rows and the weights of each of its versions."""

    newest = 7

    def __init__(self, folder):
        self.path = folder / "log"
        self.rows, self.dense = {}, {}
        bags, model = made(), torch.nn.Linear(4, 3)
        with shoal.ChangeLog(self.path, segment=30_000) as log:
            for version in range(1, self.newest + 1):
                train(bags, [version], keys=80)
                if version % 2:
                    torch.nn.init.normal_(model.weight)
                log.commit(bags, dense=model if version % 2 else None)
                self.rows[version] = rows_of(bags)
                self.dense[version] = {name: value.clone() for name, value in model.state_dict().items()}
                if version == 3:
                    log.compact()
        self.files = sorted(
            str(path.relative_to(self.path))
            for path in self.path.rglob("*")
            if path.is_file() and path.name not in LOCKS
        )
        self.last_segment = max(name for name in self.files if name.startswith("segments"))

    def assert_is(self, bags, model, version):
        """Both are those of a version, bit for bit."""
        assert_rows(bags, self.rows[version])
        self.assert_dense(model.state_dict(), version)

    def assert_dense(self, found, version):
        assert found.keys() == self.dense[version].keys()
        assert all(torch.equal(value, found[name]) for name, value in self.dense[version].items()), version


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


def recover(log, path):
    bags, model = made(), torch.nn.Linear(4, 3)
    assert shoal.recover(path, bags, dense=model).version == log.newest
    log.assert_is(bags, model, log.newest)


def load(log, path, version):
    bags, model = made(), torch.nn.Linear(4, 3)
    assert shoal.load(path, bags, dense=model, version=version).version == version
    log.assert_is(bags, model, version)


def at(log, path, version):
    found = LogReader(Files(str(path))).at(version)
    log.assert_dense(found.dense()["model"], version)
    for name in found.layouts:
        rows = join(list(found.rows(name)))
        rows = rows.some(torch.argsort(rows.keys))
        wanted = {
            key.partition(f".{name}.")[2]: value for key, value in log.rows[version].items() if f".{name}." in key
        }
        assert torch.equal(rows.keys, wanted.pop("weight_id")[:, 0])
        assert torch.equal(rows.weights, wanted.pop("weight"))
        assert torch.equal(rows.scores, wanted.pop("score"))
        assert found.commit.tables[name].step == int(wanted.pop("step"))
        assert {f"state.{column}" for column in rows.state} == set(wanted)
        assert all(torch.equal(value, wanted[f"state.{column}"]) for column, value in rows.state.items())


def reopen(log, path):
    """Open it for writing, and commit to it."""
    with shoal.ChangeLog(path) as opened:
        assert opened.version == log.newest
        bags, model = made(), torch.nn.Linear(4, 3)
        assert shoal.recover(path, bags, dense=model).version == log.newest
        log.assert_is(bags, model, log.newest)
        train(bags, [50])
        opened.commit(bags)
        again = made()
        shoal.recover(path, again, dense=model)
        assert_rows(again, rows_of(bags))
        log.assert_dense(model.state_dict(), log.newest)


# Each gives exactly what was committed, or a ShoalError.
READS = (recover, partial(load, version=3), partial(load, version=5), partial(at, version=3), partial(at, version=6))


def succeeds(read, log, path):
    with warnings.catch_warnings(), little_memory():
        warnings.simplefilter("ignore", TornTailWarning)
        warnings.simplefilter("ignore", SnapshotWarning)
        try:
            read(log, path)
        except ShoalError:
            return False
    return True


def test_reads_of_a_sound_log_give_what_was_committed(log, tmp_path):
    shutil.copytree(log.path, tmp_path / "copy")
    assert verify_files(Files(str(tmp_path / "copy"))).is_sound
    for read in (*READS, reopen):
        assert succeeds(read, log, tmp_path / "copy")


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_noticed(log, tmp_path, data):
    """Damage is found by the calls that read it, or by none of them: then all they return is right. `verify` finds it
    in any case."""
    path = tmp_path / "copy"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(log.path, path)
    name = data.draw(st.sampled_from(log.files))
    before = (path / name).read_bytes()
    content = bytearray(before)
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
    (path / name).unlink()
    if kind != "gone":
        (path / name).write_bytes(content)
    with little_memory():
        is_sound = verify_files(Files(str(path))).is_sound
    # After the last commit another one may be being written.
    assert is_sound == (kind != "gone" and (content == before or (name == log.last_segment and kind == "grow")))
    read = [succeeds(one, log, path) for one in READS]
    assert all(read) or not is_sound
    # The next writer makes another head, and cuts off the bytes after the last commit.
    is_opened = succeeds(reopen, log, path)
    assert is_opened or not is_sound
    if name == "HEAD":
        assert all(read)
        assert is_opened
        assert verify_files(Files(str(path))).is_sound


def test_checksums_that_are_written_anew_are_right(log, tmp_path):
    shutil.copytree(log.path, tmp_path / "copy")
    forged = Forged(tmp_path / "copy")
    forged.write_snapshot(lambda _value: None)
    forged.write_dense(sorted((tmp_path / "copy" / "dense").iterdir())[-1].read_bytes())
    for read in (*READS, reopen):
        assert succeeds(read, log, tmp_path / "copy")
    if IS_SANITIZED:
        return
    with little_memory(), pytest.raises(MemoryError):
        bytearray(1 << 30)


MUCH = 1 << 40
LIES = {
    "a manifest's dim": lambda log: log.set_layouts(dim=2**20),
    "a manifest's columns": lambda log: log.set_layouts(columns=[{"name": "x", "width": 2**30, "initial": 0.0}]),
    "a manifest's buckets": lambda log: log.set_layouts(buckets=MUCH),
    "a block's bytes": lambda log: log.set_blocks(1, MUCH),
    "a block's rows": lambda log: log.set_blocks(3, MUCH),
    "a block's buckets": lambda log: log.set_blocks(5, MUCH),
    "a file's bytes": lambda log: log.write_snapshot(
        lambda value: [one.update(bytes=MUCH) for one in value["tables"].values()]
    ),
    "a snapshot's rows": lambda log: log.write_snapshot(
        lambda value: [one.update(rows=MUCH) for one in value["commit"]["tables"].values()]
    ),
    "a commit's rows": lambda log: log.set_tables(rows=MUCH, puts=MUCH, deletes=MUCH),
    "a commit's dense file": lambda log: log.write_commit(lambda commit: commit["dense"].update(bytes=MUCH)),
    "a frame's payload": lambda log: log.set_headers(payload_bytes=MUCH),
    "a frame's rows": lambda log: log.set_headers(rows=100, payload_bytes=MUCH),
    "a dense file's header": lambda log: log.write_dense((2**33).to_bytes(8, "little") + b"{}" * 50),
    "a tensor's shape": lambda log: log.write_dense(
        (96).to_bytes(8, "little")
        + json.dumps({"x": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 4]}}).encode().ljust(96)
        + bytes(4)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_files_claim_takes_no_memory(log, tmp_path, lie):
    """Numbers that say there is much, under checksums that are right, in files that have little."""
    shutil.copytree(log.path, tmp_path / "copy")
    LIES[lie](Forged(tmp_path / "copy"))
    for read in (lambda _log, path: verify_files(Files(str(path))), *READS, reopen):
        with suppress(AssertionError):  # a file with the right checksums may say anything
            succeeds(read, log, tmp_path / "copy")


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_that_were_forged_take_no_memory(log, tmp_path, data):
    """Arrow's messages with other bytes under checksums that are right: rows, or an error."""
    path = tmp_path / "copy"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(log.path, path)

    def change(frames):
        rows = [number for number, (header, _) in enumerate(frames) if header.kind is not Kind.COMMIT]
        number = data.draw(st.sampled_from(rows))
        header, payload = frames[number]
        at = data.draw(st.integers(0, min(len(payload), 1500) - 1))  # where the messages are
        noise = data.draw(st.sampled_from([1, 4, 8]).flatmap(lambda size: st.binary(min_size=size, max_size=size)))
        payload = (payload[:at] + noise + payload[at + len(noise) :])[: header.payload_bytes]
        return [*frames[:number], (header, payload), *frames[number + 1 :]]

    Forged(path).write_segment(change)
    for read in (lambda _log, path: verify_files(Files(str(path))), recover, partial(at, version=6)):
        with suppress(AssertionError), warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # weights may be any bytes
            succeeds(read, log, path)


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
    with shoal.ChangeLog(path, segment=1500, rng=False) as log:  # states of generators are most of a small log
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
    monkeypatch.setattr("shoal.log.verify._BETWEEN_S", 0.0)  # no process writes the head in this test
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
    """The same schema in the bytes of another encoder: here with eight more before the message's first table."""
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


@pytest.mark.timeout(600)
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
    manifest.write_bytes(sealed_json(value | {"version": 3}))
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
    with suppress(ShoalError, SnapshotWarning):  # or it is not asked
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


def test_damaged_dense_weights_leave_the_rows_and_older_versions(log, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(log.path, path)
    damaged = sorted((path / "dense").iterdir())[-1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StorageError, match=r"recover an older version \(version=\), or leave dense="):
        recover(log, path)
    load(log, path, log.newest - 2)
    bags = made()
    shoal.recover(path, bags)
    assert_rows(bags, log.rows[log.newest])
