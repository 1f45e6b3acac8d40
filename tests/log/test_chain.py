"""Commits that do not follow one another: of two writers, of another copy, written over, or played again."""

import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forged import Forged, content_of, payload_of
from support.logged import assert_rows, made, recovered, rows_of, train
from support.sweeps import examples

import shoal
from shoal.errors import CheckpointError, InputError, ShoalError, StorageError
from shoal.log import DivergedError, RepairWarning
from shoal.log.files import Files
from shoal.log.manifest import read_manifest
from shoal.log.reader import LogReader
from shoal.log.segment import header_of
from shoal.log.summary import summarize
from shoal.log.verify import verify
from shoal.records.frames import Kind

FIXTURES = Path(__file__).parent / "fixtures"


def commits_of(path, after=0):
    return [one.commit for one in LogReader(Files(str(path))).commits(after)]


def one_table(values=()):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 1, optimizer=None)], seed=0)
    for key, value in values:
        put(bags, key, value)
    return bags


def put(bags, key, value):
    bags.table("t").assign([key], torch.full((1, 1), float(value)))


def grown(path, versions, **options):
    """A log of so many versions; version v puts the value v at key v."""
    bags = one_table()
    with shoal.ChangeLog(path, **options) as log:
        for version in range(1, versions + 1):
            put(bags, version, version)
            log.commit(bags)
    return bags


def parted(path, other, keys, after=lambda _log, _key: None, **options):
    """Copies a log to `other` and continues both: the log puts the value 7 at each of the keys, the other one 8.
    `after` is called after each commit."""
    shutil.copytree(path, other)
    for one, value in ((path, 7), (other, 8)):
        bags = one_table()
        with shoal.ChangeLog(one, **options) as log:
            shoal.recover(one, bags)
            for key in keys:
                put(bags, key, value)
                log.commit(bags)
                after(log, key)


