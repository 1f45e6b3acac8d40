"""Step time against hit rate: the points, and their picture. `python -m benchmarks.curve` draws the recorded ones."""

import csv
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from rich.console import Console

from benchmarks import record

# The file that a run of a suite appends to, and the label of the axis.
CURVES = {
    "tiers": (record.RESULTS / "tiers_curve.csv", "different keys of a batch that are in memory, %"),
    "gpu": (record.RESULTS / "gpu_curve.csv", "keys of a batch that are in device memory, %"),
}


@dataclass(frozen=True)
class Point:
    when: str
    commit: str
    machine: str
    memory: float  # the part of the rows in use that it holds
    hit_rate: float
    misses: float  # a step
    milliseconds: float  # a step, with prefetch
    without_prefetch: float
    all_in_memory: float


def tell(points: Sequence[Point], console: Console) -> None:
    for point in points:
        console.print(
            f"memory for {point.memory:.0%}: {point.hit_rate:.1%} hits, {point.misses:.0f} misses a step, "
            f"{point.milliseconds} ms, {point.without_prefetch} without prefetch, {point.all_in_memory} all in memory",
            highlight=False,
        )


def append(suite: str, points: Sequence[Point]) -> None:
    path = CURVES[suite][0]
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def draw(suite: str) -> pathlib.Path:
    """Draws the newest run of a suite. Returns the picture's path."""
    import matplotlib  # the code that measures does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path, axis = CURVES[suite]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    newest = [row for row in rows if row["when"] == rows[-1]["when"]]
    hits = [100 * float(row["hit_rate"]) for row in newest]
    figure, panel = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, label, color in (
        ("milliseconds", "with prefetch", "#0b6e99"),
        ("without_prefetch", "without", "#d98324"),
        ("all_in_memory", "all in memory", "#7a7a7a"),
    ):
        panel.plot(hits, [float(row[name]) for row in newest], "o-", color=color, label=label, markersize=4)
    panel.set(xlabel=axis, ylabel="ms a step", yscale="log")
    panel.set_title(f"shoal {newest[0]['commit']} on {newest[0]['machine']}, {newest[0]['when'][:10]}", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return picture


if __name__ == "__main__":
    for name, (csv_path, _axis) in CURVES.items():
        if csv_path.exists():
            Console().print(f"drew {draw(name)}")
