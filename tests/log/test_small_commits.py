"""Commits say what changed since the one before; readers, compactions and repairs know all the same."""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forged import Forged, content_of, payload_of
from support.logged import assert_rows, made, recovered, rows_of, train
from support.sweeps import examples

import shoal
from shoal.errors import CheckpointError, ConfigError, StorageError
from shoal.log import RepairWarning
from shoal.log.commit import TableCommit, id_of
from shoal.log.files import Files
from shoal.log.inherited import Inherited, said_in
from shoal.log.manifest import read_manifest
from shoal.log.segment import digest_of, header_of
from shoal.log.verify import verify
from shoal.records.frames import FrameHeader, Kind, encode_commit


def bytes_of(path):
    return sum(one.stat().st_size for one in (path / "segments").iterdir())


@pytest.mark.parametrize("tables", [1, 26])
@pytest.mark.parametrize("dim", [4, 16])
@pytest.mark.parametrize("change", ["put", "erase"])
def test_a_commit_of_one_row_takes_less_than_a_kilobyte(tmp_path, tables, dim, change):
    bags = shoal.EmbeddingBagCollection([shoal.Table(f"table_{number}", dim) for number in range(tables)])
    table = bags.table("table_0")
    with shoal.ChangeLog(tmp_path / "log") as log:
        for version in range(8):
            table.assign([version], torch.randn(1, dim)) if change == "put" else table.erase([version])
            if version < 2:
                table.assign(range(100), torch.randn(100, dim))
            torch.manual_seed(0)
            before = bytes_of(tmp_path / "log")
            log.commit(bags, step=10**6 + version)
            if version > 1:
                assert bytes_of(tmp_path / "log") - before < 1024


def test_a_step_of_many_tables_takes_a_few_bytes_for_each(tmp_path):
    """Of tables that had no rows in it, too, whose steps are counted."""
    names = [f"table_{number}" for number in range(26)]
    bags = shoal.EmbeddingBagCollection([shoal.Table(name, 4) for name in names])
    lengths = torch.zeros(26, dtype=torch.int64)
    lengths[0] = 1
    with shoal.ChangeLog(tmp_path / "log", rng=False) as log:
        for _ in range(4):
            before = bytes_of(tmp_path / "log") if log.version else 0
            bags(shoal.KeyedJaggedTensor(names, torch.tensor([7]), lengths=lengths)).values().sum().backward()
            log.commit(bags)
        assert bytes_of(tmp_path / "log") - before < 1024 + 26 * 40
        assert {one.step for one in log.newest.tables.values()} == {4}


def written(path, **options):
    """A log of all that a commit can be; what its writer said of each version, and the rows at it."""
    first, second, model = made(), shoal.EmbeddingBagCollection([shoal.Table("late", 2)], seed=1), torch.nn.Linear(2, 2)
    said, rows = {}, {}

    def look(log):
        said[log.version] = log.newest
        rows[log.version] = rows_of(first)

    with shoal.ChangeLog(path, **options) as log:
        for version in range(1, 13):
            train(first, [version], keys=40)
            if version % 4 == 0:
                torch.rand(1)
            if version == 5:
                first.optimizer.param_groups[0]["lr"] = 0.5
            if version == 2:
                second.table("late").assign([1], torch.ones(1, 2))
            log.commit(
                second if version == 2 else first,
                dense=model if version in (2, 6) else None,
                step=version if version % 2 else None,
                event_time=float(version) if version == 3 else None,
                metadata={"version": version} if version == 3 else None,
            )
            if version == 6:
                log.compact()
            look(log)
    with shoal.ChangeLog(path, **options) as log:
        shoal.recover(path, [first, second])
        log.commit(first)
        look(log)
        log.rollback(9, first)
        look(log)
    return first, said, rows


def assert_says(found, said):
    """What a reader finds is what its writer said."""
    assert found == replace(said, dense=found.dense) and found.mark == said.mark
    assert found.dense == said.dense


@pytest.mark.parametrize("segment", ["1MiB", 4000, 1])
def test_readers_know_all_that_the_writer_said_wherever_they_begin(tmp_path, segment):
    _, said, rows = written(tmp_path / "log", segment=segment)
    with shoal.open_log(tmp_path / "log") as log:
        assert log.verify().is_sound
        assert_says(log.newest, said[14])
        for one in log.tail():
            assert_says(one.commit, said[one.version])
        for since in range(14):
            assert [one.commit for one in log.tail(since)] == [said[number] for number in range(since + 1, 15)]
            assert_says(log.at(since + 1).commit, said[since + 1]) if since != 5 else None
        snapshot = log.at(6).commit  # which says nothing of puts
        assert {name: replace(one, puts=0, deletes=0, replaces=False) for name, one in said[6].tables.items()} == dict(
            snapshot.tables
        )
        assert (snapshot.rng, snapshot.dense, snapshot.mark) == (said[6].rng, said[6].dense, said[6].mark)
    for version in (3, 6, 8, 11, 14):
        again = made()
        torch.manual_seed(0)
        assert shoal.recover(tmp_path / "log", again, version=version).tables.keys() == said[version].tables.keys()
        assert_rows(again, rows[version])
        assert bytes(torch.get_rng_state().numpy().tobytes()) == said[version].rng["cpu"]