def test_each_commit_names_the_one_before_it(tmp_path):
    path, bags = tmp_path / "log", made()
    for step in range(3):
        with shoal.ChangeLog(path, segment=20_000) as log:
            shoal.recover(path, bags)
            for _ in range(3):
                train(bags, [step], keys=50)
                log.commit(bags)
    found = commits_of(path)
    assert [one.version for one in found] == list(range(1, 10))
    assert [one.before for one in found] == [None, *(one.id for one in found[:-1])]
    assert [one.epoch for one in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len({one.id for one in found}) == 9 and len({one.writer for one in found}) == 3
    assert read_manifest(Files(str(path))).epoch == 3


def test_the_chain_holds_over_compaction_save_rollback_and_repair(tmp_path):
    path, bags = tmp_path / "log", made()
    ids = {}

    def look(log):
        ids[log.version] = log.newest.id
        assert log.verify().is_sound

    with shoal.ChangeLog(path, retain=1, segment=1) as log:
        for version in range(1, 4):
            train(bags, [version], keys=50)
            log.commit(bags)
            look(log)
        log.compact()
        assert shoal.open_log(path).newest.id == ids[3]
        train(bags, [4], keys=50)
        log.commit(bags)
        assert log.newest.before == ids[3]
        look(log)
        log.rollback(3, bags)
        assert log.newest.before == ids[4]
        look(log)
        log.rewrite(bags)
        assert log.newest.before == ids[5] and len(log.newest.id) == 32
        look(log)
        train(bags, [6], keys=50)
        log.commit(bags)
        assert log.newest.before == ids[6]
        look(log)
    assert shoal.open_log(path).newest.id == ids[7]
    with shoal.ChangeLog(path) as log:
        assert log.newest.id == ids[7]
    last = sorted((path / "segments").iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert (log.version, log.newest.id) == (6, ids[6])
        shoal.recover(path, bags)
        train(bags, [8], keys=50)
        assert log.commit(bags) == 8  # version 7 was taken out
        assert log.newest.before == ids[6]
        assert log.verify().is_sound
    again, commit = recovered(path)
    assert commit.before == ids[6]
    assert_rows(again, rows_of(bags))


def test_a_log_and_its_copy_are_told_apart_while_the_clock_stands(tmp_path, monkeypatch):
    bags = one_table((key, 0) for key in range(6))
    with shoal.ChangeLog(tmp_path / "p") as log:
        log.commit(bags)
    shutil.copytree(tmp_path / "p", tmp_path / "q")
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    with shoal.ChangeLog(tmp_path / "p") as p, shoal.ChangeLog(tmp_path / "q") as q:
        for number, log in enumerate((p, q, p, q, q, p, q)):
            put(bags, number, number + 1)
            log.commit(bags)
            again = one_table()
            shoal.recover(tmp_path / ("p" if log is p else "q"), again)
            assert_rows(again, rows_of(bags))
        # The same change, in both.
        for log in (p, q):
            log.commit(bags)
        assert p.newest.id != q.newest.id


# ---- who follows


def lost(path, monkeypatch):
    """A log of three versions, of which a power cut takes the last; as it was before and is after."""
    bags = one_table()
    log = shoal.ChangeLog(path, fsync="never")
    for version in (1, 2):
        put(bags, version, version)
        log.commit(bags)
    log.sync()
    disk = path.with_name("disk")
    shutil.copytree(path, disk)
    put(bags, 3, 3)
    log.commit(bags)
    yield
    del log
    for name in ("segments", "HEAD", "MANIFEST.json"):
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if (disk / name).is_dir() else shutil.copy)(disk / name, target)
    yield
    bags = one_table()
    with shoal.ChangeLog(path) as log:
        shoal.recover(path, bags)
        for value in (30, 40):
            put(bags, value, value)
            log.commit(bags)
    yield


@pytest.mark.parametrize("when", ["at once", "after the next commits"])
@pytest.mark.parametrize("by", ["mark", "version", "following"])
def test_who_follows_hears_that_a_power_cut_took_what_was_read(tmp_path, monkeypatch, when, by):
    path = tmp_path / "log"
    story = lost(path, monkeypatch)
    next(story)
    reader = shoal.open_log(path)
    if by == "following":
        tail = reader.tail()
        seen = [next(tail), next(tail), next(tail)]
    else:
        seen = list(reader.tail())
    assert [one.version for one in seen] == [1, 2, 3]
    next(story)
    if when != "at once":
        next(story)
    if by == "following":  # what it began to read it reads to its end
        assert list(tail) == []
    since = seen[-1].mark if by == "mark" else 3
    reader = shoal.open_log(path) if by == "mark" else reader
    with pytest.raises(DivergedError, match=r"version 3 .*Begin again with at\(version\)"):
        list(reader.tail(since))
    # As the error says.
    assert reader.at(reader.version).commit.version == (2 if when == "at once" else 4)
    assert list(reader.tail(reader.version)) == []


def test_who_follows_hears_that_another_copy_is_there(tmp_path):
    grown(tmp_path / "x", 3)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    for name, value in (("x", 7), ("y", 8)):
        with shoal.ChangeLog(tmp_path / name) as log:
            bags = one_table()
            shoal.recover(tmp_path / name, bags)
            for _ in range(2):
                put(bags, 9, value)
                log.commit(bags)
    x, y = shoal.open_log(tmp_path / "x"), shoal.open_log(tmp_path / "y")
    marks = {one.version: one.mark for one in x.tail()}
    for version in (3, 4, 5):
        assert [one.version for one in x.tail(marks[version])] == list(range(version + 1, 6))
    assert [one.version for one in y.tail(marks[3])] == [4, 5]
    for version in (4, 5):
        with pytest.raises(DivergedError, match=f"version {version}"):
            list(y.tail(marks[version]))
    # Where a save has taken the commit itself away, the next one names it.
    with shoal.ChangeLog(tmp_path / "y") as log:
        shoal.recover(tmp_path / "y", bags)
        log.rewrite(bags)
        there = log.newest.mark
        log.commit(bags)
    assert [one.version for one in y.tail(there)] == [7]
    with pytest.raises(DivergedError, match="version 7 goes on from"):
        list(y.tail((6, "0" * 32)))
    with pytest.raises(CheckpointError, match="in a snapshot alone"):
        list(y.tail(marks[5]))
    for wrong in ((1,), (1, 2), ("1", "a"), 1.5, "x"):
        with pytest.raises(InputError if isinstance(wrong, tuple) and len(wrong) != 2 else ShoalError):
            list(y.tail(wrong))


def test_who_follows_over_rotations_and_compactions_goes_on(tmp_path):
    bags = one_table()
    with shoal.ChangeLog(tmp_path / "log", segment=1, retain=1) as log:
        reader, mark, seen = shoal.open_log(tmp_path / "log"), (0, ""), []
        for version in range(1, 12):
            put(bags, version, version)
            log.commit(bags)
            for one in reader.tail(mark):
                mark = one.mark
                seen.append(one.version)
            if version % 3 == 0:
                log.compact()
                assert list(reader.tail(mark)) == []
    assert seen == list(range(1, 12))


# ---- commits that were put there


def read_everything(path, versions):
    """Each reader, and what it comes to."""
    files = Files(str(path))

    def opened():
        shoal.ChangeLog(path).close()

    def at():
        with shoal.open_log(path) as log:
            log.at(versions)

    def tail():
        with shoal.open_log(path) as log:
            list(log.tail())

    readers = {
        "recover": lambda: shoal.recover(path, one_table()),
        "load": lambda: shoal.load(path, one_table()),
        "at": at,
        "tail": tail,
        "open": opened,
        "newest": lambda: LogReader(files).newest(),
        "inspect": lambda: _raise(summarize(files).damage),
        "verify": lambda: _raise(next(iter(verify(files).problems), None)),
    }
    for name, read in readers.items():
        with pytest.raises(StorageError, match=r"\.seg\] version \d+, offset \d+: .*(before|epoch)") as error:
            read()
        assert "shoal repair" in str(error.value), name


def _raise(problem):
    if problem is not None:
        raise StorageError(problem)


def commits_in(frames):
    return [number for number, (header, _) in enumerate(frames) if header.kind is Kind.COMMIT]


def said(frames, number, **fields):
    header, payload = frames[number]
    value, binary = content_of(payload)
    value["commit"].update(fields)
    return [*frames[:number], (header, payload_of(value, binary)), *frames[number + 1 :]]


@pytest.mark.parametrize(
    "fields", [{"before": "0" * 32}, {"before": None}, {"epoch": 1}], ids=["another", "none", "an older writer"]
)
def test_a_commit_that_does_not_follow_is_refused_by_every_reader(tmp_path, fields):
    path = tmp_path / "log"
    grown(path, 2)
    with shoal.ChangeLog(path) as log:
        bags = one_table()
        shoal.recover(path, bags)
        for version in (3, 4, 5):
            put(bags, version, version)
            log.commit(bags)
    # Version 4 is changed, and version 5 names it as it is now, unless it is the one that names nothing.
    Forged(path).write_segment(lambda frames: said(frames, commits_in(frames)[3], **fields))
    read_everything(path, 5)
    wanted = one_table((key, key) for key in (1, 2, 3))
    assert {key: float(one_row(path, key, 3)) for key in (1, 2, 3)} == {1: 1.0, 2: 2.0, 3: 3.0}
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        again = one_table()
        assert shoal.recover(path, again).version == 3
        assert_rows(again, rows_of(wanted))
        assert log.commit(again) == 6 and log.verify().is_sound


def one_row(path, key, version):
    bags = one_table()
    shoal.load(path, bags, version=version)
    return bags.table("t").lookup([key])


def test_a_commit_of_another_copy_that_was_put_in_is_refused(tmp_path):
    path = tmp_path / "log"
    grown(path, 3)
    parted(path, tmp_path / "copy", (4, 5))
    mine, theirs = ((tmp_path / name / "segments" / f"{1:020}.seg").read_bytes() for name in ("log", "copy"))
    assert len(mine) == len(theirs)
    places = {one.version: one.whole for one in LogReader(Files(str(path))).commits()}
    begin, end = places[5].begin, places[5].end
    (path / "segments" / f"{1:020}.seg").write_bytes(mine[:begin] + theirs[begin:end])
    read_everything(path, 5)


def test_a_snapshot_of_another_history_is_refused(tmp_path):
    """A log with a snapshot that was not made of its commits: a repair keeps the commits."""
    path = tmp_path / "log"
    grown(path, 3)
    parted(path, tmp_path / "copy", (4, 5, 6), lambda log, key: log.compact() if key == 5 else None)
    for name in ("MANIFEST.json", "snapshots"):
        source, target = tmp_path / "copy" / name, path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    report = verify(Files(str(path)))
    assert any("version 5" in one and "snapshot" in one for one in report.problems), report.problems
    with pytest.raises(StorageError, match="version 5, offset"):
        shoal.recover(path, one_table())
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert log.verify().is_sound
        again = one_table()
        shoal.recover(path, again)
        assert float(again.table("t").lookup([6])) == 7.0 and float(again.table("t").lookup([5])) == 7.0


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_order_of_whole_commits_is_the_log_or_refused(tmp_path, data):
    """Commits of two histories of one log, whole and with checksums that are right, in any order: a reader sees the
    beginning of one history, or an error."""
    base = tmp_path / "base"
    if not base.exists():
        grown(base, 2)
        parted(base, tmp_path / "other", (3, 4, 5), fsync="never")
    pieces, ids = [], []
    for name in ("base", "other"):
        content = (tmp_path / name / "segments" / f"{1:020}.seg").read_bytes()
        found = list(LogReader(Files(str(tmp_path / name))).commits())
        pieces += [content[one.whole.begin : one.whole.end] for one in found]
        ids.append([one.commit.id for one in found])
    path = tmp_path / "copy"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    (path / "HEAD").unlink()
    order = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=6))
    (path / "segments" / f"{1:020}.seg").write_bytes(content[:64] + b"".join(pieces[one] for one in order))
    seen = []
    try:
        with shoal.open_log(path) as log:
            seen += [one.commit.id for one in log.tail()]
            is_refused = False
    except ShoalError:
        is_refused = True
    assert seen in (ids[0][: len(seen)], ids[1][: len(seen)])
    assert is_refused or len(seen) == len(order)
    assert verify(Files(str(path))).is_sound <= (not is_refused)


