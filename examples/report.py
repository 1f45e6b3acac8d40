"""What the demo measured, as a table and as a picture."""

from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # a file is drawn, no window: a machine without a display will do
from matplotlib import pyplot

OURS, THEIRS, GREY = "#0b6e99", "#d1603d", "#888888"


@dataclass(frozen=True)
class Window:
    time: float
    auc: float
    rows_alive: int  # in all tables
    ids_seen: int  # since the beginning


@dataclass(frozen=True)
class Report:
    title: str
    time_unit: str
    windows: list[Window]
    hashed_auc: list[float]  # of the same windows
    bytes: int
    hashed_rows: int

    @property
    def memory(self) -> str:
        return f"{self.bytes / 2**20:.1f} MiB" if self.bytes >= 2**20 else f"{self.bytes / 2**10:.0f} KiB"


def second_half(values: list[float]) -> float:
    """The mean, without windows that have no AUC, once the dense part has learned and ids have come and gone."""
    known = [value for value in values[len(values) // 2 :] if not isnan(value)]
    return sum(known) / len(known) if known else nan


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.title}: AUC of batches before they are trained on", title_justify="left")
    for name in (report.time_unit, "ids seen", "rows alive", "Shoal", "hashed", "gain"):
        table.add_column(name, justify="right")

    def line(*start: str, ours: float, theirs: float) -> None:
        table.add_row(*start, f"{ours:.4f}", f"{theirs:.4f}", f"{ours - theirs:+.4f}")

    every = max(1, len(report.windows) // 12)
    for window, theirs in list(zip(report.windows, report.hashed_auc, strict=True))[every - 1 :: every]:
        start = f"{window.time:,.0f}", f"{window.ids_seen:,}", f"{window.rows_alive:,}"
        line(*start, ours=window.auc, theirs=theirs)
    table.add_section()
    ours = second_half([window.auc for window in report.windows])
    line("second half", "", "", ours=ours, theirs=second_half(report.hashed_auc))
    console.print(table)
    console.print(
        f"Either has {report.memory} for rows, optimizer state and index: what Shoal held at its peak, which is "
        f"{report.hashed_rows:,} rows of the hashed tables. Batches, dense model, seeds, row updates and learning "
        "rates are the same. In a hashed table ids that collide train one row, and a new id inherits the row and the "
        "worn-down learning rate of a dead one. In Shoal an id has its own row from when it is first seen until the "
        "demo erases it, which it does with ids not seen for a while."
    )


def draw(report: Report, folder: Path) -> Path:
    time = [window.time for window in report.windows]
    with pyplot.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}):
        figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
        figure.suptitle(f"{report.title}: Shoal and hashed tables of the same {report.memory}", fontsize=13)
        top.set_title("AUC over time, every batch predicted before it is trained on", loc="left", fontsize=11)
        top.plot(time, [window.auc for window in report.windows], color=OURS, linewidth=2, label="Shoal")
        top.plot(time, report.hashed_auc, color=THEIRS, linewidth=2, label="hashed tables")
        top.set_ylabel("AUC")
        bottom.set_title("Ids seen and rows held", loc="left", fontsize=11)
        ids, rows = ([window.ids_seen for window in report.windows], [window.rows_alive for window in report.windows])
        bottom.plot(time, ids, color=GREY, linewidth=2, label="ids seen so far")
        bottom.axhline(report.hashed_rows, color=THEIRS, linestyle="--", label="rows of the hashed tables")
        bottom.plot(time, rows, color=OURS, linewidth=2, label="rows alive in Shoal")
        bottom.set_ylabel("count")
        bottom.yaxis.set_major_formatter("{x:,.0f}")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel(report.time_unit)
        for panel in (top, bottom):
            panel.grid(alpha=0.25)
            panel.legend(loc="best", frameon=False)
        path = folder / "demo.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
    return path
