"""The README's numbers, from the CSV: `python -m benchmarks.readme` writes them between its markers."""

import pathlib
import re
import sys
from collections.abc import Sequence

from benchmarks.measure import OURS
from benchmarks.record import RESULTS, Row, newest, read

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
CSV = RESULTS / "cpu.csv"
BLOCK = re.compile(r"(?<=<!-- numbers -->\n).*?(?=<!-- /numbers -->)", re.DOTALL)
NONE = "No run is recorded yet.\n"
# Says up to when the CSV was read: rows that were measured since do not make the README wrong.
STAMP = re.compile(r"<!-- up to (\S+) -->")


def is_shown(case: str) -> bool:
    """The other dims are in the CSV and the plot."""
    dim = re.search(r"\bdim (\d+)", case)
    return dim is None or dim[1] == "64" or case.startswith("cost growth")


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def render(rows: Sequence[Row]) -> str:
    """The newest run of every case: ours, and each other with the ratio of ours to it."""
    shown = [row for row in newest(rows) if is_shown(row.case)]
    if not shown:
        return NONE
    lines = ["| | Shoal (p20 to p80) | others (Shoal / other) |", "|---|---|---|"]
    for case in dict.fromkeys(row.case for row in shown):
        of_case = [row for row in shown if row.case == case]
        (ours,) = (row for row in of_case if row.contender == OURS)
        # One value has no spread.
        spread = f" ({digits(ours.p20)} to {digits(ours.p80)})" if ours.rounds > 1 else ""
        others = [f"{row.contender} {digits(row.p50)} ({row.ratio:.2f})" for row in of_case if row.ratio is not None]
        lines.append(f"| {case} | {digits(ours.p50)}{spread} {ours.unit} | {'; '.join(others)} |")
    last = max(row.when for row in shown)
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in shown))
    machines = "; ".join(dict.fromkeys(row.machine for row in shown))
    notes = (
        f"Medians. For times and bytes a ratio below 1 is better, for rates (M keys/s) above 1. Commit {commits} on\n"
        f"{machines}, {last[:10]}. Other dims are in [cpu.csv](benchmarks/results/cpu.csv) and\n"
        "[cpu.png](benchmarks/results/cpu.png)."
    )
    return "\n".join([f"<!-- up to {last} -->", *lines, "", notes, ""])


def is_current(text: str, rows: Sequence[Row]) -> bool:
    """Whether the block in `text` is what the rows up to its stamp give."""
    block = BLOCK.search(text)
    if block is None:
        return False
    stamp = STAMP.search(block[0])
    return block[0] == render([row for row in rows if stamp is None or row.when <= stamp[1]])


def main() -> int:
    text = README.read_text()
    if BLOCK.search(text) is None:
        print(f"{README}: wanted the markers <!-- numbers --> and <!-- /numbers -->; got none", file=sys.stderr)
        return 1
    numbers = render(read(CSV) if CSV.exists() else [])
    README.write_text(BLOCK.sub(lambda _: numbers, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