# ---- formats


def test_a_log_of_format_1_goes_on_in_format_2(tmp_path):
    path = tmp_path / "log"
    shutil.copytree(FIXTURES / "v1" / "log", path)
    files = Files(str(path))
    manifest = (path / "MANIFEST.json").read_bytes()
    bags = made()
    assert shoal.recover(path, bags).epoch == 0
    with shoal.ChangeLog(path) as log:
        mark = log.newest.mark
        assert log.verify().is_sound
    assert (path / "MANIFEST.json").read_bytes() == manifest  # opened for nothing
    with shoal.ChangeLog(path) as log:
        train(bags, [1])
        log.commit(bags)
        assert not log.newest.tables["a"].replaces  # it was recovered from the same commit
        assert (log.newest.epoch, log.newest.before) == (1, mark[1])
        assert Forged(path).manifest["version"] == 2
        assert [one.version for one in log.tail(mark)] == [6]
        log.compact()
        assert log.verify().is_sound
        train(bags, [2])
        log.commit(bags)
    again, commit = recovered(path)
    assert commit.version == 7
    assert_rows(again, rows_of(bags))
    assert verify(files).is_sound


def test_a_snapshot_of_format_1_that_no_segment_tells_the_id_of(tmp_path):
    path = tmp_path / "log"
    shutil.copytree(FIXTURES / "v1" / "log", path)
    forged = Forged(path)
    for first in (1, 2, 3, 4, 5):
        (path / "segments" / f"{first:020}.seg").unlink()
    forged.manifest.update(segments=[4])
    (path / "segments" / f"{4:020}.seg").write_bytes(header_of(forged.manifest["id"], 4))
    (path / "HEAD").unlink()
    forged.write_manifest()
    bags = made()
    with shoal.ChangeLog(path) as log:
        commit = shoal.recover(path, bags)
        assert (commit.version, commit.id) == (3, "")
        train(bags, [1])
        log.commit(bags)
        assert log.newest.before is None and not log.newest.tables["a"].replaces
        assert [one.version for one in log.tail(commit.mark)] == [4]
        train(bags, [2])
        log.commit(bags)
        assert log.verify().is_sound
    again, _ = recovered(path)
    assert_rows(again, rows_of(bags))


