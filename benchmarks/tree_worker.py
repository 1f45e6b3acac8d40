"""Runs the steps of one tree for `benchmarks/trees.py`: reads `CASE STEPS` lines, answers each with seconds a step.

Which Shoal it measures is decided by PYTHONPATH; it uses the public API only, so that it runs with older trees.
"""

import gc
import itertools
import pathlib
import sys
import time
from collections.abc import Callable

import torch

import shoal
from benchmarks import ragged
from benchmarks.effort import FULL, QUICK
from benchmarks.peers.tables import ShoalTables
from benchmarks.scratch import folder
from benchmarks.spill import Subject, batches

EXPONENT = 1.2
BAGS = 512
SPILLED_BAGS = 256
COMMIT_EVERY = 8  # steps

Turn = Callable[[int], None]  # runs so many steps


def in_memory(rows: int) -> dict[str, Turn]:
    """A training step and an eval lookup of the forty tables of the cpu suite."""
    of = ragged.tables(2 * rows)
    ours = ShoalTables(of, "rowwise_adagrad", 0.05, 1e-12, True)
    for table in range(len(of.rows)):
        ours.load(table, of.values(table))
    inputs = [ours.inputs(batch) for batch in ragged.batches(of, EXPONENT, BAGS, 6)]
    gradients = [ragged.gradient(of, BAGS)]
    numbers = itertools.count()

    def step(steps: int) -> None:
        for _ in range(steps):
            ours.step(inputs[next(numbers) % len(inputs)], gradients)

    def lookup(steps: int) -> None:
        with ours.evaluating():
            for _ in range(steps):
                ours.lookup(inputs[next(numbers) % len(inputs)])

    return {"step": step, "eval": lookup}


def on_disk(rows: int, here: pathlib.Path) -> dict[str, Turn]:
    """The same where a quarter of the rows is in memory; training has batches ahead."""
    subject = Subject(rows, SPILLED_BAGS, 0.25, here)
    work = itertools.cycle(batches(EXPONENT, rows, SPILLED_BAGS, range(64)))

    def step(steps: int) -> None:
        subject.train([next(work) for _ in range(steps)], depth=2)

    def lookup(steps: int) -> None:
        subject.bags.eval()
        with torch.no_grad():
            for batch in itertools.islice(work, steps):
                subject.bags(batch)
        subject.bags.train()

    return {"step with SSD and prefetch": step, "eval with SSD": lookup}


def with_log(rows: int, here: pathlib.Path) -> dict[str, Turn]:
    """Training steps with a commit after every few, which is in the time."""
    subject = Subject(rows, SPILLED_BAGS, None, None)
    log = shoal.ChangeLog(here, fsync="never")
    log.commit(subject.bags)
    work = itertools.cycle(batches(EXPONENT, rows, SPILLED_BAGS, range(16)))

    def step(steps: int) -> None:
        for number in range(steps):
            subject.train([next(work)], depth=0)
            if number % COMMIT_EVERY == COMMIT_EVERY - 1:
                log.commit(subject.bags)

    return {"step with a log": step}


def main(quick: bool) -> None:
    torch.set_num_threads(2)
    shoal.set_num_threads(2)
    rows = (QUICK if quick else FULL).live_rows
    with folder() as here:
        (here / "rows").mkdir()
        turns = in_memory(rows) | on_disk(rows // 4, here / "rows") | with_log(rows // 4, here / "log")
        gc.collect()
        gc.disable()
        print("ready", *turns, sep="\t", flush=True)
        for line in sys.stdin:
            name, steps = line.rstrip("\n").split("\t")
            turns[name](1)  # untimed: the other tree's lines leave the caches
            begin = time.perf_counter()
            turns[name](int(steps))
            print((time.perf_counter() - begin) / int(steps), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv)