def frames_of(path):
    """The frames of a segment, as offsets and headers."""
    content, found, at = path.read_bytes(), [], 64
    while at < len(content):
        header = FrameHeader.unpack(content[at : at + 64], "test")
        found.append((at, header))
        at += header.frame_bytes
    return found


def damage(path, version, kind=Kind.COMMIT):
    """One byte of a frame's payload."""
    for segment in (path / "segments").iterdir():
        for at, header in frames_of(segment):
            if (header.version, header.kind) == (version, kind):
                content = bytearray(segment.read_bytes())
                content[at + 64 + 10] ^= 1
                segment.write_bytes(content)
                return
    raise AssertionError(version)


@pytest.mark.parametrize("damaged", [(3,), (6,), (1, 3)], ids=str)
def test_a_repair_keeps_what_a_snapshot_and_later_commits_say(tmp_path, damaged):
    """All stand in one segment: what is left of it begins with a commit that does not say all."""
    path = tmp_path / "log"
    bags, said, rows = written(path)
    for version in damaged:
        damage(path, version)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert_says(log.newest, said[14])
        assert log.verify().is_sound
        (segment,) = [one for one in (path / "segments").iterdir() if one.stat().st_size > 64]
        assert [header.kind for _, header in frames_of(segment)].count(Kind.BASE) == 1
        for since in range(6, 14):
            assert [one.commit for one in log.tail(since)] == [said[number] for number in range(since + 1, 15)]
        shoal.recover(path, bags)
        train(bags, [20], keys=40)
        log.commit(bags)
    again = made()
    shoal.recover(path, again, version=8)
    assert_rows(again, rows[8])
    # The snapshot goes, from which the segment goes on.
    shutil.copytree(path, tmp_path / "copy")
    with shoal.ChangeLog(tmp_path / "copy", retain=1) as log:
        log.compact()
        assert [one.commit for one in log.tail(12)][:2] == [said[13], said[14]]
        assert log.verify().is_sound
    # Another repair comes.
    damage(path, 15)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert_says(log.newest, said[14])
        assert [one.commit for one in log.tail(6)] == [said[number] for number in range(7, 15)]
        assert log.verify().is_sound
        shoal.recover(path, bags)
        train(bags, [21], keys=40)
        assert log.commit(bags) == 16
    again, _ = recovered(path)
    assert_rows(again, rows_of(bags))


def test_a_repair_goes_on_from_a_commit_that_holds_all_rows(tmp_path):
    """It says all, too, though the commits before it are lost."""
    path, bags = tmp_path / "log", made()
    with shoal.ChangeLog(path) as log:
        for version in range(1, 4):
            train(bags, [version], keys=40)
            log.commit(bags)
        shoal.recover(path, bags, version=2)
        for version in range(4, 7):
            train(bags, [version], keys=40)
            log.commit(bags, step=version)
        newest = log.newest
    damage(path, 2)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert_says(log.newest, newest)
        assert log.verify().is_sound
    again, _ = recovered(path)
    assert_rows(again, rows_of(bags))


def test_a_damaged_base_is_found_and_repaired(tmp_path):
    path = tmp_path / "log"
    bags, said, _ = written(path)
    damage(path, 3)
    with pytest.warns(RepairWarning):
        shoal.ChangeLog(path, repair=True).close()
    damage(path, 6, Kind.BASE)
    assert any("base" in one for one in verify(Files(str(path))).problems)
    with pytest.raises(StorageError, match="base"):
        shoal.recover(path, bags)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert_says(log.newest, said[14])  # from the snapshot, which says the same
        assert log.verify().is_sound


LIES = {
    "the first": ({"whole": False}, 0),
    "no flag": ({"whole": 1}, 2),
    "too few states": ({"rng": {"cpu": 5}}, 2),
    "too many": ({"rng": {"cpu": 2**62}}, 2),
    "less than none": ({"rng": {"cpu": -1}}, 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_commits_that_say_what_cannot_be_are_refused(tmp_path, lie):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 2)])
    with shoal.ChangeLog(tmp_path / "log") as log:
        for version in range(4):
            bags.table("t").assign([version], torch.ones(1, 2))
            log.commit(bags)
    fields, number = LIES[lie]

    def change(frames):
        at = [place for place, (header, _) in enumerate(frames) if header.kind is Kind.COMMIT][number]
        value, binary = content_of(frames[at][1])
        value["commit"].update(fields)
        return [*frames[:at], (frames[at][0], payload_of(value, binary)), *frames[at + 1 :]]

    Forged(tmp_path / "log").write_segment(change)
    for read in (lambda: shoal.recover(tmp_path / "log", bags), lambda: shoal.open_log(tmp_path / "log").newest):
        with pytest.raises(StorageError, match=f"version {number + 1}, offset"):
            read()
    assert not verify(Files(str(tmp_path / "log"))).is_sound


