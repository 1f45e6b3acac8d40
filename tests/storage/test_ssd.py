"""Rows on disk: budgets, faults and what is left behind."""

import errno
import os
import re
import subprocess
import sys

import pytest
import torch

from shoal import _native
from shoal.errors import DeviceError, InputError, StorageError
from shoal.storage import SsdStorage

pytestmark = pytest.mark.threads


@pytest.fixture(autouse=True)
def no_faults_after():
    yield
    _native.clear_faults()


def rows_of(keys, version=0, row_bytes=64):
    return ((keys[:, None] * 7 + version + torch.arange(row_bytes)) % 251).to(torch.uint8)


@pytest.fixture(params=["io_uring", "threads"])
def storage(tmp_path, request):
    try:
        made = SsdStorage(str(tmp_path / "rows"), 64, 8 << 20, io=request.param)
    except DeviceError:
        pytest.skip("io_uring is not allowed here")
    yield made
    made.close()


def files(tmp_path):
    return sorted((tmp_path / "rows").glob("*.seg"))


def test_a_disk_that_is_full_loses_no_row_and_is_written_to_again(storage):
    keys = torch.arange(1000)
    storage.write(keys, rows_of(keys))
    _native.inject_fault(_native.FileCall.write, ".seg", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"\.seg\] writing .* No space left on device .* Free space"):
        storage.write(keys[:20], rows_of(keys[:20], 1))
    assert torch.equal(storage.read(keys)[0], rows_of(keys))
    storage.write(keys[:20], rows_of(keys[:20], 1))
    assert torch.equal(storage.read(keys[:20])[0], rows_of(keys[:20], 1))


def test_a_read_that_fails_says_which_file_and_can_be_made_again(storage):
    keys = torch.arange(1000)
    storage.write(keys, rows_of(keys))
    _native.inject_fault(_native.FileCall.read, ".seg", errno.EIO)
    with pytest.raises(StorageError, match=r"\.seg\] reading 4096 bytes at \d+ failed: Input/output error") as raised:
        storage.read(keys)
    assert re.search(r"the rows of \d+ keys: \d+, .* Try again, .* Else `erase` these", str(raised.value))
    assert 1 < len(raised.value.keys) < 1000
    assert torch.equal(storage.read(keys)[0], rows_of(keys))


