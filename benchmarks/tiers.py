"""Rows below memory, compared with fio and RocksDB in the same run, on the same file system.

SHOAL_BENCH_DIR is where the files go; the system's folder for temporary files if it is not set.
"""

import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.check import same_rows
from benchmarks.effort import DiskSizes
from benchmarks.measure import OURS, Bench, Result
from benchmarks.peers import FIO, ROCKSDB, fio
from benchmarks.peers.rocksdb import Rocks
from benchmarks.registry import Limit, Registry
from benchmarks.scratch import folder
from shoal.storage import SsdStorage

registry = Registry()
ROW_BYTES = 256


def rate(work: Callable[[], int], seconds: float) -> float:
    """Measures how much `work` is done in a second."""
    begin, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds:
        done += work()
    return done / spent


def in_turn(bench: Bench, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measures rounds in which each contender gives a value."""
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(bench.effort.rounds):
        bench.say(f"round {number + 1}")
        for name, measure in contenders.items():
            rounds[name].append(measure())
    return rounds


def rows_for(keys: Tensor) -> Tensor:
    return (keys[:, None] + torch.arange(ROW_BYTES)).to(torch.uint8)


def fill(storage: SsdStorage | Rocks, rows: int, at_once: int) -> None:
    for keys in torch.randperm(rows).split(at_once):
        storage.write(keys, rows_for(keys))


@registry.case(
    "ssd random reads, 256-byte rows, depth {depth}",
    compares="rows read a second to fio's random direct reads of 4 KiB",
    limits={"fio": Limit(0.8)},
    stage="reads",
    depth=(32, 128),
)
def reads(bench: Bench, depth: int) -> Result:
    sizes = bench.effort.disk
    with folder() as here:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, 2 * sizes.file_bytes, depth=depth)
        bench.say("filling")
        rows = min(sizes.file_bytes // 4096 * 15, storage.capacity)
        fill(storage, rows, sizes.write_rows)

        def read() -> int:
            keys = torch.randint(0, rows, (sizes.read_rows,)).unique()
            before = storage.stats().reads
            _rows, found = storage.read(keys)
            assert bool(found.all())
            return storage.stats().reads - before  # blocks: some rows share one

        def read_by_fio() -> float:
            theirs = fio.run(here / "fio", "randread", "4k", depth, sizes.file_bytes, sizes.turn_seconds)
            return theirs["requests"] / 1e3

        contenders = {OURS: lambda: rate(read, sizes.turn_seconds) / 1e3}
        if FIO.is_installed:
            fio.run(here / "fio", "write", "1M", 8, sizes.file_bytes, sizes.turn_seconds / 2)
            contenders["fio"] = read_by_fio
        rounds = in_turn(bench, contenders)
        storage.close()
    return Result("k reads/s", rounds, higher_is_better=True)


@registry.case(
    "ssd random reads beside RocksDB, 256-byte rows",
    compares="rows read a second, none cached, to RocksDB's with 32 threads, direct reads and a quarter of it cached",
    limits={},
    stage="reads beside RocksDB",
)
def reads_beside_rocksdb(bench: Bench) -> Result:
    depth, sizes = 32, bench.effort.disk
    row_count = sizes.rocks_rows

    def keys() -> Tensor:
        return torch.randint(0, row_count, (sizes.read_rows,)).unique()

    with folder() as here, ThreadPoolExecutor(depth) as threads, ExitStack() as closing:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, 3 * row_count * ROW_BYTES, depth=depth)
        closing.callback(storage.close)
        bench.say("filling")
        fill(storage, row_count, sizes.write_rows)
        some = keys()
        same_rows("rows of shoal", storage.read(some)[0], rows_for(some))

        def read() -> int:
            _rows, found = storage.read(keys())
            return int(found.sum())

        contenders = {OURS: lambda: rate(read, sizes.turn_seconds) / 1e3}
        if ROCKSDB.is_installed:
            rocks = Rocks(here / "rocks", row_count * ROW_BYTES // 4)
            closing.callback(rocks.close)
            fill(rocks, row_count, sizes.write_rows)
            rocks.settle()
            same_rows(
                "rows of rocksdb",
                torch.frombuffer(bytearray(b"".join(rocks.read(some))), dtype=torch.uint8).view(len(some), ROW_BYTES),
                rows_for(some),
            )

            def read_rocks() -> int:
                return sum(map(len, threads.map(rocks.read, keys().chunk(depth))))

            contenders[rocks.name] = lambda: rate(read_rocks, sizes.turn_seconds) / 1e3
        rounds = in_turn(bench, contenders)
    return Result("k rows/s", rounds, higher_is_better=True)


def _written_a_second(here: pathlib.Path, sizes: DiskSizes) -> float:
    storage = SsdStorage(str(here / "rows"), ROW_BYTES, 4 * sizes.file_bytes)
    # Made before the clock runs: after each, torch's threads would take a core from the store for a while.
    batches = torch.arange(storage.capacity).split(sizes.write_rows)[:-1]
    rows, number = rows_for(batches[0]), 0

    def write() -> int:
        nonlocal number
        storage.write(batches[number], rows)
        number = (number + 1) % len(batches)
        return rows.numel()

    bytes_a_second = rate(write, sizes.turn_seconds)
    storage.close()
    return bytes_a_second


@registry.case(
    "ssd writes, 256-byte rows in batches of 16 MiB",
    compares="rows' bytes written a second to fio's sequential direct writes of 1 MiB",
    limits={"fio": Limit(0.6)},
    stage="writes",
)
def writes(bench: Bench) -> Result:
    sizes = bench.effort.disk
    with folder() as here:

        def written_by_fio() -> float:
            wrote = fio.run(here / "fio", "write", "1M", 8, sizes.file_bytes, sizes.turn_seconds)["bytes"]
            return wrote / 2**20

        contenders = {OURS: lambda: _written_a_second(here, sizes) / 2**20}
        if FIO.is_installed:
            contenders["fio"] = written_by_fio
        rounds = in_turn(bench, contenders)
    return Result("MiB/s", rounds, higher_is_better=True)


@registry.case(
    "ssd write amplification, half of the files garbage",
    compares="bytes written to those that rows brought, once rows are overwritten at random in a full store",
    limits={"allowed": Limit(1.0)},
    stage="writes",
)
def amplification(bench: Bench) -> Result:
    sizes = bench.effort.disk
    with folder() as here:
        storage = SsdStorage(str(here / "rows"), ROW_BYTES, sizes.overwritten_bytes)
        fill(storage, storage.capacity, sizes.write_rows)
        found = []
        for _ in range(min(bench.effort.rounds, 3)):
            before = storage.stats()
            for _ in range(sizes.overwrites):
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
