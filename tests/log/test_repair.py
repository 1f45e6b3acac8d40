"""Logs with a damaged byte: what stands before it is read, and a repair sets the rest aside."""

import errno
import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.exchange import assert_same_table
from support.logged import assert_rows, made, recovered, rows_of, train
from typer.testing import CliRunner

import shoal
from shoal import _native
from shoal.cli.app import app
from shoal.errors import CheckpointError, ConfigError, StorageError
from shoal.log import RepairWarning, SnapshotWarning
from shoal.log import repair as repair_module
from shoal.log import set_aside as set_aside_module
from shoal.log.files import Files
from shoal.log.manifest import read_manifest
from shoal.log.reader import LogReader
from shoal.log.repair import find_damage
from shoal.log.verify import verify

NEWEST = 6
BROKEN = 4


class Logged:
    """A log of six versions: their rows, and where each begins in its segment."""

    def __init__(self, path, segment="256MiB", compact_at=()):
        self.path = path
        self.rows, self.places = {}, {}
        bags, model = made(), torch.nn.Linear(2, 2)
        with shoal.ChangeLog(path, segment=segment) as log:
            for version in range(1, NEWEST + 1):
                train(bags, [version], keys=30)
                log.commit(bags, step=version, dense=model)
                self.rows[version] = rows_of(bags)
                if version in compact_at:
                    log.compact()
            for one in LogReader(Files(str(path))).commits(log._writer.manifest.segments[0] - 1):
                self.places[one.version] = (Path(log._files.segment(one.whole.segment)), one.whole)

    def flip(self, where, version=BROKEN):
        """Damage a version: its first frame's header, a payload, or its commit frame."""
        path, whole = self.places[version]
        offset = {"header": whole.begin + 20, "rows": whole.frames[0].offset + 100, "commit": whole.end - 100}[where]
        data = bytearray(path.read_bytes())
        data[offset] ^= 4
        path.write_bytes(data)
        return bytes(data[whole.begin :])


@pytest.fixture(params=["header", "rows", "commit"])
def where(request):
    return request.param


def repaired(path):
    with pytest.warns(RepairWarning, match="was damaged"):
        return shoal.ChangeLog(path, repair=True)


def test_versions_before_the_damage_are_read(tmp_path, where):
    logged = Logged(tmp_path / "log")
    logged.flip(where)
    for version in range(1, BROKEN):
        bags, loaded = made(), made()
        assert shoal.recover(tmp_path / "log", bags, version=version).version == version
        assert_rows(bags, logged.rows[version])
        shoal.load(tmp_path / "log", loaded, version=version)
        assert_rows(loaded, logged.rows[version])
        file = tmp_path / f"{version}.parquet"
        arguments = ["export", tmp_path / "log", "--table", "a", "--to", file, "--version", version]
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
    reader = shoal.open_log(tmp_path / "log")
    assert sum(len(rows) for rows in reader.at(3).rows("a")) == len(logged.rows[3]["embedding_bags.a.weight"])
    seen = []
    with pytest.raises(StorageError, match=rf"version 4, offset {logged.places[4][1].begin}: the .*frame at"):
        for one in reader.tail():
            list(one.changes())
            seen.append(one.version)
    assert seen == [1, 2, 3]


def test_the_error_names_the_place_once_and_ends_its_sentences_once(tmp_path, where):
    logged = Logged(tmp_path / "log")
    logged.flip(where)
    with pytest.raises(StorageError) as error:
        shoal.recover(tmp_path / "log", made())
    (problem, *_) = verify(Files(str(tmp_path / "log"))).problems
    for text in (str(error.value), problem):
        assert text.count(str(tmp_path)) == 1
        assert ".." not in text.replace(str(tmp_path), "") and "?." not in text
        assert "version 4, offset" in text and "shoal repair" in text


def test_inspect_shows_what_stands_before_the_damage(tmp_path, where):
    Logged(tmp_path / "log").flip(where)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "log")])
    assert result.exit_code == 1
    assert "versions 1 to 3" in result.output
    assert "damaged: [file" in result.output and "version 4, offset" in result.output


