"""Compares this tree with an older commit: `scripts/compare COMMIT [--rounds 30] [--quick]`.

Both are built, and run in one process each that take turns. A round has a turn of each tree for every case; what drifts
hits both turns of a round, so the ratio of a round is new to old. Printed are the mean ratio and its 95 % interval.
"""

import argparse
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.roof import transfer_ns

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = {"step": 60, "eval": 150, "step with a log": 24}
OTHER_STEPS = 24
MOST = 1.05  # of the upper bound
RESAMPLES = 4000


class Bounds(NamedTuple):
    """A mean ratio and the interval that holds it with 95 %."""

    low: float
    mean: float
    high: float


def bounds(ratios: Sequence[float]) -> Bounds:
    """The geometric mean of ratios and its interval, from samples drawn with replacement."""
    logs = [math.log(ratio) for ratio in ratios]
    drawn = random.Random(0)
    means = sorted(statistics.fmean(drawn.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    return Bounds(math.exp(low), math.exp(statistics.fmean(logs)), math.exp(high))


class Tree:
    """A built tree, and the process that runs its steps."""

    def __init__(self, root: pathlib.Path, quick: bool) -> None:
        subprocess.run([root / "scripts/native", "build/compare", "-DCMAKE_BUILD_TYPE=Release"], check=True)
        packages = sysconfig.get_path("purelib")
        paths = [str(root / "build/compare/site"), str(ROOT), packages]
        # -S: the editable install's import hook would win over PYTHONPATH.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "benchmarks.tree_worker", *(["--quick"] if quick else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": ":".join(paths), "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def cases(self) -> list[str]:
        """Waits until its tables are filled."""
        ready, *cases = self._read().split("\t")
        assert ready == "ready", ready
        return cases

    def turn(self, case: str) -> float:
        """Seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\t{STEPS.get(case, OTHER_STEPS)}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"scripts/compare: a tree's process ended with {self._process.wait()}")
        return line.rstrip("\n")


def checked_out(commit: str) -> pathlib.Path:
    """A work tree of that commit, below build/."""
    full = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout.strip()
    place = ROOT / "build" / "trees" / full[:12]
    if not place.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", "-f", place, full], cwd=ROOT, check=True)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="small tables: to see that it runs")
    asked = parser.parse_args()
    console = Console()
    trees = [Tree(ROOT, asked.quick), Tree(checked_out(asked.commit), asked.quick)]
    cases = trees[0].cases()
    if trees[1].cases() != cases:
        raise SystemExit("scripts/compare: the two trees have other cases")
    taken: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    before = transfer_ns()
    for number in track(range(asked.rounds), "rounds", console=console):
        for case in cases:
            if number % 2:  # each goes first in turn
                old = trees[1].turn(case)
                taken[case].append((trees[0].turn(case), old))
            else:
                new = trees[0].turn(case)
                taken[case].append((new, trees[1].turn(case)))
    for tree in trees:
        tree.close()
    table = Table("case", "new ms", "old ms", "new / old", "95 %", "", title=f"{asked.rounds} rounds, {asked.commit}")
    for case, pairs in taken.items():
        ratio = bounds([new / old for new, old in pairs])
        new_ms, old_ms = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        table.add_row(
            case,
            f"{new_ms:.3g}",
            f"{old_ms:.3g}",
            f"{ratio.mean:.3f}",
            f"{ratio.low:.3f}-{ratio.high:.3f}",
            "pass" if ratio.high <= MOST else "miss",
        )
    console.print(table)
    console.print(f"A line took {before:.0f} ns between the cores before, {transfer_ns():.0f} after.")


if __name__ == "__main__":
    main()
