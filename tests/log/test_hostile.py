"""Logs that a stranger wrote: a call that reads one gets what it holds, or a ShoalError; in little memory, and in time
that its size explains."""

import shutil
import subprocess
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.forged import Forged
from support.hostile import DAMAGED_SNAPSHOTS, FLAWS, MUST_BE_REFUSED, collection, write
from support.limits import bytes_read, little_memory
from support.sweeps import examples

import shoal
from shoal.errors import OutOfMemoryError, ShoalError, ShoalWarning, StorageError
from shoal.interop.parquet import export_parquet
from shoal.interop.safetensors import export_safetensors
from shoal.log.compact import compact
from shoal.log.files import Files
from shoal.log.summary import summarize
from shoal.log.verify import verify
from shoal.records.frames import FrameHeader, Kind

# A reading command reads a file more than once: it looks for commits, checks rows, and hands them on.
TIMES = 40
AT_LEAST = 8 << 20


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "log"
    write(path)
    assert verify(Files(str(path))).is_sound
    for command in COMMANDS:
        shutil.copytree(path, path.with_name("copy"))
        command(path.with_name("copy"))
        shutil.rmtree(path.with_name("copy"))
    return path


def load(path, version=None):
    bags = collection()
    shoal.load(path, bags, version=version, progress=False)
    for name in "ab":
        keys = bags.table(name).keys()
        assert len(keys.unique()) == len(keys) == len(bags.table(name))


def recover(path):
    shoal.recover(path, collection(), progress=False)


def tail(path):
    for one in shoal.open_log(path).tail(2):
        for change in one.changes():
            assert len(change.keys.unique()) == len(change.keys)


def at(path):
    with shoal.open_log(path) as opened:
        version = opened.at(3)
        for name in version.layouts:
            keys = torch.cat([rows.keys for rows in version.rows(name)])
            assert len(keys.unique()) == len(keys)
            for _rows in version.rows(name, 3, 9):
                pass


def inspect(path):
    summarize(Files(str(path)))


def export(path):
    export_parquet(path, path.with_name("x.parquet"), table="a", progress=False)
    export_parquet(path, path.with_name("y.parquet"), table="a", since=2, progress=False)
    export_safetensors(path, path.with_name("x.safetensors"), table="b", progress=False)


def compacted(path):
    compact(Files(str(path)))


def written(path):
    with shoal.ChangeLog(path) as opened:
        bags = collection()
        shoal.recover(path, bags, progress=False)
        bags.table("a").assign([1], torch.ones(1, 3))
        opened.commit(bags)
        opened.rollback(3, bags)


def repaired(path):
    with shoal.ChangeLog(path, repair=True):
        pass


COMMANDS = (load, recover, tail, at, inspect, export, compacted, written, repaired)


def is_refused(command, path):
    """Whether a command raises a ShoalError. Raises any other error, and for work that the files do not explain."""
    size = sum(max(file.stat().st_blocks * 512, min(file.stat().st_size, 1 << 26)) for file in path.rglob("*"))
    before = bytes_read()
    try:
        with warnings.catch_warnings(), little_memory():
            warnings.simplefilter("ignore", ShoalWarning)
            command(path)
    except OutOfMemoryError:
        raise AssertionError("it asked for more memory than there is") from None
    except ShoalError:
        return True
    finally:
        read = bytes_read() - before
        assert read < TIMES * size + AT_LEAST, (command, read, size)
    return False


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.__name__)
@settings(
    max_examples=examples(8),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each example takes long
)
@given(data=st.data())
def test_whoever_reads_it_gets_rows_or_an_error(log, tmp_path, flaw, data):
    path = tmp_path / "flawed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(log, path)
    flaw(path, data.draw)
    report = []
    assert not is_refused(lambda path: report.append(verify(Files(str(path)))), path)
    refused = {}
    for command in COMMANDS:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-r", "--sparse=always", str(path), str(copy)], check=True)
        refused[command] = is_refused(command, copy)
    if flaw in MUST_BE_REFUSED:
        assert "version" in report[0].problems[0]
        assert refused[load]
        assert refused[recover]
        assert refused[tail]
        assert refused[compacted]
        assert refused[written]
        assert not refused[repaired], "there are versions before it"
    elif flaw in DAMAGED_SNAPSHOTS:
        assert not report[0].is_sound
    if report[0].is_sound:
        assert not any(refused.values()), refused


@pytest.mark.parametrize("kind", [Kind.COMMIT, Kind.PUTS])
@pytest.mark.parametrize("is_broken_before", [True, False])
def test_headers_that_each_claim_the_rest_of_the_file_are_read_a_few_times(log, tmp_path, kind, is_broken_before):
    """Whether HEAD promises them or not, for every call that reads."""
    path = tmp_path / "copy"
    shutil.copytree(log, path)
    file = sorted((path / "segments").iterdir())[-1]
    count, table = 20_000, 0 if kind is Kind.PUTS else 2**32 - 1
    headers = [FrameHeader(kind, table, 5, 0, 64 * (count - at - 1), 1).pack() for at in range(count)]
    (path / "HEAD").unlink()
    content = file.read_bytes() if not is_broken_before else file.read_bytes()[:64] + bytes(64)
    file.write_bytes(content + b"".join(headers))
    for command in COMMANDS:
        copy = tmp_path / "other"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        is_refused(command, copy)
    assert not is_refused(lambda path: verify(Files(str(path))), path)


def test_a_file_of_holes_is_said(log, tmp_path):
    shutil.copytree(log, tmp_path / "copy")
    file = sorted((tmp_path / "copy" / "segments").iterdir())[-1]
    with open(file, "r+b") as opened:
        opened.truncate(1 << 42)
    for command in (load, recover, tail, export, written):
        with pytest.raises(StorageError, match=rf"{file.name}\] version 1, offset 0: wanted a file that holds what"):
            command(tmp_path / "copy")
    assert "and holes" in verify(Files(str(tmp_path / "copy"))).problems[0]


def test_a_payload_that_its_rows_do_not_explain_is_not_read(log, tmp_path):
    """A file that holds nothing but one frame, of one row that claims 40 MiB."""
    shutil.copytree(log, tmp_path / "copy")
    forged = Forged(tmp_path / "copy")

    def change(frames):
        header, payload = frames[-2]
        return [
            *frames[:-2],
            (replace(header, rows=1, payload_bytes=40 << 20), payload.ljust(40 << 20, bytes(1))),
            frames[-1],
        ]

    forged.write_segment(change)
    with pytest.raises(StorageError, match=r"bytes at most for 1 rows; got 41943040"):
        load(tmp_path / "copy")