def test_a_repair_goes_on_from_the_last_whole_version_and_keeps_the_bytes(tmp_path, where):
    logged = Logged(tmp_path / "log")
    gone = logged.flip(where)
    with repaired(tmp_path / "log") as log:
        assert log.version == 3
        (done,) = log.repairs
        assert done.version == 3 and str(done.folder) in str(done)
        bags = made()
        assert shoal.recover(tmp_path / "log", bags).version == 3
        assert_rows(bags, logged.rows[3])
        train(bags, [50], keys=30)
        assert log.commit(bags) == NEWEST + 1  # no number is used again
        assert log.verify().is_sound
    again, commit = recovered(tmp_path / "log")
    assert commit.version == NEWEST + 1
    assert_rows(again, rows_of(bags))
    kept = sorted(path.relative_to(done.folder).as_posix() for path in done.folder.rglob("*") if path.is_file())
    segment = f"segments/{1:020}.seg.from-{logged.places[4][1].begin}"
    assert kept == ["WHY.txt", *(f"dense/{version:020}.safetensors" for version in (4, 5, 6)), segment]
    assert (done.folder / segment).read_bytes() == gone
    with shoal.ChangeLog(tmp_path / "log", repair=True) as log:  # no warning: there is nothing to do
        assert log.repairs == ()
    assert (done.folder / segment).exists()


def test_segments_behind_the_damage_are_set_aside_too(tmp_path, where):
    logged = Logged(tmp_path / "log", segment=1)
    logged.flip(where)
    files = {path.name: path.read_bytes() for path in (tmp_path / "log" / "segments").iterdir()}
    with repaired(tmp_path / "log") as log:
        assert log.version == 3
        assert log.verify().is_sound
        kept = {path.name: path.read_bytes() for path in (log.repairs[0].folder / "segments").iterdir()}
    assert {name: kept[name] for name in files if name in kept} == {
        f"{v:020}.seg": files[f"{v:020}.seg"] for v in (4, 5, 6)
    }


def test_a_snapshot_behind_the_damage_is_gone_on_from_with_the_versions_behind_it(tmp_path, where):
    for segment in ("256MiB", 1):
        path = tmp_path / f"log-{segment}"
        logged = Logged(path, segment, compact_at=(5,))
        logged.flip(where)
        with repaired(path) as log:
            assert log.version == NEWEST
            assert log.verify().is_sound, log.verify().problems
        bags, commit = recovered(path)
        assert commit.version == NEWEST
        assert_rows(bags, logged.rows[NEWEST])
        with pytest.raises(CheckpointError, match="oldest that is kept is 5"):
            shoal.recover(path, bags, version=3)


def test_two_damaged_places(tmp_path):
    logged = Logged(tmp_path / "log", compact_at=(3,))
    logged.flip("header", 2)
    logged.flip("rows", 5)
    with repaired(tmp_path / "log") as log:
        assert log.version == 4
        assert [one.version for one in log.repairs] == [4]
        kept = {path.name for path in (log.repairs[0].folder / "dense").iterdir()}
        assert kept == {f"{version:020}.safetensors" for version in (1, 2, 5, 6)}
        there = {path.name for path in (tmp_path / "log" / "dense").iterdir()}
        assert there >= {f"{version:020}.safetensors" for version in (3, 4)}
        assert log.verify().is_sound
    bags, _ = recovered(tmp_path / "log")
    assert_rows(bags, logged.rows[4])


@pytest.mark.parametrize("lost", ["cut", "gone", "another", "header"])
def test_a_segment_that_is_cut_gone_or_another(tmp_path, lost):
    logged = Logged(tmp_path / "log", segment=1)
    path, whole = logged.places[BROKEN]
    if lost == "gone":
        path.unlink()
    elif lost == "another":
        path.write_bytes(Logged(tmp_path / "other", segment=1).places[BROKEN][0].read_bytes())
    else:
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(path.read_bytes()[: whole.begin + 100] if lost == "cut" else data)
    newest = NEWEST if lost == "header" else 3  # of the segment's header alone, nothing else is needed
    with repaired(tmp_path / "log") as log:
        assert log.version == newest
        assert log.verify().is_sound
    bags, _ = recovered(tmp_path / "log")
    assert_rows(bags, logged.rows[newest])


