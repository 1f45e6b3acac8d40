"""One CSV a suite: every row is one contender of one case of one run. Plots and README numbers come from here."""

import csv
import datetime
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import torch

from benchmarks.measure import OURS, Result
from benchmarks.registry import Case

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclass(frozen=True)
class Origin:
    """The values that all rows of a run share."""

    when: str
    commit: str
    machine: str


@dataclass(frozen=True)
class Row:
    when: str
    commit: str
    machine: str
    case: str
    contender: str
    unit: str
    p20: float
    p50: float
    p80: float
    ratio: float | None  # ours to this contender's
    limit: float | None  # of the ratio: at most, or for a rate at least
    verdict: str  # pass, miss, or nothing if there is no limit
    rounds: int
    disturbed: int  # turns of the case that were kept although other processes used the machine
    # Nanoseconds that a line takes from one core to another, before the case and after it: a virtual machine has
    # minutes in which its cores share a cache, and minutes in which they do not. None if it was not measured; rows
    # without the second number have the mean of both.
    transfer_ns: float | None = None
    transfer_after_ns: float | None = None


def passes(ratio: float, limit: float, higher_is_better: bool) -> bool:
    return ratio >= limit if higher_is_better else ratio <= limit


def rows_of(
    case: Case, result: Result, origin: Origin, transfers: tuple[float | None, float | None] = (None, None)
) -> list[Row]:
    absent = set(case.limits) - set(result.rounds)
    if absent:
        raise ValueError(
            f"benchmarks: case '{case.name}' has limits against {sorted(absent)}, which it did not measure"
        )
    rows = []
    for contender, values in result.rounds.items():
        spread = result.of(contender)
        ratio = None if contender == OURS else result.ratio(contender)
        limit = case.limits.get(contender)
        verdict = ""
        if limit is not None and ratio is not None:
            verdict = "pass" if passes(ratio, limit.ratio, result.higher_is_better) else "miss"
        rows.append(
            Row(
                **asdict(origin),
                case=case.name,
                contender=contender,
                unit=result.unit,
                p20=spread.p20,
                p50=spread.p50,
                p80=spread.p80,
                ratio=ratio,
                limit=None if limit is None else limit.ratio,
                verdict=verdict,
                rounds=len(values),
                disturbed=result.disturbed,
                transfer_ns=transfers[0],
                transfer_after_ns=transfers[1],
            )
        )
    return rows


def digits(value: float) -> str:
    """Returns a number with three digits, or more where it has more before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def lines_of(row: Row) -> str:
    """Returns the time of a line around a case as text: one number, or two if the kind of minute changed."""
    before, after = row.transfer_ns, row.transfer_after_ns
    if before is None:
        return ""
    if after is None or 2 / 3 < before / after < 3 / 2:
        return f"{before if after is None else (before + after) / 2:.0f} ns"
    return f"{before:.0f}, then {after:.0f} ns"


def append(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Appends rows to the file, which is made with its header if there is none."""
    names = [one.name for one in fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if header != names:
            raise ValueError(
                f"{path}: wanted the columns {names}; got {header}. Move the file away to begin a new one."
            )
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: _text(value) for name, value in asdict(row).items()})


def _text(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else value


def read(path: pathlib.Path) -> list[Row]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    with path.open(newline="") as file:
        return [
            Row(
                **{name: text for name, text in line.items() if name not in _NUMBERS},
                **{name: float(line[name]) for name in ("p20", "p50", "p80")},
                ratio=number(line["ratio"]),
                limit=number(line["limit"]),
                rounds=int(line["rounds"]),
                disturbed=int(line["disturbed"]),
                transfer_ns=number(line["transfer_ns"]),
                transfer_after_ns=number(line["transfer_after_ns"]),
            )
            for line in csv.DictReader(file)
        ]


_NUMBERS = {"p20", "p50", "p80", "ratio", "limit", "rounds", "disturbed", "transfer_ns", "transfer_after_ns"}


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns each case's rows of the last run that had it, in the file's order of cases."""
    last: dict[str, list[Row]] = {}
    for row in rows:
        kept = last.setdefault(row.case, [])
        if kept and kept[0].when != row.when:
            kept.clear()
        kept.append(row)
    return [row for kept in last.values() for row in kept]


def origin() -> Origin:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Origin(when, _commit(), _machine())


def _commit() -> str:
    """Returns the measured commit, with a + if the working tree differs from it."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "none"
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cores = 0
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    model = value.strip()
                cores += name.strip() == "processor"
    except OSError:
        pass
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    used = len(os.sched_getaffinity(0))
    return f"{gpu}{model}, {cores} cores" if used == cores else f"{gpu}{model}, {used} of {cores} cores"
