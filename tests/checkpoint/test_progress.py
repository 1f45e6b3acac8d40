"""Progress bars of rows, on a terminal."""

import io
import os
import pty
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch

import shoal

ROWS = 300
CALLS = {
    "saving": lambda path, bags, progress: shoal.save(path, bags, progress=progress),
    "loading": lambda path, bags, progress: shoal.load(path, bags, progress=progress),
    "recovering": lambda path, bags, progress: shoal.recover(path, bags, progress=progress),
}


def made():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 2)])
    bags.table("a").assign(range(ROWS - 100), torch.randn(ROWS - 100, 4))
    bags.table("b").assign(range(100), torch.randn(100, 2))
    return bags


@pytest.fixture
def saved(tmp_path):
    shoal.save(tmp_path / "saved", made(), progress=False)
    return tmp_path / "saved"


class Terminal:
    """What was shown on it, without colours."""

    text = ""

    def bars(self):
        """What each line that was shown says: what is done, and how many of how many."""
        return [(what, int(done), int(of)) for what, done, of in re.findall(r"(\w+) ━+\S* +(\d+)/(\d+)", self.text)]


@contextmanager
def terminal(monkeypatch):
    """Standard error is one."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = Terminal()
    pieces = []
    other, own = pty.openpty()

    def read():
        try:
            while piece := os.read(other, 1 << 16):
                pieces.append(piece)
        except OSError:  # Linux: the other end is closed
            pass

    reader = Thread(target=read)  # a terminal holds little: without this thread, writing to it would wait
    reader.start()
    try:
        with os.fdopen(own, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            yield shown
    finally:
        reader.join()
        os.close(other)
        shown.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(pieces).decode())


@pytest.mark.parametrize("progress", [True, None])
@pytest.mark.parametrize("what", CALLS)
def test_a_bar_reaches_the_rows(saved, monkeypatch, what, progress):
    bags = made()
    with terminal(monkeypatch) as shown:
        CALLS[what](saved, bags, progress)
    bars = shown.bars()
    assert {(name, of) for name, _, of in bars} == {(what, ROWS)}
    assert bars[0][1] == 0
    assert bars[-1][1] == ROWS


@pytest.mark.parametrize("what", CALLS)
def test_who_wants_none_sees_none(saved, monkeypatch, what):
    bags = made()
    with terminal(monkeypatch) as shown:
        CALLS[what](saved, bags, False)
    assert shown.text == ""


@pytest.mark.parametrize("progress", [None, False])
@pytest.mark.parametrize("what", CALLS)
def test_nothing_is_shown_where_nobody_looks(saved, capfd, what, progress):
    CALLS[what](saved, made(), progress)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("what", CALLS)
def test_where_no_terminal_is_it_is_shown_once(saved, monkeypatch, what):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    CALLS[what](saved, made(), True)
    assert re.findall(r"(\w+) .* (\d+)/(\d+)", shown.getvalue()) == [(what, str(ROWS), str(ROWS))]


@pytest.mark.parametrize("what", ["loading", "recovering"])
def test_a_bar_counts_what_is_read_of_a_log(tmp_path, monkeypatch, what):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        bags.table("a").assign(range(50), torch.randn(50, 4))
        bags.table("a").erase(range(100, 110))
        log.commit(bags)
    with terminal(monkeypatch) as shown:
        CALLS[what](tmp_path / "log", made(), True)
    assert shown.bars()[-1] == (what, ROWS + 60, ROWS + 60)


def test_a_bar_does_not_change_what_is_done(saved, tmp_path, monkeypatch):
    bags = made()
    with terminal(monkeypatch):
        shoal.save(tmp_path / "shown", bags, progress=True)
    shoal.save(tmp_path / "not", bags, progress=False)
    files = [
        {file.name: file.read_bytes() for file in Path(tmp_path, name).rglob("*.arrow")} for name in ("shown", "not")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 2