def test_a_damaged_block_is_named_and_its_rows_can_be_written_anew(storage, tmp_path):
    keys = torch.arange(1000)
    storage.write(keys, rows_of(keys))
    with open(files(tmp_path)[0], "r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)[0]
        file.seek(4096 + 100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(StorageError, match=r"\.seg\] the block at 4096 is not what was written there") as all_of_them:
        storage.read(keys)
    assert storage.stats().damaged == 1
    lost = all_of_them.value.keys
    assert f"the rows of {len(lost)} keys: {lost[0]}, {lost[1]}, " in str(all_of_them.value)
    with pytest.raises(StorageError, match=rf"1 key: {lost[3]}\. They are lost, the others are not\. `erase` them"):
        storage.read(torch.tensor([int(lost[-1]) + 1, lost[3]]))
    others = keys[~torch.isin(keys, lost)]
    assert torch.equal(storage.read(others)[0], rows_of(others))
    storage.write(keys, rows_of(keys, 2))
    assert torch.equal(storage.read(keys)[0], rows_of(keys, 2))


def test_an_error_has_all_keys_of_its_call_that_cannot_be_read(storage, tmp_path):
    keys = torch.arange(20_000)
    storage.write(keys, rows_of(keys))
    for number, file in enumerate(files(tmp_path)[:5]):
        os.truncate(file, number * 4096)
    with pytest.raises(StorageError, match=r"The file was cut\..* There are 2 more such files\.") as raised:
        storage.read(keys.flip(0))
    lost, left = raised.value.keys, storage.stats().rows
    assert lost.dtype == torch.int64 and torch.equal(lost, torch.unique(lost)) and len(lost) > 5000
    assert raised.value.table is None
    assert storage.erase(lost) == len(lost)
    rows, found = storage.read(keys)
    assert torch.equal(keys[~found], lost) and torch.equal(rows[found], rows_of(keys[found]))
    assert storage.stats().rows == left - len(lost)


def test_of_several_that_are_read_together_each_has_its_own_error(tmp_path):
    storages = [SsdStorage(str(tmp_path / name), 64, 8 << 20) for name in ("one", "two", "three")]
    for count in (200, 2000):  # by one thread, and by several
        keys = torch.arange(count)
        for storage in storages:
            storage.write(keys, rows_of(keys))
        for name in ("two", "three"):
            for file in (tmp_path / name).glob("*.seg"):
                os.truncate(file, 0)
        one, two, three = SsdStorage.read_together(storages, [keys, keys[10:20], keys[::2]])
        assert one.found.all() and torch.equal(one.rows, rows_of(keys)) and one.has == count
        assert isinstance(two, StorageError) and "/two/" in str(two) and torch.equal(two.keys, keys[10:20])
        assert isinstance(three, StorageError) and "/three/" in str(three) and torch.equal(three.keys, keys[::2])


def test_rows_that_the_system_has_no_means_to_ask_for_are_not_named_as_lost(storage):
    keys = torch.arange(1000)
    storage.write(keys, rows_of(keys))
    _native.inject_fault(_native.FileCall.read, ".seg", errno.EMFILE, 3, 1)
    with pytest.raises(StorageError, match="ulimit -n") as raised:
        storage.read(keys)
    assert raised.value.keys is None


def test_a_directory_has_one_owner_which_others_are_told(storage, tmp_path):
    with pytest.raises(StorageError, match=rf"process {os.getpid()} has it"):
        SsdStorage(str(tmp_path / "rows"), 64, 8 << 20)
    code = (
        "import sys; from shoal.storage import SsdStorage\n"
        "try: SsdStorage(sys.argv[1], 64, 8 << 20)\n"
        "except OSError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows")], capture_output=True, text=True)
    assert f"process {os.getpid()} has it" in told.stdout, told.stderr


def test_what_a_killed_process_left_is_removed(tmp_path):
    code = (
        "import os, signal, sys, torch; from shoal.storage import SsdStorage\n"
        "storage = SsdStorage(sys.argv[1], 64, 8 << 20)\n"
        "storage.write(torch.arange(1000), torch.zeros(1000, 64, dtype=torch.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows")], capture_output=True)
    assert files(tmp_path)
    storage = SsdStorage(str(tmp_path / "rows"), 64, 8 << 20)
    assert not files(tmp_path) and len(storage) == 0


def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not be made: .* Name a directory that can be made"):
        SsdStorage(str(tmp_path / "file" / "rows"), 64, 8 << 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            _native.FileCall.make_directory,
            r"rows\] the directory could not be made: Permission denied .* Make it writable",
        ),
        (_native.FileCall.open, r"rows/LOCK\] could not be opened: Permission denied .* Make it writable"),
        (_native.FileCall.list, r"rows\] the directory could not be read: Permission denied .* Make it writable"),
    ],
    ids=["made", "locked", "read"],
)
def test_a_directory_that_is_refused_is_named(tmp_path, call, message):
    _native.inject_fault(call, str(tmp_path / "rows"), errno.EACCES)
    with pytest.raises(StorageError, match=message):
        SsdStorage(str(tmp_path / "rows"), 64, 8 << 20)
    SsdStorage(str(tmp_path / "rows"), 64, 8 << 20).close()


