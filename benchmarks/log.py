"""The change log: saving, committing, loading and recovering rows, compared with the disk and torch for as many bytes.

SHOAL_BENCH_DIR is where the files go; the system's folder for temporary files if it is not set.
"""

import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shoal
from benchmarks import memory
from benchmarks.effort import DiskSizes
from benchmarks.measure import OURS, Bench, Result
from benchmarks.peers import FIO, fio
from benchmarks.registry import Limit, Registry
from benchmarks.scratch import folder
from benchmarks.settled import settled
from benchmarks.work import keys_of

registry = Registry()
DIM = 64
PART = 0.01
SMALL_PART = 0.002
BAG = 20
CHUNK = 1 << 20
TRACKED_STEPS = 8  # between two commits: within so many steps nearly all rows change for the first time


def collection() -> shoal.EmbeddingBagCollection:
    return shoal.EmbeddingBagCollection([shoal.Table("t", DIM, optimizer=shoal.RowwiseAdagrad(lr=0.01))], seed=0)


def filled(rows: int) -> shoal.EmbeddingBagCollection:
    """Returns a collection with a table of so many rows."""
    bags = collection()
    for ids in torch.arange(rows).split(CHUNK):
        bags.table("t").assign(keys_of(ids), torch.randn(len(ids), DIM))
    return bags


def change(bags: shoal.EmbeddingBagCollection, rows: int, share: float) -> int:
    """Assigns new weights to a share of the rows, chosen at random. Returns their number."""
    ids = torch.randperm(rows)[: int(rows * share)]
    bags.table("t").assign(keys_of(ids), torch.randn(len(ids), DIM))
    return len(ids)


