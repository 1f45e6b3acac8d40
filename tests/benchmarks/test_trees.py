import pathlib

import pytest

from benchmarks import tree_worker
from benchmarks.trees import STEPS, bounds

ROWS = 2_000


def test_equal_times_have_a_ratio_of_one():
    assert bounds([1.0] * 30) == (1.0, 1.0, 1.0)


def test_the_interval_holds_the_mean_and_grows_with_the_spread():
    narrow, wide = bounds([1.0, 1.02] * 15), bounds([0.8, 1.3] * 15)
    for one in (narrow, wide):
        assert one.low < one.mean < one.high
    assert wide.high - wide.low > narrow.high - narrow.low


def test_both_orders_of_a_ratio_cancel_out():
    assert bounds([2.0, 0.5]).mean == pytest.approx(1.0)


def test_every_case_runs(tmp_path: pathlib.Path):
    (tmp_path / "rows").mkdir()
    turns = tree_worker.in_memory(ROWS)
    turns |= tree_worker.on_disk(ROWS, tmp_path / "rows")
    turns |= tree_worker.with_log(ROWS, tmp_path / "log")
    for turn in turns.values():
        turn(2)
    assert set(STEPS) <= set(turns)
