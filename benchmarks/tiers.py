"""Rows below memory, beside what the disk does by fio, and RocksDB, in the same run, on the same file system.

SHOAL_BENCH_DIR is where the files go; the system's folder for temporary files if it is not set.
"""

import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.check import same_rows
from benchmarks.measure import OURS, Bench, Result
from benchmarks.peers import fio
from benchmarks.peers.rocksdb import Rocks
from benchmarks.registry import Limit, Registry
from benchmarks.scratch import folder
from shoal.storage import SsdStorage

registry = Registry()
ROW_BYTES = 256
FILE_BYTES = 1 << 30
SECONDS = 2.0
READ_ROWS = 20_000
WRITE_ROWS = 65_536
ROCKS_ROWS = 1_000_000  # 256 MiB: it takes rows one by one


def rate(work: Callable[[], int], seconds: float = SECONDS) -> float:
    """What `work` counts, a second."""
    begin, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds:
        done += work()
    return done / spent


def rows_for(keys: Tensor) -> Tensor:
    return (keys[:, None] + torch.arange(ROW_BYTES)).to(torch.uint8)


def fill(storage: SsdStorage | Rocks, rows: int) -> None:
    for keys in torch.randperm(rows).split(WRITE_ROWS):
        storage.write(keys, rows_for(keys))


@registry.case(
    "ssd random reads, 256-byte rows, depth {depth}",
    compares="rows read a second to fio's random direct reads of 4 KiB",
    limits={"fio": Limit(0.8)},
    stage="reads",
    depth=(32, 128),
)
def reads(bench: Bench, depth: int) -> Result:
    with folder() as here:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, 2 * FILE_BYTES, depth=depth)
        bench.say("filling")
        rows = min(FILE_BYTES // 4096 * 15, storage.capacity)
        fill(storage, rows)
        fio.run(here / "fio", "write", "1M", 8, FILE_BYTES, 1)
        rounds: dict[str, list[float]] = {OURS: [], "fio": []}

        def read() -> int:
            keys = torch.randint(0, rows, (READ_ROWS,)).unique()
            before = storage.stats().reads
            _rows, found = storage.read(keys)
            assert bool(found.all())
            return storage.stats().reads - before  # blocks: some rows share one

        for number in range(bench.effort.rounds):
            bench.say(f"round {number + 1}")
            rounds[OURS].append(rate(read) / 1e3)
            rounds["fio"].append(fio.run(here / "fio", "randread", "4k", depth, FILE_BYTES, SECONDS)["requests"] / 1e3)
        storage.close()
    return Result("k reads/s", rounds, higher_is_better=True)


@registry.case(
    "ssd random reads beside RocksDB, 256-byte rows",
    compares="rows read a second, none cached, to RocksDB's with 32 threads, direct reads and a quarter of it cached",
    limits={},
    stage="reads beside RocksDB",
)
def reads_beside_rocksdb(bench: Bench) -> Result:
    depth = 32
    with folder() as here, ThreadPoolExecutor(depth) as threads:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, 3 * ROCKS_ROWS * ROW_BYTES, depth=depth)
        rocks = Rocks(here / "rocks", ROCKS_ROWS * ROW_BYTES // 4)
        bench.say("filling")
        for one in (storage, rocks):
            fill(one, ROCKS_ROWS)
        rocks.settle()

        def keys() -> Tensor:
            return torch.randint(0, ROCKS_ROWS, (READ_ROWS,)).unique()

        def read() -> int:
            _rows, found = storage.read(keys())
            return int(found.sum())

        def read_rocks() -> int:
            return sum(map(len, threads.map(rocks.read, keys().chunk(depth))))

        some = keys()
        same_rows("rows of shoal", storage.read(some)[0], rows_for(some))
        same_rows(
            "rows of rocksdb",
            torch.frombuffer(bytearray(b"".join(rocks.read(some))), dtype=torch.uint8).view(len(some), ROW_BYTES),
            rows_for(some),
        )
        rounds: dict[str, list[float]] = {OURS: [], rocks.name: []}
        for number in range(bench.effort.rounds):
            bench.say(f"round {number + 1}")
            rounds[OURS].append(rate(read) / 1e3)
            rounds[rocks.name].append(rate(read_rocks) / 1e3)
        rocks.close()
        storage.close()
    return Result("k rows/s", rounds, higher_is_better=True)


def _written_a_second(here: pathlib.Path) -> float:
    storage = SsdStorage(str(here / "rows"), ROW_BYTES, 4 * FILE_BYTES)
    # Made before: torch's threads would take a core from the store for a while after each.
    batches = torch.arange(storage.capacity).split(WRITE_ROWS)[:-1]
    rows, number = rows_for(batches[0]), 0

    def write() -> int:
        nonlocal number
        storage.write(batches[number], rows)
        number = (number + 1) % len(batches)
        return rows.numel()

    bytes_a_second = rate(write)
    storage.close()
    return bytes_a_second


@registry.case(
    "ssd writes, 256-byte rows in batches of 16 MiB",
    compares="rows' bytes written a second to fio's sequential direct writes of 1 MiB",
    limits={"fio": Limit(0.6)},
    stage="writes",
)
def writes(bench: Bench) -> Result:
    with folder() as here:
        rounds: dict[str, list[float]] = {OURS: [], "fio": []}
        for number in range(bench.effort.rounds):
            bench.say(f"round {number + 1}")
            rounds[OURS].append(_written_a_second(here) / 2**20)
            wrote = fio.run(here / "fio", "write", "1M", 8, FILE_BYTES, SECONDS)["bytes"]
            rounds["fio"].append(wrote / 2**20)
    return Result("MiB/s", rounds, higher_is_better=True)


@registry.case(
    "ssd write amplification, half of the files garbage",
    compares="bytes written to those that rows brought, once rows are overwritten at random in a full store",
    limits={"allowed": Limit(1.0)},
    stage="writes",
)
def amplification(bench: Bench) -> Result:
    with folder() as here:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, 256 << 20)
        fill(storage, storage.capacity)
        found = []
        for _ in range(3):
            before = storage.stats()
            for _ in range(60):
                keys = torch.randperm(storage.capacity)[:8192]
                storage.write(keys, rows_for(keys))
            after = storage.stats()
            written, collected = (
                after.written_bytes - before.written_bytes,
                after.collected_bytes - before.collected_bytes,
            )
            found.append((written + collected) / written)
        storage.close()
    return Result("x", {OURS: found, "allowed": [2.0] * len(found)})