def test_the_last_segment_is_cut_below_what_was_promised(tmp_path):
    logged = Logged(tmp_path / "log")
    path, whole = logged.places[5]
    path.write_bytes(path.read_bytes()[: whole.begin])
    with pytest.raises(StorageError, match="offset"):
        shoal.ChangeLog(tmp_path / "log")
    with repaired(tmp_path / "log") as log:
        assert log.version == 4


class Killed(BaseException):
    """Where a process would have died."""


MODULES = {repair_module.__file__, set_aside_module.__file__}


def test_a_repair_that_is_killed_anywhere_is_run_again(tmp_path):
    """Writes are calls of the system each: a process that dies between two lines has done those before, and no more."""
    for kind, compact_at, newest in (("end", (), 3), ("beginning", (5,), NEWEST), ("replaced", (), NEWEST + 2)):
        logged = Logged(tmp_path / kind, compact_at=compact_at)
        gone = logged.flip("rows" if kind == "replaced" else "header")
        if kind == "replaced":
            older = made()
            shoal.recover(tmp_path / kind, older, version=3)
            with shoal.ChangeLog(tmp_path / kind) as log:
                for version in (NEWEST + 1, NEWEST + 2):
                    train(older, [version + 50], keys=30)
                    assert log.commit(older) == version
            logged.rows[NEWEST + 2] = rows_of(older)
        line, is_over = 1, False
        while not is_over:
            path = tmp_path / "log"
            shutil.copytree(tmp_path / kind, path)
            is_over = not killed_at(path, line)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RepairWarning)
                warnings.simplefilter("ignore", shoal.log.TornTailWarning)
                with shoal.ChangeLog(path, repair=True) as log:
                    assert log.version == newest, line
                    assert log.verify().is_sound, line
            bags, _ = recovered(path)
            assert_rows(bags, logged.rows[newest])
            kept = [one.read_bytes() for one in path.glob("set-aside/*/segments/*")]
            assert any(gone in one for one in kept), line
            shutil.rmtree(path)
            line += 7


def killed_at(path, line):
    """Whether a repair died at a line of its code, counted as they are run."""
    left = line

    def trace(frame, event, _argument):
        nonlocal left
        if frame.f_code.co_filename not in MODULES:
            return None
        left -= event == "line"
        if left <= 0:  # nor is anything cleaned up then
            raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            repair_module.repair(Files(str(path)), "test")
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def flip_snapshot(path, name="00000.arrow", version="*"):
    (file,) = path.glob(f"snapshots/{version}/{name}")
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)
    return bytes(data)


def test_what_a_repair_does_not_mend_is_said(tmp_path):
    logged = Logged(tmp_path / "log", segment=1, compact_at=(2, 5))
    with shoal.ChangeLog(tmp_path / "log", retain=1) as log:
        log.compact()
    flip_snapshot(tmp_path / "log")  # its beginning was let go
    before = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match=r"no version of it can be read whole.*00000\.arrow.*has changed nothing"):
        shoal.ChangeLog(tmp_path / "log", repair=True)
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != "LOCK")
    assert not (tmp_path / "log" / "set-aside").exists()
    assert logged.rows
    manifest = tmp_path / "log" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"item"', b'"itam"').replace(b"float32", b"float33"))
    result = CliRunner().invoke(app, ["repair", str(tmp_path / "log")])
    assert result.exit_code == 1
    assert "cannot mend a manifest" in result.output + result.stderr


