"""Runs a suite: `python -m benchmarks.run cpu|gpu|tiers [--only PATTERN] [--quick] [--no-save]`."""

import argparse
import importlib
import os
import sys
import warnings

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import curve, record
from benchmarks.check import Mismatch
from benchmarks.effort import FULL, QUICK
from benchmarks.measure import OURS, Bench, QuietGate, Result
from benchmarks.record import digits
from benchmarks.registry import PEERS, SUITES, Case, suite
from benchmarks.roof import transfer_ns

THREADS = 2  # what the limits are for
# The module that measures a suite's step time against its hit rate.
MEASURES = {"tiers": "benchmarks.spill_curve", "gpu": "benchmarks.gpu_curve"}


def line(case: Case, result: Result, rows: list[record.Row]) -> list[str]:
    """Returns a case's cells, with one line for each peer."""
    ours = result.of(OURS)
    peers = [row for row in rows if row.contender != OURS]
    sign = "≥" if result.higher_is_better else "≤"
    limits, verdicts = [], []
    for row in peers:
        limit = case.limits.get(row.contender)
        if limit is None or row.ratio is None:
            limits.append("")
            verdicts.append("")
            continue
        aimed = limit.aim is not None and record.passes(row.ratio, limit.aim, result.higher_is_better)
        limits.append(f"{sign} {limit.ratio:.3g}" + (f" (aim {limit.aim:.3g})" if limit.aim is not None else ""))
        verdicts.append({"pass": "[green]pass", "miss": "[red]miss"}[row.verdict] + (", aim" if aimed else "") + "[/]")
    return [
        case.name,
        f"{digits(ours.p50)} ({digits(ours.p20)}-{digits(ours.p80)}) {result.unit}"
        + (f"\n[yellow]{result.disturbed} disturbed turns[/]" if result.disturbed else ""),
        "\n".join(f"{row.contender} {digits(row.p50)}" for row in peers),
        "\n".join("" if row.ratio is None else f"{row.ratio:.2f}" for row in peers),
        "\n".join(limits),
        "\n".join(verdicts),
    ]


def run(cases: list[Case], bench: Bench, console: Console, save: bool, suite: str) -> int:
    """Runs every case, and saves its rows as soon as it is done. Returns how many were refused or failed."""
    origin = record.origin()
    table = Table(
        "case", "ours p50 (p20-p80)", "peer's p50", "ratio", "limit", "", title=origin.machine, show_lines=True
    )
    refused: list[str] = []
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            bench.enter(case.stage)
            bench.say = lambda what, case=case: progress.update(task, description=f"{case.name}: {what}")
            bench.tell = lambda what, case=case: console.print(f"{case.name}: {what}", highlight=False)
            before = transfer_ns() if suite != "gpu" else None
            try:
                result = case.run(bench)
            except Mismatch as reason:
                refused.append(case.name)
                console.print(f"[red]refused to time[/] {case.name}: {reason}")
            except Exception:  # the other cases' half hour is not lost
                refused.append(case.name)
                console.print(f"[red]failed[/] {case.name}")
                console.print_exception()
            else:
                after = None if before is None else transfer_ns()
                rows = record.rows_of(case, result, origin, (before, after))
                table.add_row(*line(case, result, rows))
                if save:
                    record.append(record.RESULTS / f"{suite}.csv", rows)
                if not console.is_terminal:
                    shown = ", ".join(f"{row.contender} {digits(row.p50)}" for row in rows)
                    told = f"; a line takes {record.lines_of(rows[0])} between cores" if before is not None else ""
                    console.print(f"{case.name}: {shown} {result.unit}{told}", highlight=False)
            progress.advance(task)
        bench.clear()
    console.print(table)
    gate = bench.gate
    console.print(
        f"{gate.redone} turns taken again because others used the machine, {gate.disturbed} kept although they did, "
        f"{gate.waited:.0f} s waited for quiet."
    )
    return len(refused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument(
        "--only", metavar="PATTERN", default="*", help="cases whose name contains this or matches it as a glob"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small tables and few rounds, to see that it runs; saves nothing"
    )
    parser.add_argument("--no-save", action="store_true", help="do not touch the CSV and the plot")
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds to wait, in all, until no other process uses the machine"
    )
    parser.add_argument("--no-plot", action="store_true", help="append the CSV, and draw nothing")
    parser.add_argument("--list", action="store_true", help="name the cases and what they compare")
    given = parser.parse_args()

    registry = suite(given.suite)
    console = Console(width=None if sys.stdout.isatty() else 150)
    cases = registry.select(given.only)
    if not cases:
        parser.error(f"no case contains or matches '{given.only}'; see --list")
    if given.list:
        for case in cases:
            console.print(f"{case.name}: {case.compares}", highlight=False)
        return 0
    absent = [peer.name for peer in PEERS[given.suite] if not peer.is_installed]
    if absent:
        names = " and ".join(absent)
        parser.error(f"the suite '{given.suite}' wants {names}, not found here; scripts/bench installs what pip has")
    if given.suite == "cpu" and (os.cpu_count() or 1) < THREADS:
        console.print(f"[yellow]the limits are for {THREADS} cores; this machine has {os.cpu_count()}")
    if given.suite == "cpu":
        torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's sparse optimizers, every step
    save = not (given.no_save or given.quick)
    bench = Bench(QUICK if given.quick else FULL, QuietGate(patience=0 if given.quick else given.patience))
    refused = run(cases, bench, console, save, given.suite)
    measure_curve = MEASURES.get(given.suite) if save and given.only == "*" else None
    if measure_curve is not None:
        points = importlib.import_module(measure_curve).measure(bench)
        curve.tell(points, console)
        curve.append(given.suite, points)
    if save and not given.no_plot:
        from benchmarks import plot

        pictures = [plot.draw_suite(given.suite)]
        if measure_curve is not None:
            pictures.append(curve.draw(given.suite))
        for picture in pictures:
            console.print(f"appended {picture.with_suffix('.csv')} and drew {picture}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
