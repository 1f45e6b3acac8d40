"""Logs that are copied, moved away from, cut into tiny segments, or no logs at all."""

import os
import shutil

import pytest
import torch
from logged import assert_rows, made, recovered, rows_of, train

import shoal
from shoal.errors import CheckpointError, ConfigError


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


def test_a_folder_with_something_else_is_left_as_it_was(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        shoal.ChangeLog(tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
    for path in ("", "a\0b", None):
        with pytest.raises(ConfigError, match="the path of a folder"):
            shoal.ChangeLog(path)
