"""Writes the numbers of README.md and docs/numbers.md from the CSVs, between markers: `python -m benchmarks.readme`."""

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from benchmarks import plot, summary
from benchmarks.measure import OURS
from benchmarks.record import RESULTS, Row, digits, lines_of, newest, read

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NUMBERS = ROOT / "docs" / "numbers.md"
SUITES = ("cpu", "gpu", "tiers", "log")  # each has a block in docs/numbers.md
SUMMARY = "summary"  # the block of README.md
NONE = "No run is recorded yet.\n"
# Says up to when the CSV was read: rows that are measured later do not make a page wrong.
STAMP = re.compile(r"<!-- up to (\S+) -->")


def csv_of(suite: str) -> pathlib.Path:
    return RESULTS / f"{suite}.csv"


def block_of(suite: str) -> re.Pattern[str]:
    """Matches what stands between a suite's markers."""
    return re.compile(rf"(?<=<!-- numbers of {suite} -->\n).*?(?=<!-- /numbers -->)", re.DOTALL)


# A part of the work, and cases that others have replaced.
HIDDEN = re.compile(r", 1/16$|^A train adam, 1,000 tables$|^real .*zipf 1\.[14]$")
# A ratio to a limit of nearly nothing says nothing.
MOST_TIMES = 1000.0


def is_shown(case: str) -> bool:
    """Returns whether the page shows a case. The other dims are in the CSV and the plot."""
    if HIDDEN.search(case):
        return False
    dim = re.search(r"\bdim (\d+)", case)
    return dim is None or dim[1] == "64" or case.startswith("cost growth")


def render(suite: str, rows: Sequence[Row]) -> str:
    """Returns a table with the newest run of every case: ours, and each other with the ratio of ours to it."""
    shown = [row for row in newest(rows) if is_shown(row.case)]
    if not shown:
        return NONE
    # How long a line takes between the cores tells two kinds of minute apart: see benchmarks.roof.transfer_ns.
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
        f"{machines}, {last[:10]}. All runs are in [{suite}.csv](../benchmarks/results/{suite}.csv), the newest in\n"
        f"[{suite}.png](../benchmarks/results/{suite}.png)."
    )
    return "\n".join([f"<!-- up to {last} -->", *lines, "", notes, ""])


def render_summary(rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns a table with the six numbers of the README."""
    found = summary.measured(rows)
    return summary.table(found) if found else NONE


def _up_to(rows: Sequence[Row], stamp: str | None) -> list[Row]:
    return [row for row in rows if stamp is None or row.when <= stamp]


def _stamp_of(block: str) -> str | None:
    stamp = STAMP.search(block)
    return None if stamp is None else stamp[1]


def is_current(text: str, suite: str, rows: Sequence[Row]) -> bool:
    """Returns whether the block of a suite in `text` is what the rows up to its stamp give."""
    block = block_of(suite).search(text)
    return block is not None and block[0] == render(suite, _up_to(rows, _stamp_of(block[0])))


def is_summary_current(text: str, rows: Mapping[str, Sequence[Row]]) -> bool:
    """Returns whether the six numbers in `text` are what the rows up to their stamp give."""
    block = block_of(SUMMARY).search(text)
    if block is None:
        return False
    stamp = _stamp_of(block[0])
    return block[0] == render_summary({suite: _up_to(some, stamp) for suite, some in rows.items()})


def rows_of(suites: Sequence[str]) -> dict[str, list[Row]]:
    """Returns each suite's rows, none where it has no CSV."""
    return {suite: read(csv_of(suite)) if csv_of(suite).exists() else [] for suite in suites}


def rewrite(page: pathlib.Path, blocks: Mapping[str, str]) -> None:
    """Puts the blocks between their markers. Raises ValueError where a page lacks one."""
    text = page.read_text()
    for name, numbers in blocks.items():
        block = block_of(name)
        if block.search(text) is None:
            raise ValueError(f"{page}: wanted the markers <!-- numbers of {name} --> and <!-- /numbers -->; got none")
        text = block.sub(lambda _, numbers=numbers: numbers, text, count=1)
    page.write_text(text)


def main() -> int:
    rows = rows_of(SUITES)
    try:
        rewrite(NUMBERS, {suite: render(suite, rows[suite]) for suite in SUITES})
        rewrite(README, {SUMMARY: render_summary(rows)})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    plot.draw_summary(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
