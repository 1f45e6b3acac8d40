"""Reading a log while another process writes it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.logged import made, train

import shoal
from shoal import _native
from shoal.errors import CheckpointError, InputError, StorageError
from shoal.records import join

WRITER = """
    import sys
    import torch
    import shoal

    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
    model = torch.nn.Linear(1, 1)
    with shoal.ChangeLog(sys.argv[1], fsync="never", segment="4KiB", retain=1) as log:
        for version in range(1, int(sys.argv[2]) + 1):
            # Version v has the keys 0 to v + 9, and the value v in all of them.
            bags.table("t").assign(range(version + 10), torch.full((version + 10, 4), float(version)))
            model.weight.data.fill_(version)
            log.commit(bags, dense=model)
            if version % 4 == 0:
                log.compact()
            if version == 2 or version == int(sys.argv[2]):
                print(version, flush=True)
                sys.stdin.readline()
"""


def started(path, versions):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(versions)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
    )


def go_on(writer):
    writer.stdin.write("\n")
    writer.stdin.flush()


def assert_is_whole(version):
    """All that it holds is of its number."""
    number = version.commit.version
    rows = join(list(version.rows("t")))
    assert sorted(rows.keys.tolist()) == list(range(number + 10))
    assert bool((rows.weights == number).all())
    assert float(version.dense()["model"]["weight"]) == number


def test_a_reader_sees_the_commits_of_a_living_writer_and_survives_its_compactions(tmp_path):
    newest = 60
    writer = started(tmp_path / "log", newest)
    try:
        assert writer.stdout.readline() == "2\n"
        with pytest.raises(StorageError, match="process"):
            shoal.ChangeLog(tmp_path / "log")
        with shoal.open_log(tmp_path / "log") as log, shoal.ChangeLog(tmp_path / "log", mode="r") as other:
            assert log.version == other.version == log.newest.version == 2
            first, tail = log.at(1), list(log.tail())
            seen = tail[-1].version
            go_on(writer)
            looks = 0
            while log.version < newest:
                looks += 1
                try:
                    assert_is_whole(log.at(log.version))
                    for one in log.tail(seen):
                        assert one.version == seen + 1
                        seen = one.version
                        assert {float(value) for part in one.changes("t") for value in part.puts.weights.flatten()} == {
                            float(seen)
                        }
                except CheckpointError:  # it compacted twice since
                    seen = log.version
                report = other.verify()
                assert report.is_sound, report.problems
            assert looks > 0
            assert writer.stdout.readline() == f"{newest}\n"
            # What was asked for first is whole, though the log has let it go.
            assert_is_whole(first)
            assert [sum(len(part.keys) for part in one.changes("t")) for one in tail] == [11, 12]
            with pytest.raises(CheckpointError, match="oldest that is kept"):
                log.at(1)
        go_on(writer)
        assert writer.wait() == 0
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()


@pytest.fixture
def logged(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, [1], keys=30)
        log.commit(bags)
        log.compact()
        train(bags, [2], keys=30)
        log.commit(bags)
    return tmp_path / "log", bags


def test_a_reader_changes_no_file_and_takes_no_lock(logged, monkeypatch):
    path, _ = logged
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in [path, *path.rglob("*")]}
    for name in ("make_directories", "remove_file", "rename_file", "remove_directory"):
        monkeypatch.setattr(_native, name, None)
    for kind, names in ((_native.File, ("open_to_write", "create_new")), (_native.FileLock, ("take",))):
        for name in names:
            monkeypatch.setattr(kind, name, None)
    for file in [path, *path.rglob("*")]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    try:
        with shoal.open_log(path) as log:
            assert log.version == 2
            assert log.verify().is_sound
            assert [one.version for one in log.tail(1)] == [2]
            assert sum(map(len, log.at(2).rows("a"))) > 0
    finally:
        for file in [path, *path.rglob("*")]:
            file.chmod(0o755 if file.is_dir() else 0o644)
    assert before == {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in [path, *path.rglob("*")]}


def test_what_writes_is_refused(logged):
    path, bags = logged
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with shoal.open_log(path) as log:
        calls = [
            lambda: log.commit(bags),
            lambda: log.commit_rows(log.at(1).layouts["a"], []),
            lambda: log.compact(),
            lambda: log.rollback(1, bags),
            lambda: log.rewrite(bags),
            lambda: log.sync(),
        ]
        for call in calls:
            with pytest.raises(InputError, match="opened to read"):
                call()
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for call in (lambda: log.version, lambda: log.at(1), log.tail, log.verify):
        with pytest.raises(StorageError, match="closed"):
            call()


def test_there_is_nothing_to_read(tmp_path):
    with pytest.raises(CheckpointError, match="wanted a log"):
        shoal.open_log(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with shoal.ChangeLog(tmp_path / "log"), shoal.open_log(tmp_path / "log") as log:
        assert log.version == 0 and log.newest is None and list(log.tail()) == []


def test_a_commit_shows_itself_in_one_line(tmp_path):
    bags, model = made(), torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, [1], keys=30)
        adam.step()
        schedule.step()
        log.commit(
            bags, step=7, metadata={"day": "monday"}, dense=model, optimizer={"adam": adam, "schedule": schedule}
        )
        text = repr(log.newest)
    rows = len(bags.table("a"))
    assert text.startswith("Commit(version=1, step=7, time=20") and len(text) < 300 and "\n" not in text
    assert f"a: {rows} rows" in text and "{'day': 'monday'}" in text
    model = torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(model.parameters())
    again = torch.optim.lr_scheduler.StepLR(adam, 1)
    shoal.recover(tmp_path / "log", made(), dense=model, optimizer={"adam": adam, "schedule": again})
    assert again.state_dict() == schedule.state_dict() and again.last_epoch == 1
    with shoal.ChangeLog(tmp_path / "one") as log:
        log.commit(bags, optimizer=schedule)  # alone, too


def test_another_retention_drops_snapshots_where_there_is_nothing_else_to_compact(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log", segment=1) as log:
        for step in range(1, 5):
            train(bags, [step], keys=30)
            log.commit(bags)
            log.compact()
        assert len(list(Path(tmp_path / "log" / "snapshots").iterdir())) == 2
        assert log.compact() is None
    with shoal.ChangeLog(tmp_path / "log", retain=1) as log:
        assert log.compact() == 4
        assert log.compact() is None
        assert log.verify().is_sound
        with pytest.raises(CheckpointError, match="oldest that is kept is 4"):
            log.at(3)
    assert [one.name for one in (tmp_path / "log" / "snapshots").iterdir()] == [f"{4:020}"]
