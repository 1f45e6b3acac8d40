"""Step time against hit rate on a GPU: keys drawn from larger and larger pools. python -m benchmarks.gpu_curve"""

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import curve, record
from benchmarks.curve import Point
from benchmarks.effort import FULL
from benchmarks.gpu import Batch, Ours
from benchmarks.gpu_tiers import TIER_STEPS, TIER_WORK, held_tiers, rows_ahead, tier_batches
from benchmarks.measure import Bench

# Keys of a table to draw from, as parts of those that fit device memory.
POOLS = (0.95, 1.1, 1.37, 1.8, 2.7, 4.5, 8.0)
_PRIMING = 40


def _milliseconds(step: Callable[[Batch], object], batches: Sequence[Batch]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for batch in batches:
        step(batch)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / len(batches)


def _asked(ours: Ours) -> tuple[int, int]:
    """Returns the number of keys that were found above, and of those that were not."""
    tiers = [ours.bags.table(name).stats().tiers[0] for name in ours.names]
    return sum(tier.hits for tier in tiers), sum(tier.misses for tier in tiers)


def measure(bench: Bench) -> list[Point]:
    origin, points = record.origin(), []
    held, work = held_tiers(bench, ""), TIER_WORK[""]
    for part in track(POOLS, description="pools of keys"):
        pool = int(part * work.above)
        batches = tier_batches(work, pool, _PRIMING + 3 * TIER_STEPS)
        primed, plain, ahead = batches[: -2 * TIER_STEPS], batches[-2 * TIER_STEPS : -TIER_STEPS], batches[-TIER_STEPS:]
        for batch in primed:
            held.two.step(batch)
        if not points:  # the first calls compile
            with rows_ahead(held.two, primed[:TIER_STEPS]) as coming:
                for batch in coming:
                    held.two.step(batch)
                    held.one.step(batch)
        hits, misses = _asked(held.two)
        alone = _milliseconds(held.two.step, plain)
        hits, misses = (after - before for after, before in zip(_asked(held.two), (hits, misses), strict=True))
        with rows_ahead(held.two, ahead) as coming:
            with_prefetch = _milliseconds(lambda _batch: held.two.step(next(coming)), ahead)
        points.append(
            Point(
                origin.when,
                origin.commit,
                origin.machine,
                round(min(1 / part, 1.0), 4),
                round(hits / (hits + misses), 4),
                round(misses / TIER_STEPS, 1),
                round(with_prefetch, 3),
                round(alone, 3),
                round(_milliseconds(held.one.step, plain), 3),
            )
        )
    return points


if __name__ == "__main__":
    made = measure(Bench(FULL))
    curve.tell(made, Console())
    curve.append("gpu", made)