def test_a_directory_is_free_once_its_process_was_killed_even_if_a_child_of_it_lives(tmp_path):
    code = (
        "import os, signal, sys; from shoal.storage import SsdStorage\n"
        "storage = SsdStorage(sys.argv[1], 64, 8 << 20)\n"
        "if os.fork() == 0: print('alive', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "rows")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "alive\n"
        process.wait()
        SsdStorage(str(tmp_path / "rows"), 64, 8 << 20).close()
        process.stdin.close()  # which the child waits for


def test_a_size_below_a_few_segments_is_refused(tmp_path):
    with pytest.raises(StorageError, match=r"need a store of \d+ bytes at least; got 4096. Raise Ssd\(size=\)"):
        SsdStorage(str(tmp_path / "rows"), 64, 4096)


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        (
            torch.arange(3),
            torch.zeros(3, 32, dtype=torch.uint8),
            r"rows must be uint8 \[3, 64\] on cpu; got .*\[3, 32\]",
        ),
        (torch.arange(3), torch.zeros(2, 64, dtype=torch.uint8), r"rows must be uint8 \[3, 64\]"),
        (torch.arange(3), torch.zeros(3, 64), "rows must be uint8"),
        (torch.arange(3, dtype=torch.int32), torch.zeros(3, 64, dtype=torch.uint8), r"keys must be int64 \[n\]"),
        (torch.tensor([5, 1, 5]), torch.zeros(3, 64, dtype=torch.uint8), "keys must all be different"),
    ],
)
def test_tensors_of_another_shape_are_refused(storage, keys, rows, message):
    with pytest.raises(InputError, match=message):
        storage.write(keys, rows)
    assert len(storage) == 0


def test_tensors_need_not_be_contiguous(storage):
    keys = torch.arange(200)
    storage.write(keys[::2], rows_of(keys)[::2])
    rows, found = storage.read(keys.flip(0)[::3])
    assert torch.equal(found, keys.flip(0)[::3] % 2 == 0)
    assert torch.equal(rows[found], rows_of(keys.flip(0)[::3][found]))


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for settings in ({"row_bytes": 0}, {"depth": 0}, {"io": "uring"}):
        with pytest.raises(InputError, match=r"must be 1 or more|io is one of auto, io_uring, threads; got 'uring'"):
            SsdStorage(str(tmp_path / "rows"), **{"row_bytes": 64, "size": 8 << 20, **settings})


def test_a_closed_storage_says_so(storage):
    storage.close()
    with pytest.raises(StorageError, match="was closed"):
        storage.read(torch.arange(2))


def test_a_storage_stays_where_it_was_made(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    storage = SsdStorage("rows", 64, 64 << 20)
    monkeypatch.chdir(tmp_path / "there")
    rows = torch.randint(0, 255, (300_000, 64), dtype=torch.uint8)
    keys = torch.arange(len(rows))
    storage.write(keys, rows)
    assert torch.equal(storage.read(keys)[0], rows)
    storage.close()
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's own heap does not survive it")
def test_several_are_read_though_the_system_has_no_thread_to_give(tmp_path):
    # Each thread wants 64 MiB of address space for its stack: there is room for one or none, and for all else.
    code = """if True:
        import resource, sys, torch
        from shoal.storage import SsdStorage
        keys = torch.arange(2000)
        storages = [SsdStorage(f"{sys.argv[1]}/{i}", 64, 8 << 20) for i in range(6)]
        for i, storage in enumerate(storages):
            storage.write(keys, torch.full((2000, 64), i, dtype=torch.uint8))
        SsdStorage.read_together(storages, [keys] * 6)
        for extra in (100, 40):
            mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + extra * 2**20, -1))
            answers = SsdStorage.read_together(storages, [keys] * 6)
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            for i, (rows, found, _has) in enumerate(answers):
                assert found.all() and (rows == i).all()
        print("all were read")
    """
    command = ["sh", "-c", 'ulimit -s 65536 && exec "$0" "$@"', sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0 and "all were read" in told.stdout, told.stderr


def test_where_no_file_can_be_opened_for_a_ring_rows_are_read_by_threads(tmp_path):
    code = """
import os, resource, sys, torch
from shoal.storage import SsdStorage

storages = [SsdStorage(f"{sys.argv[1]}/{number}", 64, 8 << 20) for number in range(6)]
keys = torch.arange(2000)
rows = torch.randint(256, (2000, 64), dtype=torch.uint8)
for storage in storages:
    storage.write(keys, rows)
limit = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
for read, found, _has in SsdStorage.read_together(storages, [keys] * 6):
    assert found.all() and torch.equal(read, rows)
print("read")
"""
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert told.stdout == "read\n", told.stderr


def test_folders_of_collections_go_with_them(tmp_path):
    storages = [SsdStorage(str(tmp_path / "own" / "bags-0" / name), 64, 8 << 20) for name in ("users", "items")]
    for storage in storages:
        storage.close()
    assert not list((tmp_path / "own").iterdir())
