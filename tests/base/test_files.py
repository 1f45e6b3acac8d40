"""The door to the file system, as Python has it: files, locks, streams, names, faults and power cuts."""

import errno
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import _native
from shoal.errors import StorageError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_faults_after():
    yield
    _native.clear_faults()
    _native.forget_power_cut()


def write_file(path, data, sync=True):
    with _native.File.open_to_write(path) as file:
        file.write(0, data)
        if sync:
            file.sync()


# ---- files


def test_bytes_of_any_contiguous_buffer_are_written(tmp_path):
    sources = [
        b"bytes",
        bytearray(b"array"),
        memoryview(b"0123456789")[2:7],
        np.arange(5, dtype=np.float32),
        torch.arange(6, dtype=torch.int16),
        torch.ones(3, 2, dtype=torch.bfloat16),
        torch.zeros(0),
        b"",
    ]
    expected = b""
    with _native.File.create_new(tmp_path / "a") as file:
        for source in sources:
            file.write(len(expected), source)
            tensor = isinstance(source, torch.Tensor)
            expected += source.contiguous().view(torch.uint8).numpy().tobytes() if tensor else bytes(source)
        assert file.size() == len(expected)
    assert (tmp_path / "a").read_bytes() == expected


def test_reads_fill_any_writable_buffer(tmp_path):
    write_file(tmp_path / "a", bytes(range(8)))
    with _native.File.open_to_read(tmp_path / "a") as file:
        for out in (bytearray(4), np.zeros(2, np.int16), torch.zeros(4, dtype=torch.uint8)):
            file.read(2, out)
            assert bytes(memoryview(out.numpy() if isinstance(out, torch.Tensor) else out)) == bytes([2, 3, 4, 5])


@pytest.mark.parametrize(
    "out", [b"read-only", memoryview(b"too"), np.zeros((4, 4))[:, 0], torch.zeros(4, 4)[:, 0], "text", None]
)
def test_what_cannot_be_filled_is_refused(tmp_path, out):
    write_file(tmp_path / "a", bytes(100))
    with _native.File.open_to_read(tmp_path / "a") as file, pytest.raises(TypeError):
        file.read(0, out)


@pytest.mark.parametrize("data", [np.zeros((4, 4))[:, 0], torch.zeros(4, 4).t(), memoryview(b"abcd")[::2], "text", 3])
def test_what_is_not_contiguous_bytes_is_refused(tmp_path, data):
    with _native.File.create_new(tmp_path / "a") as file, pytest.raises(TypeError):
        file.write(0, data)
    with pytest.raises(TypeError):
        _native.crc32c(data)


def test_errors_name_the_file_and_whose_it_is(tmp_path):
    with pytest.raises(StorageError, match=r"none\] could not be opened: No such file .* the log's directory"):
        _native.File.open_to_read(tmp_path / "none")
    with pytest.raises(StorageError, match=r"Ssd\(path=\)"):
        _native.File.open_to_read(tmp_path / "none", owner=_native.FileOwner.ssd)
    write_file(tmp_path / "a", b"abc")
    with pytest.raises(StorageError, match="File exists"):
        _native.File.create_new(tmp_path / "a")
    with _native.File.open_to_read(tmp_path / "a") as file, pytest.raises(StorageError, match="only 3 are there"):
        file.read(0, bytearray(4))
    with pytest.raises(StorageError, match="It was closed"):
        file.size()


def test_names_that_are_no_text_work_and_can_be_told(tmp_path):
    name = os.fsdecode(b"\xff\xfe")
    write_file(tmp_path / name, b"x")
    assert _native.list_directory(tmp_path) == [name]
    assert _native.file_size(tmp_path / name) == 1
    with pytest.raises(StorageError, match=r"\\xff\\xfe\] could not be made"):
        _native.File.create_new(tmp_path / name)


def test_a_file_is_cut_and_grown(tmp_path):
    with _native.File.open_to_write(str(tmp_path / "a")) as file:
        file.write(0, b"abcdef")
        file.truncate(2)
        file.truncate(4)
        with pytest.raises(StorageError, match="-1 bytes"):
            file.truncate(-1)
    assert (tmp_path / "a").read_bytes() == b"ab\0\0"