def test_the_command_says_what_it_set_aside(tmp_path):
    Logged(tmp_path / "log").flip("rows")
    said = CliRunner().invoke(app, ["repair", str(tmp_path / "log")])
    assert said.exit_code == 0, said.output
    assert "The log goes on from version 3" in said.output and "set-aside/0001" in said.output
    said = CliRunner().invoke(app, ["repair", str(tmp_path / "log")])
    assert said.exit_code == 0 and "no segment or snapshot is damaged; the newest version is 3" in said.output
    assert find_damage(Files(str(tmp_path / "log"))) is None


@pytest.mark.parametrize("is_open", [True, False])
def test_the_commit_behind_an_older_version_that_was_recovered_is_right(tmp_path, is_open):
    logged = Logged(tmp_path / "log")
    log = shoal.ChangeLog(tmp_path / "log") if is_open else None
    bags = made()
    assert shoal.recover(tmp_path / "log", bags, version=2).version == 2
    bags.table("a").erase(bags.table("a").keys()[:3])
    train(bags, [60], keys=10)
    with log or shoal.ChangeLog(tmp_path / "log") as opened:
        assert opened.commit(bags) == NEWEST + 1
        assert all(one.replaces for one in opened.newest.tables.values())
        train(bags, [61], keys=10)
        assert opened.commit(bags) == NEWEST + 2
        assert not any(one.replaces for one in opened.newest.tables.values())
    again, _ = recovered(tmp_path / "log")
    for name in "abc":
        assert_same_table(again.table(name), bags.table(name))
    shoal.recover(tmp_path / "log", again, version=NEWEST)  # nothing was taken out
    assert_rows(again, logged.rows[NEWEST])


def test_versions_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="version 3 was asked for; there is no log"):
        shoal.recover(tmp_path / "none", made(), version=3)
    Logged(tmp_path / "log")
    with pytest.raises(CheckpointError, match="version 9 was asked for; the newest is 6"):
        shoal.recover(tmp_path / "log", made(), version=9)
    with pytest.raises(ConfigError, match="repair"):
        shoal.ChangeLog(tmp_path / "log", mode="r", repair=True)


def test_versions_that_replaced_all_rows_after_the_damage_are_kept(tmp_path, where):
    """As after recover(version=3) and training on."""
    for segment in ("256MiB", 1):
        path = tmp_path / f"log-{segment}"
        logged = Logged(path, segment)
        logged.flip(where)
        bags = made()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shoal.recover(path, bags, version=3)
            try:
                log = shoal.ChangeLog(path)
            except StorageError:  # of frames that are damaged in the segment that is written to
                assert segment == "256MiB" and where != "rows"
                continue
        rows = {}
        with log:
            for version in range(NEWEST + 1, NEWEST + 4):
                train(bags, [version + 100], keys=30)
                assert log.commit(bags, step=version, dense=torch.nn.Linear(2, 2)) == version
                rows[version] = rows_of(bags)
        with repaired(path) as log:
            assert log.version == NEWEST + 3
            assert log.verify().is_sound
        for version, wanted in rows.items():
            again = made()
            assert shoal.recover(path, again, dense=torch.nn.Linear(2, 2), version=version).step == version
            assert_rows(again, wanted)


def test_the_rows_of_one_table_are_damaged_and_replaced_later(tmp_path):
    logged = Logged(tmp_path / "log", segment=1)
    logged.flip("rows")  # of the first table
    bags = made()
    shoal.recover(tmp_path / "log", bags, version=3)
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit_rows(log._writer.manifest.layouts[0], list(log.at(3).rows("a")), step=bags.table("a").stats().step)
        newest = log.version
    wanted, _ = recovered(tmp_path / "log")
    with repaired(tmp_path / "log") as log:
        assert log.version == newest
        assert log.verify().is_sound
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(wanted))


def test_the_snapshot_that_reaches_the_highest_version_is_gone_on_from(tmp_path):
    logged = Logged(tmp_path / "log", compact_at=(3, 5))
    logged.flip("header", 2)
    logged.flip("rows", 4)
    with repaired(tmp_path / "log") as log:
        assert log.version == NEWEST
        assert len(log.repairs) == 1
        assert log.verify().is_sound
    bags, _ = recovered(tmp_path / "log")
    assert_rows(bags, logged.rows[NEWEST])


