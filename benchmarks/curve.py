"""Step time against hit rate: tables whose memory holds less and less of their rows. python -m benchmarks.curve

Appends benchmarks/results/tiers_curve.csv and draws benchmarks/results/tiers_curve.png.
"""

import csv
import itertools
from dataclasses import asdict, dataclass, fields

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import track

from benchmarks import record, spill, work
from benchmarks.measure import FULL, Effort
from benchmarks.tiers import folder

MEMORY = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
CSV = record.RESULTS / "tiers_curve.csv"


@dataclass(frozen=True)
class Point:
    when: str
    commit: str
    machine: str
    memory: float  # the part of the rows that it holds
    hit_rate: float  # of a batch's different keys
    misses: float  # a step
    milliseconds: float  # a step, with prefetch
    without_prefetch: float
    all_in_memory: float


def measure(rows: int, rounds: int) -> list[Point]:
    origin, points = record.origin(), []
    whole = spill.Subject(rows, None, None)
    numbers = itertools.count()

    def some() -> list[spill.shoal.KeyedJaggedTensor]:
        return spill.batches(work.ZIPF_EXPONENT, rows, itertools.islice(numbers, spill.TURN_STEPS))

    for memory in track(MEMORY, description="memory for a part of the rows"):
        with folder() as here:
            part = spill.Subject(rows, memory, here)
            for _ in range(2):
                part.train(some(), 2)
            ahead, alone, fast = [], [], []
            for _ in range(rounds):
                ahead.append(part.train(some(), 2))
                alone.append(part.train(some(), 0).milliseconds)
                fast.append(whole.train(some(), 0).milliseconds)
            middle = sorted(ahead, key=lambda step: step.milliseconds)[len(ahead) // 2]
            points.append(
                Point(
                    origin.when,
                    origin.commit,
                    origin.machine,
                    memory,
                    round(middle.hit_rate, 4),
                    round(middle.misses, 1),
                    round(middle.milliseconds, 2),
                    round(sorted(alone)[len(alone) // 2], 2),
                    round(sorted(fast)[len(fast) // 2], 2),
                )
            )
    return points


def append(points: list[Point]) -> None:
    is_new = not CSV.exists()
    with CSV.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def draw() -> None:
    """The newest run of the CSV."""
    with CSV.open() as file:
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
    panel.set(xlabel="different keys of a batch that are in memory, %", ylabel="ms a step", yscale="log")
    panel.set_title(f"shoal {newest[0]['commit']} on {newest[0]['machine']}, {newest[0]['when'][:10]}", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(CSV.with_suffix(".png"), dpi=110)
    plt.close(figure)


def run(console: Console, effort: Effort) -> None:
    """Measure, print, append and draw."""
    points = measure(effort.live_rows // 4, 3)
    for point in points:
        console.print(
            f"memory for {point.memory:.0%}: {point.hit_rate:.1%} hits, {point.misses:.0f} misses a step, "
            f"{point.milliseconds} ms, {point.without_prefetch} without prefetch, {point.all_in_memory} all in memory",
            highlight=False,
        )
    append(points)
    draw()
    console.print(f"appended {CSV} and drew {CSV.with_suffix('.png')}")


if __name__ == "__main__":
    run(Console(), FULL)