@pytest.mark.parametrize("field", ["job", "positions"])
def test_fields_that_are_not_known_are_kept(tmp_path, field):
    path, value = tmp_path / "log", {"a": [1, {"b": None}]}
    grown(path, 3)
    Forged(path).write_commit(lambda commit: commit.update({field: value, "required": ["kept", "epoch"]}))
    bags = one_table()
    commit = shoal.recover(path, bags)
    assert commit.fields[field] == value
    with shoal.ChangeLog(path, segment=1, retain=1) as log:
        assert log.newest.fields[field] == value
        assert log.compact() == 3
        assert log.at(3).commit.fields[field] == value
        put(bags, 4, 4)
        log.commit(bags)
        assert field not in log.newest.fields
        log.rollback(3, bags)
        assert log.newest.fields[field] == value  # it is what version 3 says
        assert log.verify().is_sound
    last = sorted((path / "segments").iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RepairWarning)
        shoal.ChangeLog(path, repair=True).close()
    assert shoal.open_log(path).at(3).commit.fields[field] == value


def test_fields_of_the_manifest_that_are_not_known_are_kept(tmp_path):
    path, bags = tmp_path / "log", grown(tmp_path / "log", 3)
    with shoal.ChangeLog(path) as log:
        log.compact()
    forged = Forged(path)
    forged.write_snapshot(lambda value: value.update(positions=[1], required=["tables"]))
    forged.manifest.update(job={"a": [1, None]}, required=["epoch"])
    forged.manifest["snapshots"][0].update(part=7, required=["crc32c"])
    forged.write_manifest()

    def found():
        manifest = Forged(path).manifest
        parts = [one.get("part") for one in manifest["snapshots"]]
        return manifest.get("job"), manifest.get("required"), parts

    kept = {"a": [1, None]}, ["epoch"]
    with shoal.ChangeLog(path, segment=1) as log:
        shoal.recover(path, bags)
        for version in (4, 5):  # another writer, and another segment
            put(bags, version, version)
            log.commit(bags)
            assert found() == (*kept, [7])
        log.compact()
        assert found() == (*kept, [7, None])
        assert log.verify().is_sound
    content = bytearray((path / "segments" / f"{5:020}.seg").read_bytes())
    content[70] ^= 1
    (path / "segments" / f"{5:020}.seg").write_bytes(content)
    with pytest.warns(RepairWarning):
        shoal.ChangeLog(path, repair=True).close()
    assert found()[:2] == kept
    shoal.save(path, bags)
    assert found() == (*kept, [None])