@pytest.mark.parametrize("name", ["00000.arrow", "SNAPSHOT.json"])
def test_a_damaged_snapshot_is_passed_over_and_set_aside(tmp_path, name):
    path = tmp_path / "log"
    logged = Logged(path, compact_at=(2, 5))
    data = flip_snapshot(path, name, f"{5:020}")
    for version in range(2, NEWEST + 1):
        bags, loaded = made(), made()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert shoal.recover(path, bags, version=version).version == version
            shoal.load(path, loaded, version=version)
            rows = sum(len(rows) for rows in shoal.open_log(path).at(version).rows("a"))
        assert_rows(bags, logged.rows[version])
        assert_rows(loaded, logged.rows[version])
        assert rows == len(logged.rows[version]["embedding_bags.a.weight"])
        assert all(one.category is SnapshotWarning and name in str(one.message) for one in told)
        assert bool(told) == (version >= 5)
    with pytest.warns(SnapshotWarning), shoal.ChangeLog(path) as log:
        assert log.compact() == NEWEST  # and nothing is let go
        assert [one.version for one in read_manifest(log._files).snapshots] == [2, 5, 6]
    with repaired(path) as log:
        assert log.version == NEWEST
        assert log.verify().is_sound
        kept = log.repairs[0].folder / "snapshots" / f"{5:020}" / name
        assert kept.read_bytes() == data
    for version in range(2, NEWEST + 1):
        bags = made()
        shoal.recover(path, bags, version=version)
        assert_rows(bags, logged.rows[version])


def test_damage_in_a_snapshot_and_before_it(tmp_path):
    logged = Logged(tmp_path / "log", compact_at=(5,))
    logged.flip("header")
    flip_snapshot(tmp_path / "log")
    with repaired(tmp_path / "log") as log:
        assert log.version == 3
        assert log.verify().is_sound
    bags, _ = recovered(tmp_path / "log")
    assert_rows(bags, logged.rows[3])


def test_inspect_shows_the_rest_of_a_log_whose_snapshot_is_damaged(tmp_path):
    Logged(tmp_path / "log", compact_at=(5,))
    flip_snapshot(tmp_path / "log", "SNAPSHOT.json")
    with pytest.warns(SnapshotWarning):
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / "log")])
    assert result.exit_code == 1
    assert "versions 1 to 6" in result.output and "SNAPSHOT.json" in result.output


def test_a_follower_of_versions_that_were_set_aside_is_told(tmp_path):
    logged = Logged(tmp_path / "log")
    logged.flip("rows")
    reader = shoal.open_log(tmp_path / "log")
    with repaired(tmp_path / "log") as log:
        for _again in range(2):
            for version in range(4, NEWEST + 1):
                with pytest.raises(CheckpointError, match=r"a repair set versions 4 to 6 aside.*Begin again with at"):
                    list(reader.tail(version))
                with pytest.raises(CheckpointError, match="a repair set versions 4 to 6 aside"):
                    reader.at(version)
            bags, _ = recovered(tmp_path / "log")
            train(bags, [70 + _again], keys=10)
            assert log.commit(bags) == NEWEST + 1 + _again
        assert [one.version for one in reader.tail(3)] == [7, 8]
        assert [one.version for one in reader.tail(7)] == [8]
        log.compact()
        assert log.verify().is_sound
    with shoal.ChangeLog(tmp_path / "log", retain=1) as log:
        log.compact()
        train(bags, [80], keys=10)
        log.commit(bags)
        with pytest.raises(CheckpointError, match="Begin with at"):
            list(reader.tail(5))
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_a_second_repair_skips_the_versions_of_both(tmp_path):
    logged = Logged(tmp_path / "log")
    logged.flip("rows", 5)
    with repaired(tmp_path / "log") as log:
        bags, _ = recovered(tmp_path / "log")
        train(bags, [70], keys=10)
        assert log.commit(bags) == 7
    logged.flip("commit", 3)
    with repaired(tmp_path / "log") as log:
        assert log.version == 2
        assert log.verify().is_sound
        bags, _ = recovered(tmp_path / "log")
        assert_rows(bags, logged.rows[2])
        assert log.commit(bags) == 8
        with pytest.raises(CheckpointError, match="versions 3 to 7 aside"):
            log.at(7)


