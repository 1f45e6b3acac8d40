"""Times of a GPU step's kernels: `python -m benchmarks.kernels` measures, appends to the CSV and writes the table of
docs/tuning.md; `python -m benchmarks.kernels --table` writes the table only."""

import csv
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks import record

CSV = record.RESULTS / "gpu_kernels.csv"
TUNING = pathlib.Path(__file__).resolve().parent.parent / "docs" / "tuning.md"
BLOCK = re.compile(r"(?<=<!-- kernels -->\n).*?(?=<!-- /kernels -->)", re.DOTALL)
STEPS = 10
# Measures of the device itself, in rows without a work.
COPY, RANDOM = "copy, TB/s", "random reads of 4 bytes, G/s"
# Torch's sort is several kernels; so are the copies and fills of the sort and of the steps.
SORT, OTHERS = "sort (torch)", "copies and fills"
NAMES = {"radix_sort": SORT, "Memcpy": OTHERS, "Memset": OTHERS, "elementwise": OTHERS}
WORKS = ("A adam", "A sgd", "B 32 uniform", "B 64 uniform", "B 64 zipf", "B 128 uniform", "B 128 zipf")


@dataclass(frozen=True)
class Row:
    """One kernel of one work: microseconds a step, and the part of them that its bytes take at the speed of a copy."""

    when: str
    commit: str
    machine: str
    work: str
    kernel: str
    us: float
    reached: float


def profile(step: Callable[[int], None]) -> dict[str, float]:
    """Returns the microseconds a step that each kernel takes on the device."""
    import torch
    from torch.profiler import ProfilerActivity

    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as run:
        for number in range(STEPS):
            step(number)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in run.key_averages():
        name = next((short for part, short in NAMES.items() if part in event.key), event.key)
        if event.device_time_total:
            spent[name] = spent.get(name, 0.0) + event.device_time_total / STEPS
    return spent


def copied_per_us() -> float:
    """Returns the bytes that a copy within the device moves in a microsecond, read and written."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 20 * source.numel() / (begin.elapsed_time(end) * 1e3)


def random_reads_per_ns() -> float:
    """Returns the words that the device reads at random out of 8 GiB in a nanosecond."""
    import torch

    source = torch.empty(2**31 - 1, dtype=torch.int32, device="cuda")
    places = torch.randint(0, source.numel(), (1 << 24,), device="cuda")
    out = torch.empty(places.numel(), dtype=torch.int32, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.index_select(source, 0, places, out=out)
    begin.record()
    for _ in range(10):
        torch.index_select(source, 0, places, out=out)
    end.record()
    end.synchronize()
    return 10 * places.numel() / (begin.elapsed_time(end) * 1e6)


def measure(work: str) -> tuple[dict[str, float], dict[str, float]]:
    """Returns each kernel's microseconds and the bytes it must move: rows once, data between kernels once each way."""
    import torch

    import shoal
    from benchmarks import gpu

    kind, *rest = work.split()
    if kind == "A":
        ours = gpu.Ours(gpu.TABLES, gpu.A_ROWS, gpu.A_DIM, gpu.OPTIMIZERS[rest[0]][0], "none")
        batches = gpu.sequence_batches(gpu.TABLES, gpu.A_ROWS, gpu.A_KEYS, gpu.A_DIM)
    else:
        ours = gpu.Ours(gpu.TABLES, gpu.B_ROWS, int(rest[0]), shoal.RowwiseAdagrad(lr=0.01), "sum")
        batches = gpu.pooled_batches(rest[1], int(rest[0]))
    spent = profile(lambda number: ours.step(batches[number % len(batches)]))
    values = batches[0].values
    uses = torch.cat([one.unique(return_counts=True)[1] for one in values.chunk(gpu.TABLES)])
    n, rows, single = values.numel(), uses.numel(), int((uses == 1).sum())
    weights = 4 * ours.dim
    row = 2 * (weights + 16 * ours.bags._group._rows.layout(0).tail_stride)
    out = 4 * batches[0].whole.numel()
    moved = {
        "find": n * (8 + 96 + 4),
        "gather": rows * weights + out + 16 * n,
        "pool": rows * weights + out + 12 * n,
        "deal": n * (4 + 4 + 8 + 8) + rows * 16,
        "update_single": single * (row + 12) + out * single / n,
        "update": (rows - single) * (row + 16) + out * (n - single) / n,
    }
    return spent, moved


def run() -> None:
    import torch

    origin, speed, rows = record.origin(), copied_per_us(), []
    reads = random_reads_per_ns()
    rows.append(Row(origin.when, origin.commit, origin.machine, "", COPY, round(speed / 1e6, 3), 1.0))
    rows.append(Row(origin.when, origin.commit, origin.machine, "", RANDOM, round(reads, 2), 0.0))
    for work in WORKS:
        spent, moved = measure(work)
        for kernel, us in sorted(spent.items(), key=lambda pair: -pair[1]):
            reached = moved.get(kernel, 0.0) / speed / us
            rows.append(Row(origin.when, origin.commit, origin.machine, work, kernel, round(us, 1), round(reached, 2)))
        print(f"{work}: {sum(spent.values()):.0f} us", flush=True)
        torch.cuda.empty_cache()
    fresh = not CSV.exists()
    with CSV.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        if fresh:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def render(rows: Sequence[Row]) -> str:
    """Returns the newest run as a table: a line for each kernel, a column for each work."""
    if not rows:
        return "No run is recorded yet.\n"
    last = max(row.when for row in rows)
    rows = [row for row in rows if row.when == last]
    device = {row.kernel: row.us for row in rows if not row.work}
    cells = {(row.kernel, row.work): row for row in rows if row.work}
    shown = sorted({kernel for kernel, _ in cells}, key=lambda kernel: -max(cell(cells, kernel, w) for w in WORKS))
    works = [work for work in WORKS if any(of == work for _, of in cells)]
    lines = [f"| kernel | {' | '.join(works)} |", "|---" * (len(works) + 1) + "|"]
    for kernel in shown:
        texts = []
        for work in works:
            row = cells.get((kernel, work))
            share = "" if row is None or not row.reached else f" ({row.reached:.2f})"
            texts.append("" if row is None else f"{row.us:.0f}{share}")
        lines.append(f"| {kernel} | {' | '.join(texts)} |")
    sums = [f"{sum(cell(cells, kernel, work) for kernel in shown):.0f}" for work in works]
    lines.append(f"| **all** | {' | '.join(sums)} |")
    notes = f"Commit `{rows[0].commit}` on {rows[0].machine}, {last[:10]}; a copy moves {device[COPY]:.2f} TB/s there"
    notes += f", and {device[RANDOM]:.0f} words a nanosecond are read at random out of 8 GiB."
    return "\n".join([*lines, "", notes, ""])


def cell(cells: dict[tuple[str, str], Row], kernel: str, work: str) -> float:
    return cells[kernel, work].us if (kernel, work) in cells else 0.0


def read() -> list[Row]:
    if not CSV.exists():
        return []
    with CSV.open(newline="") as file:
        return [
            Row(**{**row, "us": float(row["us"]), "reached": float(row["reached"])}) for row in csv.DictReader(file)
        ]


def main() -> int:
    if sys.argv[1:] not in ([], ["--table"]):
        print(f"benchmarks.kernels: wanted nothing or --table; got {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        run()
    TUNING.write_text(BLOCK.sub(lambda _: render(read()), TUNING.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
