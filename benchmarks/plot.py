"""Draws the results: the PNG of a suite from its CSV (`python -m benchmarks.plot cpu`), and the README's picture."""

import argparse
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import registry, summary
from benchmarks.measure import OURS
from benchmarks.record import RESULTS, Row, digits, newest, read

COLORS = {OURS: "#0b6e99", "shoal module": "#6fb1cf", "fbgemm": "#d98324", "fbgemm x 2": "#f0c48a", "torch": "#b33f40"}
OTHER_COLORS = ["#7a7a7a", "#b5b5b5", "#5a8f5a", "#8f6bb0"]


def family(case: str) -> str:
    """Returns what a case's name begins with: the family of 'train sgd, dim 64, zipf' is 'train sgd'."""
    return case.split(",")[0]


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws what was measured (left, a panel for every family) and how near each ratio is to its limit (right)."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(family(row.case), []).append(row)
    limited = [row for row in rows if row.limit is not None]
    height = max(2.6 * ((len(families) + 1) // 2), 0.24 * len(limited) + 1.5)
    figure = plt.figure(figsize=(19, height), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1.15])
    panels = list(left.subplots((len(families) + 1) // 2, 2, squeeze=False).flat)
    for panel, (name, members) in zip(panels, families.items(), strict=False):
        _bars(panel, name, members)
    for panel in panels[len(families) :]:
        panel.set_axis_off()
    _limits(right.subplots(), limited)
    last = max(rows, key=lambda row: row.when)
    figure.suptitle(
        f"shoal {last.commit} on {last.machine}, {last.when[:10]}; bars are p50, whiskers p20 to p80", fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(panel: Axes, name: str, rows: Sequence[Row]) -> None:
    cases = list(dict.fromkeys(row.case for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows))
    spare = iter(OTHER_COLORS * len(contenders))
    width = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        mine = [row for row in rows if row.contender == contender]
        middle = [row.p50 for row in mine]
        panel.bar(
            [cases.index(row.case) + (place - (len(contenders) - 1) / 2) * width for row in mine],
            middle,
            width,
            yerr=[[row.p50 - row.p20 for row in mine], [row.p80 - row.p50 for row in mine]],
            color=COLORS.get(contender) or next(spare),
            label=contender,
            error_kw={"linewidth": 0.8},
        )
    panel.set_title(name, fontsize=9, loc="left")
    panel.set_ylabel(rows[0].unit, fontsize=8)
    crowded = len(cases) > 8
    labels = [(", " if crowded else "\n").join(case.split(", ")[1:]) for case in cases]
    panel.set_xticks(range(len(cases)), labels, fontsize=7, rotation=90 if crowded else 0)
    panel.tick_params(axis="y", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=6, frameon=False)


def _limits(panel: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(reversed(rows)):
        assert row.ratio is not None  # of a row that has a limit
        assert row.limit is not None
        color = "#2a7f3f" if row.verdict == "pass" else "#c02626"
        panel.plot([row.ratio, row.limit], [place, place], color=color, linewidth=1, alpha=0.5)
        panel.plot(row.limit, place, "|", color="black", markersize=9)
        panel.plot(row.ratio, place, "o", color=color, markersize=4)
    panel.set_yticks(range(len(rows)), [f"{row.case} / {row.contender}" for row in reversed(rows)], fontsize=6)
    panel.set_xscale("log")
    # By default the axis also labels its minor ticks where it spans few decades, and the labels overlap.
    low, high = panel.get_xlim()
    decades = math.log10(high / low)
    labelled = (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.7 else (1, 2, 5) if decades < 2.5 else (1,)
    panel.xaxis.set_major_locator(LogLocator(subs=labelled))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title("ratio to the peer (dot) and its limit (bar); green holds", fontsize=9, loc="left")
    panel.grid(axis="x", linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def draw_suite(suite: str) -> pathlib.Path:
    """Draws the last run of every case that still exists. Returns the picture's path."""
    cases = {case.name for case in registry.suite(suite).select()}
    path = RESULTS / f"{suite}.png"
    draw([row for row in newest(read(RESULTS / f"{suite}.csv")) if row.case in cases], path)
    return path


SUMMARY = RESULTS / "summary.png"


def draw_summary(rows: Mapping[str, Iterable[Row]], path: pathlib.Path = SUMMARY) -> None:
    """Draws the six numbers of the README, which the PNG's metadata also has as text."""
    found = summary.measured(rows)
    figure = plt.figure(figsize=(11, 5.6), layout="constrained")
    panels = list(figure.subplots(-(-len(found) // 2), 2, squeeze=False).flat)
    for panel, one in zip(panels, found, strict=False):
        _summary_bars(panel, one)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    figure.suptitle("Shorter is better. Medians, as measured; whiskers are p20 to p80", fontsize=9)
    figure.savefig(path, dpi=110, metadata={NUMBERS: summary.table(found)})
    plt.close(figure)


NUMBERS = "Numbers"  # the key in a PNG's metadata for the numbers that it shows


def _summary_bars(panel: Axes, one: summary.Measured) -> None:
    rows = [one.ours, *one.others]
    spare = iter(OTHER_COLORS)
    for place, (row, name) in enumerate(zip(rows, one.names, strict=True)):
        spread = [[row.p50 - row.p20], [row.p80 - row.p50]]
        color = COLORS.get(row.contender) or next(spare)
        panel.barh(place, row.p50, 0.7, xerr=spread, color=color, error_kw={"linewidth": 0.8})
        panel.text(row.p80, place, f"  {digits(row.p50)} {row.unit}", va="center", fontsize=8)
        panel.text(0, place, f"{name}  ", va="center", ha="right", fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.3 * max(row.p80 for row in rows))
    panel.set_ylim(max(len(rows), 3) - 0.5, -0.5)  # bars of all panels are equally thick
    panel.set_yticks([])
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.set_title(one.number.title, fontsize=9, loc="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", default="cpu")
    draw_suite(parser.parse_args().suite)


if __name__ == "__main__":
    main()