def test_readers_see_a_repair_at_once_and_what_they_hold_is_read_to_its_end(tmp_path):
    logged = Logged(tmp_path / "log")
    reader = shoal.open_log(tmp_path / "log")
    held = reader.at(NEWEST)
    logged.flip("rows", 5)
    segment = logged.places[3][0]
    before = segment.read_bytes()
    with repaired(tmp_path / "log") as log:
        assert reader.version == log.version == 4
        assert segment.read_bytes() == before  # nothing that is held is cut
        with pytest.raises(StorageError, match="version 5"):
            list(held.rows("a"))  # its own damage, no other error
        assert sum(len(rows) for rows in reader.at(4).rows("a")) == len(logged.rows[4]["embedding_bags.a.weight"])


@pytest.mark.parametrize("lost", ["tail", "rows"])
def test_what_a_repair_cuts_off_that_was_not_promised_is_kept(tmp_path, lost):
    logged = Logged(tmp_path / "log")
    (tmp_path / "log" / "HEAD").unlink()
    path, whole = logged.places[NEWEST]
    if lost == "rows":
        gone = logged.flip("rows", NEWEST)
    else:
        path.write_bytes(path.read_bytes()[: whole.end - 64])
        gone = path.read_bytes()[whole.begin :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.log.TornTailWarning)
        warnings.simplefilter("ignore", RepairWarning)
        with shoal.ChangeLog(tmp_path / "log", repair=True) as log:
            assert log.version == NEWEST - 1
            assert log.verify().is_sound
            folder = log.repairs[0].folder
    assert (folder / "segments" / f"{path.name}.from-{whole.begin}").read_bytes() == gone
    assert (folder / "dense" / f"{NEWEST:020}.safetensors").exists()


def test_whole_commits_after_damage_are_not_a_torn_tail(tmp_path):
    logged = Logged(tmp_path / "log")
    (tmp_path / "log" / "HEAD").unlink()
    gone = logged.flip("rows", 2)
    report = verify(Files(str(tmp_path / "log")))
    assert any("version 2, offset" in one for one in report.problems)
    with repaired(tmp_path / "log") as log:
        assert log.version == 1
        assert any(one.read_bytes() == gone for one in log.repairs[0].folder.glob("segments/*"))
        bags, _ = recovered(tmp_path / "log")
        assert log.commit(bags) == NEWEST + 1


def test_verify_and_inspect_count_what_is_not_finished(tmp_path):
    logged = Logged(tmp_path / "log")
    path = logged.places[NEWEST][0]
    path.write_bytes(path.read_bytes() + b"SHFR" + bytes(20))
    report = verify(Files(str(tmp_path / "log")))
    assert report.is_sound and report.unfinished == 24
    for command in ("verify", "inspect"):
        result = CliRunner().invoke(app, [command, str(tmp_path / "log")])
        assert result.exit_code == 0 and "24 bytes after the last whole commit" in result.output
        result = CliRunner().invoke(app, [command, str(tmp_path / "log"), "--json"])
        assert json.loads(result.output)["logs"][0]["unfinished_bytes"] == 24


def test_tail_ends_at_rows_that_are_damaged(tmp_path):
    Logged(tmp_path / "log").flip("rows")
    seen = []
    with pytest.raises(StorageError, match="version 4"):
        for one in shoal.open_log(tmp_path / "log").tail():
            try:
                list(one.changes())
                seen.append(one.version)
            except StorageError:
                seen.append(None)
    assert seen == [1, 2, 3, None]


