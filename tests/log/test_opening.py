"""Logs that are copied, moved away from, cut into tiny segments, or no logs at all; and what others left of them."""

import os
import shutil
import threading
import time

import pytest
import torch
from support.logged import assert_rows, made, recovered, rows_of, train

import shoal
from shoal.errors import CheckpointError, ConfigError, InputError, NotFoundError, StorageError
from shoal.log import files as files_module
from shoal.log.files import Files, read_file, write_file
from shoal.log.manifest import changing_manifest


def test_a_log_and_its_copy_are_two(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "x") as x:
        train(bags, [0])
        x.commit(bags)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    with shoal.ChangeLog(tmp_path / "x") as x, shoal.ChangeLog(tmp_path / "y") as y:
        for step in range(1, 8):
            bags.table("a").assign([step], torch.full((1, 5), float(step)))
            (y if step % 3 == 2 else x).commit(bags)
            again, _ = recovered(tmp_path / ("y" if step % 3 == 2 else "x"))
            assert_rows(again, rows_of(bags))


def test_a_log_stays_where_it_was_opened(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with shoal.ChangeLog("log") as log:
            log.commit(made())
    monkeypatch.chdir(tmp_path / "here")
    bags = made()
    with shoal.ChangeLog("log", segment="4KiB") as log:
        monkeypatch.chdir(tmp_path / "there")
        for step in range(3):
            train(bags, [step])
            log.commit(bags)
        log.compact()
    again, commit = recovered(tmp_path / "here" / "log")
    assert commit.version == 4
    assert_rows(again, rows_of(bags))
    with shoal.ChangeLog("log") as log:
        assert log.version == 1 and log.verify().is_sound


@pytest.mark.parametrize("segment", [1, 64, 65])
def test_segments_of_one_commit(tmp_path, segment):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log", segment=segment) as log:
        for step in range(4):
            train(bags, [step])
            log.commit(bags)
        assert log.verify().commits == 4
    assert len(list((tmp_path / "log" / "segments").iterdir())) == 4
    again, _ = recovered(tmp_path / "log")
    assert_rows(again, rows_of(bags))


def test_a_second_writer_in_this_process_is_not_told_to_end_it(tmp_path):
    with shoal.ChangeLog(tmp_path):
        for second in (lambda: shoal.ChangeLog(tmp_path), lambda: shoal.save(tmp_path, made())):
            with pytest.raises(StorageError, match=r"\(log\) has it, which is this one\. Close what has it") as told:
                second()
            assert "End that one" not in str(told.value)
    shoal.ChangeLog(tmp_path).close()


def test_a_folder_with_something_else_is_left_as_it_was(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        shoal.ChangeLog(tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
    for path in ("", "a\0b", None):
        with pytest.raises(ConfigError, match="the path of a folder"):
            shoal.ChangeLog(path)


def test_a_writer_that_opens_leaves_the_manifest_of_who_compacts_alone(tmp_path):
    bags = made()
    train(bags, range(2))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
    files = Files(str(tmp_path / "log"))
    temporary = tmp_path / "log" / "MANIFEST.json.tmp"
    opened = threading.Event()

    def open_it():
        shoal.ChangeLog(tmp_path / "log").close()
        opened.set()

    with changing_manifest(files):
        temporary.write_bytes(b"half")
        other = threading.Thread(target=open_it)
        other.start()
        time.sleep(0.2)
        assert temporary.exists()
        assert not opened.is_set()
    other.join()
    assert not temporary.exists()


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, b"a" * 100)
    original = files_module.size_of

    def then_replaced(asked):
        size = original(asked)
        write_file(path, b"b" * 50)
        return size

    monkeypatch.setattr(files_module, "size_of", then_replaced)
    assert read_file(path) == b"b" * 50


def test_what_compactions_left_that_died_is_removed_by_the_next(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        for version in range(1, 5):
            train(bags, [version])
            log.commit(bags)
        snapshots = tmp_path / "log" / "snapshots"
        for name in ("1.compact.tmp", "2.compact.tmp", "3"):  # the last died before the manifest named it
            folder = snapshots / name.replace(name[0], f"{int(name[0]):020}", 1)
            folder.mkdir()
            (folder / "00000.arrow").write_bytes(b"x" * 1000)
        (snapshots / f"{9:020}.tmp").mkdir()  # of a save that is at work
        assert log.compact() == 4
        assert sorted(one.name for one in snapshots.iterdir()) == [f"{4:020}", f"{9:020}.tmp"]
        assert log.verify().is_sound


def test_dense_weights_go_with_the_versions_that_are_not_kept(tmp_path):
    """Also where one segment holds them all, which is still written to."""
    bags, model = made(), torch.nn.Linear(2, 2)
    with shoal.ChangeLog(tmp_path / "log", retain=1) as log:
        for version in range(1, 11):
            train(bags, [version])
            log.commit(bags, dense=model)
        log.compact()
        assert len(list((tmp_path / "log" / "dense").iterdir())) == 1
        with pytest.raises(CheckpointError, match="the oldest that is kept is 10"):
            log.at(9)
        assert len(list(log.tail(3))) == 7  # rows of commits are there until the segment goes
        train(bags, [11])
        log.commit(bags, dense=model)
        assert log.at(10).dense()
        assert log.verify().is_sound
    again, commit = recovered(tmp_path / "log")
    assert commit.version == 11
    assert_rows(again, rows_of(bags))


def test_a_commit_that_is_refused_leaves_its_tables_names_free(tmp_path):
    with shoal.ChangeLog(tmp_path / "log") as log:
        first = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
        with pytest.raises(InputError, match="dense: wanted"):
            log.commit(first, dense=object())
        other = shoal.EmbeddingBagCollection([shoal.Table("t", 6)])
        other.table("t").assign([1], torch.ones(1, 6))
        assert log.commit(other) == 1
        with pytest.raises(CheckpointError, match="another layout"):
            log.commit(first)
    again = shoal.EmbeddingBagCollection([shoal.Table("t", 6)])
    shoal.recover(tmp_path / "log", again)
    assert_rows(again, rows_of(other))


def test_a_log_whose_folder_is_gone_takes_no_commits(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        (tmp_path / "log").rename(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="moved or removed"):
            log.commit(bags)
        (tmp_path / "elsewhere").rename(tmp_path / "log")
        assert log.commit(bags) == 2


def test_the_error_for_a_table_names_those_of_the_version(tmp_path):
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(made())
        log.commit(shoal.EmbeddingBagCollection([shoal.Table("z", 4)]))
        with pytest.raises(NotFoundError, match="'a', 'b', 'c'; got 'z'"):
            list(log.at(1).rows("z"))