def test_names(tmp_path):
    _native.make_directories(tmp_path / "x" / "y")
    write_file(tmp_path / "x" / "b", b"bb")
    write_file(tmp_path / "x" / "a", b"a")
    assert _native.list_directory(tmp_path / "x") == ["a", "b", "y"]
    _native.rename_file(tmp_path / "x" / "b", tmp_path / "x" / "a")
    _native.sync_directory(tmp_path / "x")
    assert _native.file_size(tmp_path / "x" / "a") == 2
    _native.remove_file(tmp_path / "x" / "a")
    _native.remove_file(tmp_path / "x" / "a")
    assert _native.file_size(tmp_path / "x" / "a") is None


@pytest.mark.parametrize(
    ("call", "make"),
    [
        (_native.FileCall.rename, lambda path: _native.rename_file(path / "a", path / "b")),
        (_native.FileCall.sync_directory, _native.sync_directory),
        (_native.FileCall.list, _native.list_directory),
        (_native.FileCall.make_directory, lambda path: _native.make_directories(path / "c")),
        (_native.FileCall.size, lambda path: _native.file_size(path / "a")),
        (_native.FileCall.truncate, lambda path: _native.File.open_to_write(path / "a").truncate(1)),
    ],
    ids=lambda value: value.name if isinstance(value, _native.FileCall) else "",
)
def test_every_call_can_be_made_to_fail(tmp_path, call, make):
    write_file(tmp_path / "a", b"abc")
    _native.inject_fault(call, str(tmp_path), errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        make(tmp_path)
    make(tmp_path)


@given(st.binary(), st.binary())
def test_crc32c_goes_on_from_what_came_before(one, two):
    assert _native.crc32c(two, _native.crc32c(one)) == _native.crc32c(one + two)


def test_crc32c_is_castagnolis():
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(b"") == 0


# ---- locks

TAKE = """
import sys
from shoal import _native
from shoal.errors import StorageError
try:
    lock = _native.FileLock.take(sys.argv[1], "log")
    print("taken", flush=True)
    sys.stdin.read()
except StorageError as error:
    print(error, flush=True)
"""


def test_another_process_is_told_who_has_the_lock(tmp_path):
    path = tmp_path / "LOCK"
    with _native.FileLock.take(path, "log") as lock:
        assert lock.is_held
        told = subprocess.run([sys.executable, "-c", TAKE, str(path)], capture_output=True, text=True, input="")
        assert f"process {os.getpid()} (log) has it" in told.stdout
    assert not lock.is_held
    other = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "taken\n"
    with pytest.raises(StorageError, match=rf"process {other.pid} \(log\) has it"):
        _native.FileLock.take(path, "log")
    other.send_signal(signal.SIGKILL)
    other.communicate()
    _native.FileLock.take(path, "log").release()


# ---- streams


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(tmp_path, direct):
    data = torch.randint(256, (37 * MIB + 11,), dtype=torch.uint8)
    crc = 0
    with _native.FileWriter.create(tmp_path / "a", direct=direct) as writer:
        for piece in data.split(3_000_001):
            crc = writer.append_checked(piece, crc)
        writer.append(b"end")
        assert writer.position == len(data) + 3
        writer.finish()
    assert crc == _native.crc32c(data)
    out = torch.zeros_like(data)
    with _native.FileReader.open(tmp_path / "a", direct=direct) as reader:
        assert reader.size() == len(data) + 3
        for at in range(0, len(data), 1_234_567):
            reader.read(at, out[at : at + 1_234_567])
        assert reader.bytes_from_ahead() > 0
        end = bytearray(3)
        reader.read(len(data), end)
        with pytest.raises(StorageError, match="are there"):
            reader.read(len(data), bytearray(4))
    assert torch.equal(data, out)
    assert end == b"end"


@given(
    pieces=st.lists(st.integers(0, 5 * MIB), max_size=4),
    reads=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3 * MIB)), max_size=12),
)
def test_any_pieces_and_any_reads_agree(pieces, reads, tmp_path_factory):
    path = tmp_path_factory.mktemp("streams") / "a"
    data = np.arange(sum(pieces), dtype=np.uint32).view(np.uint8)[: sum(pieces)]
    with _native.FileWriter.create(path) as writer:
        at = 0
        for piece in pieces:
            assert writer.append_checked(data[at : at + piece]) == _native.crc32c(data[at : at + piece])
            at += piece
        writer.finish()
    with _native.FileReader.open(path) as reader:
        assert reader.size() == len(data)
        for place, size in reads:
            begin = int(place * len(data))
            out = np.zeros(min(size, len(data) - begin), np.uint8)
            reader.read(begin, out)
            assert np.array_equal(out, data[begin : begin + len(out)])
    path.unlink()