def test_verify_names_all_damaged_places(tmp_path, where):
    logged = Logged(tmp_path / "log")
    for version in (2, 5):
        logged.flip(where, version)
    problems = verify(Files(str(tmp_path / "log"))).problems
    assert len(problems) == 2
    assert "version 2, offset" in problems[0] and "version 5, offset" in problems[1]


@pytest.mark.parametrize("compact_at", [(), (5,)])
def test_a_full_disk_leaves_no_copies(tmp_path, compact_at):
    logged = Logged(tmp_path / "log", compact_at=compact_at)
    logged.flip("rows")
    before = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    part = "set-aside" if not compact_at else ".seg.tmp"
    try:
        _native.inject_fault(_native.FileCall.write, part, errno.ENOSPC)
        with pytest.raises(StorageError):
            shoal.ChangeLog(tmp_path / "log", repair=True)
    finally:
        _native.clear_faults()
    after = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if path.name not in ("LOCK", "COMPACT")} == {
        path: data for path, data in before.items() if path.name not in ("LOCK", "COMPACT")
    }
    with repaired(tmp_path / "log") as log:
        assert log.version == (NEWEST if compact_at else 3)


def test_files_that_leave_whole_are_not_copied(tmp_path):
    logged = Logged(tmp_path / "log", segment=1)
    logged.flip("rows")
    inodes = {path.name: path.stat().st_ino for path in tmp_path.glob("log/segments/*")}
    with repaired(tmp_path / "log") as log:
        for path in (log.repairs[0].folder / "segments").iterdir():
            assert path.stat().st_ino == inodes[path.name]


def test_a_repair_of_a_path_without_a_log_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="repair: wanted a log; there is none"):
        shoal.ChangeLog(tmp_path / "typo", repair=True)
    assert not (tmp_path / "typo").exists()


def test_a_snapshot_of_the_version_that_replaced_all_is_gone_on_from(tmp_path):
    Logged(tmp_path / "log").flip("rows")
    bags = made()
    shoal.recover(tmp_path / "log", bags, version=3)
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.commit(bags) == log.compact() == NEWEST + 1
    with repaired(tmp_path / "log") as log:
        assert log.version == NEWEST + 1
        assert log.verify().is_sound
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_the_error_names_the_newest_version_that_can_be_read(tmp_path):
    logged = Logged(tmp_path / "log", compact_at=(5,))
    logged.flip("header")
    with pytest.raises(StorageError, match=r"version 4, offset.*Version 5 can still be read, with version=5"):
        shoal.recover(tmp_path / "log", made())
    bags = made()
    assert shoal.recover(tmp_path / "log", bags, version=5).version == 5
    assert_rows(bags, logged.rows[5])


def test_a_folder_that_ranks_saved_to_is_named(tmp_path):
    for rank in range(2):
        shoal.save(tmp_path / "saved", made(), rank=rank, ranks=2, step=1, save_id="x")
    with pytest.raises(CheckpointError, match=r"a folder that ranks saved to \(rank-00000-of-00002\)"):
        shoal.open_log(tmp_path / "saved")


def test_a_checkpoint_whose_snapshot_is_damaged_has_to_be_restored(tmp_path):
    bags = made()
    train(bags, [1], keys=30)
    shoal.save(tmp_path / "saved", bags)
    flip_snapshot(tmp_path / "saved")
    said = CliRunner().invoke(app, ["repair", str(tmp_path / "saved")])
    assert said.exit_code == 1
    assert "restore the log from another copy" in said.output + said.stderr


def test_a_save_onto_a_part_that_was_repaired_takes_a_number_that_is_free(tmp_path):
    Logged(tmp_path / "saved" / "rank-00000-of-00002").flip("rows")
    with repaired(tmp_path / "saved" / "rank-00000-of-00002") as log:
        assert log.version == 3
    for rank in range(2):
        assert shoal.save(tmp_path / "saved", made(), rank=rank, ranks=2, step=9, save_id="x") == NEWEST + 1
    assert shoal.load(tmp_path / "saved", made()).step == 9
