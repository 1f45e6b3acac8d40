"""FULL is what benchmarks/results was measured with; shorter runs are smaller in everything."""

from collections.abc import Iterator
from dataclasses import astuple

from benchmarks import memory, ragged
from benchmarks.effort import FULL, QUICK, TINY
from benchmarks.registry import suite
from benchmarks.settled import settled
from benchmarks.tiers import ROW_BYTES


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, tuple):
        for one in value:
            yield from numbers(one)
    else:
        yield value


def test_full_sizes_are_those_that_cases_name():
    names = {case.name for name in ("cpu", "tiers", "log") for case in suite(name).select()}
    assert f"recover a snapshot and {FULL.log.commits} commits of .2 %, dim 64" in names
    assert "ssd writes, 256-byte rows in batches of 16 MiB" in names
    assert FULL.disk.write_rows * ROW_BYTES == 16 << 20
    assert max(ragged.SIZES) == FULL.ragged_bags
    assert FULL.growth_rows == (10_000_000, 100_000_000)


def test_shorter_runs_are_nowhere_larger():
    for shorter, longer in ((QUICK, FULL), (TINY, QUICK)):
        pairs = zip(numbers(astuple(shorter)), numbers(astuple(longer)), strict=True)
        assert all(0 < small <= large for small, large in pairs)


def test_a_case_that_needs_little_memory_takes_none_of_the_rest():
    before = memory.resident()
    with settled(64 << 20):
        assert memory.resident() - before < 64 << 20