# ---- generators


def test_commits_of_many_tables_take_the_memory_of_what_they_say(tmp_path):
    """Of what commits did not change, there is one copy."""
    path, tables, versions = tmp_path / "log", 2000, 1000
    with shoal.ChangeLog(path, rng=False) as log:
        log.commit(shoal.EmbeddingBagCollection([shoal.Table("a", dim=4)], seed=0))
    said = {str(number): {"step": 0, "rows": 0} for number in range(tables)}
    content, before = header_of(read_manifest(Files(path)).identity, 1), None
    for version in range(1, versions + 1):
        chained = {"kept": 0, "epoch": 1, "writer": "0" * 16, "before": before, "whole": version == 1}
        commit = {"version": version, "time": 1.0, "tables": said, **chained}
        pieces = encode_commit({"commit": commit, "frames": digest_of([])}, version=version)
        content, before = content + b"".join(pieces), id_of(pieces[1])
        said = {str(version % 3): {"step": version, "rows": 0}}
    Path(Files(path).segment(1)).write_bytes(content)
    Path(Files(path).head).unlink()
    tracemalloc.start()
    try:
        commits = [one.commit for one in shoal.open_log(path).tail(since=0)]
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(content)
    assert [len(one.tables) for one in commits] == [tables] * versions
    for number in (1, 2, 500, versions - 1):
        steps = {name: one.step for name, one in commits[number].tables.items() if one.step}
        assert steps == {str(version % 3): version for version in range(max(1, number - 2), number + 1)}


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, 2)), max_size=12))
def test_what_commits_inherit_is_what_those_before_said(said):
    tables, wanted = {}, {}
    for version, puts in enumerate(said):
        new = {name: TableCommit(version, version, count) for name, count in puts.items()}
        wanted = {name: replace(one, puts=0) for name, one in wanted.items()} | new
        tables = Inherited(new, tables) if tables else new
        assert tables == wanted and wanted == tables and dict(tables) == wanted and len(tables) == len(wanted)
        assert all(tables[name] == one for name, one in wanted.items()) and "z" not in tables
        assert dict(said_in(tables)) == new


def test_states_of_generators_are_written_once_for_each_change(tmp_path):
    bags, states = shoal.EmbeddingBagCollection([shoal.Table("t", 2)]), {}
    with shoal.ChangeLog(tmp_path / "log", segment=20_000) as log:
        for version in range(1, 20):
            if version in (4, 5, 12):
                torch.rand(1)
            bags.table("t").assign([version], torch.ones(1, 2))
            before = bytes_of(tmp_path / "log")
            log.commit(bags)
            is_first = read_manifest(Files(str(tmp_path / "log"))).segments[-1] == version
            states[version] = torch.get_rng_state()
            grown = bytes_of(tmp_path / "log") - before
            assert (grown > 5000) == (version in (4, 5, 12) or is_first), version
        log.compact()
    for version in range(1, 20):
        torch.manual_seed(version)
        shoal.recover(tmp_path / "log", bags, version=version)
        assert torch.equal(torch.get_rng_state(), states[version])


def test_without_states_of_generators_recovering_leaves_them_as_they_are(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 2)])
    bags.table("t").assign([1], torch.ones(1, 2))
    is_on = {1: True, 2: False, 3: False, 4: True}
    for rng in is_on.values():
        with shoal.ChangeLog(tmp_path / "log", rng=rng) as log:
            log.commit(bags)
    shoal.save(tmp_path / "saved", bags, rng=False)
    for version, rng in is_on.items():
        torch.manual_seed(11)
        before = torch.get_rng_state()
        shoal.recover(tmp_path / "log", bags, version=version)
        assert torch.equal(torch.get_rng_state(), before) == (not rng)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    shoal.recover(tmp_path / "saved", bags)
    assert torch.equal(torch.get_rng_state(), before)
    shoal.load(tmp_path / "saved", bags)
    bags.table("t").assign([2], torch.ones(1, 2))
    with pytest.raises(CheckpointError, match="no states of torch's generators"):
        shoal.load(tmp_path / "saved", bags, rng=True)
    assert len(bags.table("t")) == 2
    for wrong in (1, "no", None):
        with pytest.raises(ConfigError, match="rng: wanted True or False"):
            shoal.ChangeLog(tmp_path / "other", rng=wrong)
