"""Histograms of scores whose range is not known before."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.log.scores import ScoreHistogram


def bars_of(*pieces):
    histogram = ScoreHistogram()
    for piece in pieces:
        histogram.add(torch.tensor(piece, dtype=torch.float64))
    return histogram.bars()


def test_steps():
    assert [(bar.low, bar.high, bar.rows) for bar in bars_of([0.0, 1.0, 1.0], [3.0])] == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 3, 0),
        (3, 4, 1),
    ]
    assert bars_of() == bars_of([]) == []
    assert [(bar.low, bar.rows) for bar in bars_of([7.0] * 5)] == [(7, 5)]
    assert [bar.rows for bar in bars_of([0.0], [63.0], [5.0])] == [1, 1, *[0] * 13, 1]


@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6), max_size=6))
def test_every_score_is_in_its_bar(pieces):
    scores = [score for piece in pieces for score in piece]
    bars = bars_of(*pieces)
    assert len(bars) <= 16
    assert sum(bar.rows for bar in bars) == len(scores)
    for bar in bars:
        assert bar.rows == sum(bar.low <= score < bar.high for score in scores)
