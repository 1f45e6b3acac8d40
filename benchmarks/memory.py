"""Resident memory of one table, in a process of its own: in a used process, freed memory would hide the table's.

python -m benchmarks.memory grow --dim 64 --rows 125000 2000000 --judged-from 100000
python -m benchmarks.memory erase --dim 64 --rows 4000000
python -m benchmarks.memory tiers --dim 64 --rows 2000000 --steps 400
python -m benchmarks.memory load --dim 64 --rows 10000000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import shoal
from benchmarks.work import chunks, keys_of

STEP_KEYS = 2048  # small, so that a jump is the table's and not the batch's
CHUNK = 1 << 12
BATCHES_AFTER_ERASE = 64
LENGTHS = torch.ones(STEP_KEYS, dtype=torch.int64)


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def peak_since_reset() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Subject:
    """A collection of one table that is trained on keys by number."""

    def __init__(self, dim: int, tiers: Sequence[Any] | None = None) -> None:
        self.table = shoal.Table("t", dim, tiers=tiers)
        self.bags = shoal.EmbeddingBagCollection([self.table], device="cpu", seed=0)
        self.handle = self.bags.table("t")
        self.gradient = torch.ones(STEP_KEYS, dim)

    def train(self, numbers: torch.Tensor) -> None:
        lengths = torch.ones(len(numbers), dtype=torch.int64)
        features = shoal.KeyedJaggedTensor(keys=["t"], values=keys_of(numbers), lengths=lengths)
        self.bags(features).values().backward(self.gradient[: len(numbers)])


def warm(dim: int) -> None:
    """Allocates everything that a process allocates only once."""
    subject = Subject(dim)
    for numbers in chunks(4 * STEP_KEYS, STEP_KEYS):
        subject.train(numbers)
    subject.handle.erase(keys_of(torch.arange(100)))


def grow(dim: int, rows: list[int], judged_from: int) -> dict[str, object]:
    warm(dim)
    subject = Subject(dim)
    start = before = resident()
    taken: dict[int, float] = {}
    largest_jump = 0.0
    wanted = sorted(rows)
    done = 0
    while wanted:
        size = min(STEP_KEYS, wanted[0] - done)
        numbers = torch.arange(done, done + size)
        reset_peak()
        subject.train(numbers)
        if done >= judged_from:
            largest_jump = max(largest_jump, (peak_since_reset() - before) / (before - start))
        done += size
        before = resident()
        if done == wanted[0]:
            taken[wanted.pop(0)] = (before - start) / done
    return {"row_bytes": subject.table.row_bytes, "bytes_per_row": taken, "largest_jump": largest_jump}


def erase(dim: int, rows: int) -> dict[str, object]:
    warm(dim)
    subject = Subject(dim)
    start = resident()
    values = torch.zeros(CHUNK, dim)
    for numbers in chunks(rows, CHUNK):
        subject.handle.assign(keys_of(numbers), values[: len(numbers)])
    full = resident() - start
    order = torch.from_numpy(np.random.default_rng(0).permutation(rows))
    dead, alive = order[: rows * 3 // 4], order[rows * 3 // 4 :]
    for chosen in dead.split(CHUNK):
        subject.handle.erase(keys_of(chosen))
    at_once = resident() - start
    for chosen in alive[: BATCHES_AFTER_ERASE * STEP_KEYS].split(STEP_KEYS):
        subject.train(chosen)
    return {"full": full, "at_once": at_once, "after_batches": resident() - start, "alive_rows": len(alive)}


def tiers(dim: int, rows: int, steps: int) -> dict[str, object]:
    """Returns the most resident memory of filling and training a table with memory for a quarter of its rows."""
    row_bytes = shoal.Table("t", dim).row_bytes + 32
    budget, disk = rows * row_bytes // 4, 4 * rows * row_bytes
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DIR")) as folder:

        def work(subject: Subject, below: int) -> None:
            for numbers in chunks(below, STEP_KEYS):
                subject.train(numbers)
            batches = [torch.from_numpy(random.integers(0, below, STEP_KEYS)) for _ in range(steps)]
            loader = [shoal.KeyedJaggedTensor(["t"], keys_of(one), lengths=LENGTHS) for one in batches]
            for features in shoal.prefetch(loader, subject.bags):
                subject.bags(features).values().backward(subject.gradient)

        work(Subject(dim, [shoal.Dram("16MiB"), shoal.Ssd(f"{folder}/tiny", "256MiB")]), 4 * STEP_KEYS)
        start = resident()
        reset_peak()
        subject = Subject(dim, [shoal.Dram(budget), shoal.Ssd(f"{folder}/rows", disk)])
        work(subject, rows)
        stats = subject.bags.stats()["t"].tiers
        return {
            "taken": peak_since_reset() - start,
            "budget": budget,
            "rows": stats[1].rows,
            "disk_index": stats[1].index_bytes,
        }


def load(dim: int, rows: int) -> dict[str, object]:
    """Returns the most memory that was resident while a checkpoint was loaded into a table."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DIR")) as folder:
        probe("save", "--dim", str(dim), "--rows", str(STEP_KEYS), str(rows), "--path", folder)
        shoal.load(f"{folder}/{STEP_KEYS}", Subject(dim).bags)  # imports are not counted
        start = resident()
        reset_peak()
        subject = Subject(dim)
        shoal.load(f"{folder}/{rows}", subject.bags)
        return {"taken": peak_since_reset() - start, "table": subject.bags.stats()["t"].bytes}


def save(dim: int, rows: list[int], path: str) -> dict[str, object]:
    """Writes a checkpoint of each number of rows, for another process, into folders with that name."""
    for below in rows:
        subject = Subject(dim)
        for numbers in chunks(below, 1 << 20):
            subject.handle.assign(keys_of(numbers), torch.randn(len(numbers), dim))
        shoal.save(f"{path}/{below}", subject.bags)
    return {}


def probe(*arguments: str) -> dict[str, object]:
    """Runs this file in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grow", "erase", "tiers", "load", "save"])
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--judged-from", type=int, help="of `grow`: rows below which jumps are left out")
    parser.add_argument("--steps", type=int, help="of `tiers`: of training, once the table is filled")
    parser.add_argument("--path", help="of `save`: the folder of its checkpoints")
    given = parser.parse_args()
    if given.what == "grow":
        answer = grow(given.dim, given.rows, given.judged_from)
    elif given.what == "save":
        answer = save(given.dim, given.rows, given.path)
    elif given.what == "tiers":
        answer = tiers(given.dim, given.rows[0], given.steps)
    else:
        answer = {"erase": erase, "load": load}[given.what](given.dim, given.rows[0])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