def test_a_full_disk_is_told_by_every_later_call(tmp_path):
    _native.inject_fault(_native.FileCall.write, str(tmp_path), errno.ENOSPC)
    with _native.FileWriter.create(tmp_path / "a") as writer:
        with pytest.raises(StorageError, match=r"No space left .* Free space on that disk, or keep the log"):
            for _ in range(10):
                writer.append(bytes(4 * MIB))
        for call in (lambda: writer.append(b"x"), lambda: writer.append_checked(b"x"), writer.finish):
            with pytest.raises(StorageError, match="No space left"):
                call()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_waits_for_threads_nor_holds_locks(tmp_path):
    write_file(tmp_path / "a", bytes(40 * MIB))
    writer = _native.FileWriter.create(tmp_path / "b")
    reader = _native.FileReader.open(tmp_path / "a")
    lock = _native.FileLock.take(tmp_path / "LOCK", "log")
    writer.append(bytes(9 * MIB))
    reader.read(0, bytearray(9 * MIB))
    child = os.fork()
    if child == 0:
        good = not lock.is_held
        try:
            writer.append(b"x")
            good = False
        except StorageError:
            pass
        reader.read(0, bytearray(9 * MIB))
        del writer, reader, lock
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lock.is_held
    with pytest.raises(StorageError, match="has it"):
        _native.FileLock.take(tmp_path / "LOCK", "log")
    writer.finish()


@pytest.mark.threads
def test_writers_and_readers_work_beside_each_other(tmp_path):
    failed = []

    def work(number):
        try:
            data = np.full(11 * MIB + number, number, np.uint8)
            for time in range(2):
                with _native.FileWriter.create(tmp_path / f"{number}-{time}") as writer:
                    for piece in np.array_split(data, 7):
                        writer.append(piece)
                    writer.finish()
                with _native.FileReader.open(tmp_path / f"{number}-{time}") as reader:
                    out = np.zeros_like(data)
                    for at in range(0, len(data), 500_000):
                        reader.read(at, out[at : at + 500_000])
                assert np.array_equal(out, data)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- power cuts


def replace(directory, data, sync):
    write_file(directory / "temporary", data, sync)
    _native.rename_file(directory / "temporary", directory / "name")


def left_by_cuts(tmp_path, sync):
    found = set()
    for seed in range(80):
        directory = tmp_path / f"{sync}-{seed}"
        directory.mkdir()
        _native.record_power_cut(str(directory))
        replace(directory, b"o" * 2000, True)
        _native.sync_directory(directory)
        replace(directory, b"n" * 2000, sync)
        _native.cut_power(seed)
        found.add((directory / "name").read_bytes())
    return found


def test_a_file_that_is_synced_and_renamed_is_the_old_or_the_new(tmp_path):
    assert left_by_cuts(tmp_path, True) == {b"o" * 2000, b"n" * 2000}


def test_a_file_that_is_renamed_without_a_sync_may_be_torn(tmp_path):
    found = left_by_cuts(tmp_path, False)
    assert {b"o" * 2000, b"n" * 2000, b""} <= found
    torn = found - {b"o" * 2000, b"n" * 2000, b""}
    assert torn
    for data in torn:
        assert all(len(set(data[at : at + 512])) == 1 and data[at] in b"\0n" for at in range(0, len(data), 512))