@pytest.mark.parametrize("where", ["manifest", "an item", "SNAPSHOT.json"])
def test_a_required_field_of_another_file_is_refused_by_name(tmp_path, where):
    path, bags = tmp_path / "log", grown(tmp_path / "log", 3)
    with shoal.ChangeLog(path) as log:
        log.compact()
    forged, unknown = Forged(path), {"positions": [1], "required": ["positions"]}
    if where == "SNAPSHOT.json":
        forged.write_snapshot(lambda value: value.update(unknown))
    else:
        (forged.manifest if where == "manifest" else forged.manifest["snapshots"][0]).update(unknown)
        forged.write_manifest()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    reads = {
        "recover": lambda: shoal.recover(path, bags),
        "load": lambda: shoal.load(path, bags),
        "at": lambda: shoal.open_log(path).at(3),
        "repair": lambda: shoal.ChangeLog(path, repair=True),
    }
    for read in reads.values():
        with pytest.raises(CheckpointError, match=r"needs a newer Shoal.*'positions'"):
            read()
    names = ("LOCK", "COMPACT", "MANIFEST.lock")
    assert {file: data for file, data in before.items() if file.name not in names} == {
        file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name not in names
    }


def test_a_required_field_that_is_not_known_is_refused_by_name_and_nothing_is_cut_off(tmp_path):
    path = tmp_path / "log"
    grown(path, 3)
    Forged(path).write_commit(lambda commit: commit.update(positions=[1], required=["kept", "positions"]))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for read in (
        lambda: shoal.recover(path, one_table()),
        lambda: shoal.load(path, one_table()),
        lambda: shoal.ChangeLog(path),
        lambda: shoal.ChangeLog(path, repair=True),
        lambda: list(shoal.open_log(path).tail()),
        lambda: summarize(Files(str(path))),
    ):
        with pytest.raises(CheckpointError, match=r"needs a newer Shoal.*'positions'"):
            read()
    (problem,) = verify(Files(str(path))).problems
    assert "needs a newer Shoal" in problem and "'positions'" in problem
    names = ("LOCK", "COMPACT", "MANIFEST.lock")
    assert {file: data for file, data in before.items() if file.name not in names} == {
        file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name not in names
    }
    assert shoal.load(path, one_table(), version=2).version == 2  # the ones before it can be read


@pytest.mark.parametrize(
    "fields",
    [
        {"before": 1},
        {"before": "0" * 31},
        {"before": "g" * 32},
        {"epoch": 0},
        {"epoch": -1},
        {"epoch": "1"},
        {"epoch": 2**64},
        {"writer": None},
        {"writer": "0" * 17},
        {"required": "kept"},
        {"required": [1]},
    ],
)
def test_chained_headers_that_are_no_such_are_refused(tmp_path, fields):
    path = tmp_path / "log"
    grown(path, 3)
    Forged(path).write_commit(lambda commit: commit.update(fields))
    for read in (lambda: verify(Files(str(path))), lambda: shoal.recover(path, one_table())):
        found = read()
        assert getattr(found, "version", 2) == 2  # what no writer has written is the half of a commit
    Forged(tmp_path / "log")
    with pytest.raises(StorageError):
        replaced(path, fields)


def replaced(path, fields):
    """The same in a commit that others come after."""
    shutil.rmtree(path)
    grown(path, 3)
    Forged(path).write_segment(lambda frames: said(frames, commits_in(frames)[1], **fields))
    shoal.recover(path, one_table())


def test_an_id_is_that_of_all_that_a_commit_says(tmp_path):
    grown(tmp_path / "log", 2)
    first, second = commits_of(tmp_path / "log")
    assert replace(second, id="").mark != second.mark != first.mark
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    Forged(tmp_path / "copy").write_commit(lambda commit: commit.update(time=1.5))
    other = commits_of(tmp_path / "copy")
    assert other[0].id == first.id and other[1].id != second.id
