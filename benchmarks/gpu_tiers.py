"""The GPU cases with most rows in host memory, below device memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import shoal
from benchmarks.gpu import (
    A_DIM,
    A_KEYS,
    DEVICE,
    OPTIMIZERS,
    TABLES,
    WARMING,
    Batch,
    Ours,
    contender,
    power_law,
    timed,
)
from benchmarks.measure import OURS, Bench, Contender, Result
from benchmarks.registry import Limit, Registry
from shoal.index.device import DeviceIndex
from shoal.storage.hbm import Layout
from shoal.table.device.cache import bytes_above

registry = Registry()


@dataclass(frozen=True)
class TierWork:
    """Rows of a table in host memory, rows that fit device memory, ids of a batch, and pools of keys to draw from."""

    rows: int
    above: int
    keys: int
    pools: dict[str, int]

    def part(self, divisor: int) -> "TierWork":
        pools = {name: pool // divisor for name, pool in self.pools.items()}
        return TierWork(self.rows // divisor, self.above // divisor, self.keys // divisor, pools)


_WHOLE = TierWork(3_355_443, 335_544, A_KEYS, {"fit": 330_000, "spill": 460_000})
TIER_WORK = {"": _WHOLE, ", 1/16": _WHOLE.part(16)}
TIER_STEPS, TIER_PRIMING = 20, 100
# The limit of a case: a ratio to our own step with all rows in device memory, or milliseconds.
TIER_LIMITS = {
    ("train", "fit"): {"all in Hbm": Limit(1.3)},
    ("train", "spill"): {"4 ms": Limit(1.0)},
    ("eval", "fit"): {"0.45 ms": Limit(1.0)},
    ("eval", "spill"): {},
}
AHEAD_LIMITS = {"fit": {}, "spill": {"2.5 ms": Limit(1.0)}}


@dataclass(frozen=True)
class Tiers:
    """Holds the same tables with most rows below and with all rows in device memory, and the batches of each pool."""

    two: Ours
    one: Ours
    row_bytes: int
    batches: dict[str, list[Batch]]

    def moved(self) -> int:
        """Returns the number of rows promoted or written down so far, the larger of the two."""
        stats = [self.two.bags.table(name).stats().tiers[0] for name in self.two.names]
        return max(sum(one.promotions for one in stats), sum(one.demotions for one in stats))


def tier_batches(work: TierWork, pool: int, many: int) -> list[Batch]:
    """Returns batches with every key of the pool once, then with keys drawn from it. No batch comes twice, since
    its rows would be in device memory."""
    stride, n = work.rows // pool, TABLES * work.keys
    gradient = torch.randn(n, A_DIM, device=DEVICE)
    offsets, lengths = torch.arange(n + 1, device=DEVICE), torch.ones(n, dtype=torch.int64, device=DEVICE)
    passes = -(-pool // work.keys)
    keys = [
        (torch.arange(first, first + work.keys, device=DEVICE) % pool * stride).repeat(TABLES)
        for first in range(0, passes * work.keys, work.keys)
    ]
    keys += [torch.cat([power_law(work.keys, pool) * stride for _ in range(TABLES)]) for _ in range(many)]
    counts, grads = (work.keys,) * TABLES, list(gradient.split(work.keys))
    return [Batch(values, lengths, offsets, counts, gradient, grads) for values in keys]


def held_tiers(bench: Bench, size: str) -> Tiers:
    """Returns the tables of that size, which are made once."""
    work, adam = TIER_WORK[size], OPTIMIZERS["adam"][0]
    config = shoal.Table("t", A_DIM, optimizer=adam)
    layout = Layout(config.format, whole=True)

    def build() -> Tiers:
        tiers = [
            shoal.Hbm(bytes_above(layout, work.above)),
            shoal.Dram(work.rows * layout.row_bytes + DeviceIndex.bytes_for(work.rows)),
        ]
        one = Ours(TABLES, work.rows, A_DIM, adam, "none")
        two = Ours(TABLES, work.rows, A_DIM, adam, "none", tiers)
        many = TIER_PRIMING + WARMING + TIER_STEPS * bench.effort.rounds + 2  # that prefetch takes ahead
        drawn = {name: tier_batches(work, pool, many) for name, pool in work.pools.items()}
        made = Tiers(two, one, layout.row_bytes, drawn)
        two.bags.check()
        return made

    return bench.keep(f"tiers{size}", build)


def bus_speed() -> float:
    """Returns how many bytes a copy moves in a millisecond from pinned memory to the device."""
    n = 1 << 28
    host, device = torch.empty(n, dtype=torch.uint8, pin_memory=True), torch.empty(n, dtype=torch.uint8, device=DEVICE)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    device.copy_(host, non_blocking=True)
    begin.record()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    return 4 * n / begin.elapsed_time(end)


@registry.case(
    "tiers {what}, {draw}{size}",
    compares="{what} of sequences where most rows are in host memory, to all of them in device memory; and the time in "
    "which a copy would move the rows that move",
    limits=lambda size, draw, what: {} if size else TIER_LIMITS[what, draw],
    stage="tiers{size}",
    size=tuple(TIER_WORK),
    draw=("fit", "spill"),
    what=("train", "eval"),
)
def tiers(bench: Bench, size: str, draw: str, what: str) -> Result:
    held = held_tiers(bench, size)
    drawn = _primed(held, size, draw)
    ours, theirs = (held.two.step, held.one.step) if what == "train" else (held.two.eval, held.one.eval)
    contenders = [contender(OURS, ours, drawn), contender("all in Hbm", theirs, drawn)]
    return _timed(bench, held, contenders, TIER_LIMITS[what, draw])


def _primed(held: Tiers, size: str, draw: str) -> list[Batch]:
    """Runs one pass over the pool and some more steps. Returns the batches that follow."""
    batches, work = held.batches[draw], TIER_WORK[size]
    first = -(-work.pools[draw] // work.keys) + TIER_PRIMING
    for batch in batches[:first]:
        held.two.step(batch)
    return batches[first:]


def _timed(bench: Bench, held: Tiers, contenders: Sequence[Contender], limits: Mapping[str, Limit]) -> Result:
    before = held.moved()
    result = timed(bench, contenders, TIER_STEPS)
    held.two.bags.check()
    speed, rounds = bus_speed(), bench.effort.rounds
    rows = (held.moved() - before) / (WARMING + TIER_STEPS * rounds)
    bench.tell(f"{rows:.0f} rows of {held.row_bytes} bytes a step, {speed / 1e6:.1f} GB/s")
    most = {name: float(name.split()[0]) for name in limits if name.endswith("ms")}
    bus = {"the bus alone": rows * held.row_bytes / speed} if rows else {}
    bounds = {**bus, **most}
    return Result(result.unit, {**result.rounds, **{name: [value] * rounds for name, value in bounds.items()}})


@registry.case(
    "tiers train, {draw} with prefetch{size}",
    compares="the same where shoal.prefetch brings the rows of two batches ahead to device memory",
    limits=lambda size, draw: {} if size else AHEAD_LIMITS[draw],
    stage="tiers{size}",
    size=tuple(TIER_WORK),
    draw=("fit", "spill"),
)
def tiers_ahead(bench: Bench, size: str, draw: str) -> Result:
    held = held_tiers(bench, size)
    drawn = _primed(held, size, draw)
    with rows_ahead(held.two, drawn) as ahead:
        contenders = [
            Contender(OURS, lambda _number: held.two.step(next(ahead))),
            contender("all in Hbm", held.one.step, drawn),
        ]
        return _timed(bench, held, contenders, AHEAD_LIMITS[draw])


@contextmanager
def rows_ahead(ours: Ours, batches: Sequence[Batch]) -> Iterator[Iterator[Batch]]:
    """Yields the batches with their rows in device memory."""

    def features(batch: Batch) -> shoal.KeyedJaggedTensor:
        return shoal.KeyedJaggedTensor(ours.names, batch.values, lengths=batch.lengths, offsets=batch.offsets)

    ahead: Any = iter(shoal.prefetch(batches, ours.bags, features))
    try:
        yield ahead
    finally:
        ahead.close()