def memory_for(rows: int) -> int:
    """Returns the bytes of a table of so many rows, with its index and the data that is read into it."""
    return rows * (4 * DIM + 64) + (256 << 20)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def bytes_of(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def write_through(path: pathlib.Path, data: Tensor) -> None:
    """Writes the bytes to a new file and syncs it to the disk."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data.numpy())
        while len(view):
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    path.unlink()


def torch_save(path: pathlib.Path, tensors: dict[str, Tensor]) -> None:
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


@registry.case(
    "full save, dim 64",
    compares="seconds for a checkpoint of all rows to torch.save of the same tensors, both synced",
    limits={"torch.save": Limit(1.0)},
    stage="whole",
)
def save(bench: Bench) -> Result:
    rows = bench.effort.log.rows
    bags = bench.keep("table", lambda: filled(rows))
    tensors = dict(bags.state_dict().items())
    rounds: dict[str, list[float]] = {OURS: [], "torch.save": []}
    with folder() as here:
        for number in range(min(bench.effort.rounds, 4)):
            bench.say(f"round {number + 1}")
            rounds[OURS].append(seconds(lambda: shoal.save(here / "ours", bags)))
            shutil.rmtree(here / "ours")
            rounds["torch.save"].append(seconds(lambda: torch_save(here / "theirs", tensors)))
            (here / "theirs").unlink()
    size = sum(value.nbytes for value in tensors.values())
    bench.tell(f"{size / 1e9:.2f} GB; ours {size / 1e9 / min(rounds[OURS]):.2f} GB/s at best")
    return Result("s", rounds)


@registry.case(
    "commit of 1 % of the rows, dim 64",
    compares="milliseconds for a commit to write and fsync of as many bytes",
    limits={"write + fsync": Limit(3.0)},
    stage="whole",
)
def commit(bench: Bench) -> Result:
    rows = bench.effort.log.rows
    bags = bench.keep("table", lambda: filled(rows))
    rounds: dict[str, list[float]] = {OURS: [], "write + fsync": []}
    with folder() as here, shoal.ChangeLog(here / "log", segment="100GiB") as log:
        bench.say("first commit")
        log.commit(bags)
        for number in range(bench.effort.rounds + 1):
            bench.say(f"round {number}")
            changed = change(bags, rows, PART)
            before = bytes_of(here / "log")
            ours = seconds(lambda: log.commit(bags))
            assert log.newest is not None and log.newest.tables["t"].puts == changed
            data = torch.randint(0, 255, (bytes_of(here / "log") - before,), dtype=torch.uint8)
            theirs = seconds(lambda data=data: write_through(here / "plain", data))
            if number:  # the first round touches memory for the first time
                rounds[OURS].append(ours * 1e3)
                rounds["write + fsync"].append(theirs * 1e3)
    return Result("ms", rounds)


@registry.case(
    "load, dim 64",
    compares="GB of rows a second to what is asked: 1, or .8 of the disk's sequential reads where these are slower",
    limits={"asked": Limit(1.0)},
    stage="whole",
)
def load(bench: Bench) -> Result:
    rows = bench.effort.log.rows
    bags = bench.keep("table", lambda: filled(rows))
    rounds: dict[str, list[float]] = {OURS: [], "asked": []}
    with folder() as here:
        shoal.save(here / "saved", bags)
        size = bytes_of(here / "saved" / "snapshots")
        with settled(memory_for(rows)) as free:
            for number in range(min(bench.effort.rounds, 4) + 1):
                bench.say(f"round {number}")
                other = collection()
                free.give()
                ours = size / 1e9 / seconds(lambda other=other: shoal.load(here / "saved", other))
                assert len(other.table("t")) == rows
                del other
                asked = _asked(here, bench.effort.disk) if FIO.is_installed else None
                if number:
                    rounds[OURS].append(ours)
                    if asked is not None:
                        rounds["asked"].append(asked)
    return Result("GB/s", {name: values for name, values in rounds.items() if values}, higher_is_better=True)


def _asked(here: pathlib.Path, sizes: DiskSizes) -> float:
    """Returns the gigabytes of rows a second that a load should reach."""
    read = fio.run(here / "fio", "read", "4M", 8, sizes.file_bytes, sizes.turn_seconds)["bytes"]
    return min(1.0, 0.8 * read / 1e9)


@registry.case(
    "memory of a load, dim 64",
    compares="MB resident at most while a table is loaded to what the table takes and 256 MB",
    limits={"allowed": Limit(1.0)},
    stage="memory",
)
def load_memory(bench: Bench) -> Result:
    bench.say("loading in another process")
    taken: dict[str, Any] = memory.probe("load", "--dim", str(DIM), "--rows", str(bench.effort.log.rows))
    bench.tell(f"the table takes {taken['table'] / 1e6:.0f} MB")
    return Result("MB", {OURS: [taken["taken"] / 1e6], "allowed": [taken["table"] / 1e6 + 256]})


@registry.case(
    "recover a snapshot and 100 commits of .2 %, dim 64",
    compares="seconds to those of a load of as many bytes",
    limits={"load": Limit(1.3)},
    stage="whole",
)
def recover(bench: Bench) -> Result:
    rows = bench.effort.log.rows
    rounds: dict[str, list[float]] = {OURS: [], "load": []}
    with folder() as here:
        commits = bench.effort.log.commits
        bench.say(f"{commits} commits in another process")
        died = subprocess.run([sys.executable, "-m", "benchmarks.log", str(here), str(rows), str(commits)])
        assert died.returncode == -signal.SIGKILL, died
        size = bytes_of(here / "log" / "segments") + bytes_of(here / "log" / "snapshots")
        whole = bytes_of(here / "saved" / "snapshots")
        with settled(memory_for(rows)) as free:
            for number in range(min(bench.effort.rounds, 4) + 1):
                bench.say(f"round {number}")
                other = collection()
                free.give()
                ours = seconds(lambda other=other: shoal.recover(here / "log", other))
                assert len(other.table("t")) == rows
                other = collection()
                free.give()
                theirs = seconds(lambda other=other: shoal.load(here / "saved", other)) * size / whole
                del other
                if number:
                    rounds[OURS].append(ours)
                    rounds["load"].append(theirs)
    bench.tell(f"{min(rounds[OURS]) * 1e8 / rows:.0f} s for 100M rows at best")
    return Result("s", rounds)


def die(here: pathlib.Path, rows: int, commits: int) -> None:
    """Leaves a log of a snapshot and commits, and a checkpoint of the same rows, as a killed process does."""
    bags = filled(rows)
    shoal.save(here / "log", bags)
    shoal.recover(here / "log", bags)
    log = shoal.ChangeLog(here / "log")
    for _ in range(commits):
        change(bags, rows, SMALL_PART)
        log.commit(bags)
    shoal.save(here / "saved", bags)
    os.kill(os.getpid(), signal.SIGKILL)


def batches(rows: int, bags: int, count: int) -> list[shoal.KeyedJaggedTensor]:
    lengths = torch.full((bags,), BAG)
    return [
        shoal.KeyedJaggedTensor(["t"], keys_of(torch.randint(0, rows, (bags * BAG,))), lengths=lengths)
        for _ in range(count)
    ]


def step(bags: shoal.EmbeddingBagCollection, batch: shoal.KeyedJaggedTensor) -> None:
    out = bags(batch).values()
    out.backward(torch.ones_like(out))


@registry.case(
    "train, changes tracked, dim 64",
    compares="milliseconds of a step to the same without a log, commits not counted",
    limits={"without": Limit(1.02)},
    stage="tracking",
)
def tracking(bench: Bench) -> Result:
    sizes = bench.effort.log
    rows = sizes.rows // 10
    work = batches(rows, sizes.bags, sizes.batches)
    both = {OURS: filled(rows), "without": filled(rows)}
    rounds: dict[str, list[float]] = {name: [] for name in both}
    number = 0
    gc.collect()
    gc.disable()  # its turns are longer than the difference to be measured
    try:
        with folder() as here, shoal.ChangeLog(here / "log", fsync="never") as log:
            for turn in range(sizes.turns):
                log.commit(both[OURS])  # otherwise all rows would soon be marked as changed
                taken: dict[str, list[float]] = {name: [] for name in both}
                for at in range(TRACKED_STEPS + 1):
                    # Each goes first in turn, because the second one finds the batch in the caches.
                    for name in (list(both), list(both)[::-1])[at % 2]:
                        batch = work[number % len(work)]
                        spent = seconds(lambda name=name, batch=batch: step(both[name], batch))
                        if at:  # after a commit caches are cold
                            taken[name].append(spent)
                    number += 1
                for name, each in taken.items():
                    rounds[name].append(1e3 * sum(each) / len(each))
                bench.say(f"turn {turn + 1}")
    finally:
        gc.enable()
    return Result("ms", rounds)


@registry.case(
    "train beside compaction, dim 64",
    compares="milliseconds of a step while the log is compacted in a thread, to those before and after it",
    limits={"alone": Limit(1.5)},
    stage="beside",
)
def beside(bench: Bench) -> Result:
    sizes = bench.effort.log
    rows = sizes.rows
    bags, work = filled(rows), batches(rows, sizes.bags, 16)
    rounds: dict[str, list[float]] = {OURS: [], "alone": []}
    with folder() as here:
        shoal.save(here / "log", bags)
        shoal.recover(here / "log", bags)
        with shoal.ChangeLog(here / "log") as log:
            for number in range(min(bench.effort.rounds, 4)):
                bench.say(f"round {number + 1}")
                change(bags, rows, PART)
                log.commit(bags)
                alone = [seconds(lambda n=n: step(bags, work[n % 16])) for n in range(sizes.alone_steps)]
                compaction = threading.Thread(target=log.compact)
                compaction.start()
                meanwhile: list[float] = []
                while compaction.is_alive() or not meanwhile:
                    batch = work[len(meanwhile) % 16]
                    meanwhile.append(seconds(lambda batch=batch: step(bags, batch)))
                compaction.join()
                # Also after it: written bytes go to the disk for a while after a commit.
                alone += [seconds(lambda n=n: step(bags, work[n % 16])) for n in range(sizes.alone_steps)]
                rounds[OURS].append(1e3 * sum(meanwhile) / len(meanwhile))
                rounds["alone"].append(1e3 * sum(alone) / len(alone))
                bench.tell(f"{len(meanwhile)} steps meanwhile, the longest {1e3 * max(meanwhile):.0f} ms")
    return Result("ms", rounds)


if __name__ == "__main__":
    die(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
