"""The README's numbers, from the CSVs: `python -m benchmarks.readme` writes them between its markers."""

import pathlib
import re
import sys
from collections.abc import Sequence

from benchmarks.measure import OURS
from benchmarks.record import RESULTS, Row, lines_of, newest, read

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
SUITES = ("cpu", "gpu", "tiers", "log")  # each has a block
NONE = "No run is recorded yet.\n"
# Says up to when the CSV was read: rows that were measured since do not make the README wrong.
STAMP = re.compile(r"<!-- up to (\S+) -->")


def csv_of(suite: str) -> pathlib.Path:
    return RESULTS / f"{suite}.csv"


def block_of(suite: str) -> re.Pattern[str]:
    """What stands between a suite's markers."""
    return re.compile(rf"(?<=<!-- numbers of {suite} -->\n).*?(?=<!-- /numbers -->)", re.DOTALL)


# A part of the work, and a case that two others took the place of.
HIDDEN = re.compile(r", 1/16$|^A train adam, 1,000 tables$|^real .*zipf 1\.[14]$")
# Beside a limit of nearly nothing a ratio says nothing.
MOST_TIMES = 1000.0


def is_shown(case: str) -> bool:
    """The other dims are in the CSV and the plot."""
    if HIDDEN.search(case):
        return False
    dim = re.search(r"\bdim (\d+)", case)
    return dim is None or dim[1] == "64" or case.startswith("cost growth")


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def render(suite: str, rows: Sequence[Row]) -> str:
    """The newest run of every case of a suite: ours, and each other with the ratio of ours to it."""
    shown = [row for row in newest(rows) if is_shown(row.case)]
    if not shown:
        return NONE
    # What a line takes between the cores says which minute a number is of: see benchmarks.roof.transfer_ns.
    has_lines = any(row.transfer_ns is not None for row in shown)
    titles = ["Shoal (p20 to p80)", "others (Shoal / other)", *(["a line takes"] if has_lines else [])]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for case in dict.fromkeys(row.case for row in shown):
        of_case = [row for row in shown if row.case == case]
        (ours,) = (row for row in of_case if row.contender == OURS)
        # One value has no spread.
        spread = f" ({digits(ours.p20)} to {digits(ours.p80)})" if ours.rounds > 1 else ""
        others = [
            f"{row.contender} {digits(row.p50)} ({row.ratio:.2f})"
            for row in of_case
            if row.ratio is not None and row.ratio < MOST_TIMES
        ]
        cells = [case, f"{digits(ours.p50)}{spread} {ours.unit}", "; ".join(others)]
        if has_lines:
            cells.append(lines_of(ours))
        lines.append(f"| {' | '.join(cells)} |")
    last = max(row.when for row in shown)
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in shown))
    machines = "; ".join(dict.fromkeys(row.machine for row in shown))
    notes = (
        f"Medians. For times and bytes a ratio below 1 is better, for rates above 1. Commit {commits} on\n"
        f"{machines}, {last[:10]}. All runs are in [{suite}.csv](benchmarks/results/{suite}.csv), the newest in\n"
        f"[{suite}.png](benchmarks/results/{suite}.png)."
    )
    return "\n".join([f"<!-- up to {last} -->", *lines, "", notes, ""])


def is_current(text: str, suite: str, rows: Sequence[Row]) -> bool:
    """Whether the block of a suite in `text` is what the rows up to its stamp give."""
    block = block_of(suite).search(text)
    if block is None:
        return False
    stamp = STAMP.search(block[0])
    return block[0] == render(suite, [row for row in rows if stamp is None or row.when <= stamp[1]])


def main() -> int:
    text = README.read_text()
    for suite in SUITES:
        block = block_of(suite)
        if block.search(text) is None:
            print(
                f"{README}: wanted the markers <!-- numbers of {suite} --> and <!-- /numbers -->; got none",
                file=sys.stderr,
            )
            return 1
        numbers = render(suite, read(csv_of(suite)) if csv_of(suite).exists() else [])
        text = block.sub(lambda _, numbers=numbers: numbers, text, count=1)
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
