"""Step time against hit rate where rows spill to a disk: memory holds less and less of them."""

import itertools

from rich.progress import track

from benchmarks import record, spill, work
from benchmarks.curve import Point
from benchmarks.measure import Bench
from benchmarks.scratch import folder

MEMORY = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
_ROUNDS = 3


def measure(bench: Bench) -> list[Point]:
    rows, bags = bench.effort.live_rows // 4, bench.effort.bags
    origin, points = record.origin(), []
    whole = spill.Subject(rows, bags, None, None)
    numbers = itertools.count()

    def some() -> list[spill.shoal.KeyedJaggedTensor]:
        return spill.batches(work.ZIPF_EXPONENT, rows, bags, itertools.islice(numbers, bench.effort.spill.turn_steps))

    for memory in track(MEMORY, description="memory for a part of the rows"):
        with folder() as here:
            part = spill.Subject(rows, bags, memory, here)
            for _ in range(2):
                part.train(some(), 2)
            ahead, alone, fast = [], [], []
            for _ in range(_ROUNDS):
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
