"""A table's counters."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import NotFoundError
from shoal.metrics import Counters

NAMES = {
    "lookups",
    "hits",
    "births",
    "erased",
    "dropped_gradients",
    "skipped_backwards",
    "skipped_rows",
    "steps",
}


def test_counters_start_at_zero_and_add_up():
    counters = Counters()
    assert counters.snapshot() == dict.fromkeys(NAMES, 0)
    counters.add("lookups", 5)
    counters.add("lookups", 2**40)
    counters.add("steps")
    assert counters.snapshot() == {**dict.fromkeys(NAMES, 0), "lookups": 5 + 2**40, "steps": 1}


def test_unknown_name_is_an_error_and_counts_nothing():
    counters = Counters()
    with pytest.raises(NotFoundError, match=r"wanted one of lookups, .*; got 'looups'"):
        counters.add("looups", 1)
    assert counters.snapshot() == dict.fromkeys(NAMES, 0)


def test_snapshot_is_a_copy():
    counters = Counters()
    counters.snapshot()["hits"] = 9
    assert counters.snapshot()["hits"] == 0


@pytest.mark.threads
def test_nothing_is_lost_between_threads():
    counters = Counters()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [counters.add("hits", 3) for _ in range(2000)])
    assert counters.snapshot()["hits"] == 4 * 3 * 2000


def test_copies_keep_the_values_and_count_on_their_own():
    counters = Counters()
    counters.add("births", 3)
    for other in (copy.deepcopy(counters), pickle.loads(pickle.dumps(counters))):
        other.add("births", 1)
        assert other.snapshot()["births"] == 4
    assert counters.snapshot()["births"] == 3
