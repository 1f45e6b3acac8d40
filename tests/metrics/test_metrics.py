"""Counters and gauges of one object."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.metrics import Counter, Metrics


class Tank:
    def __init__(self):
        self.level = 3
        self.metrics = Metrics(self, name="tank", limit=None)
        self.filled = self.metrics.counter("filled")
        self.metrics.gauges(Tank.measured)

    def measured(self):
        return {"level": self.level, "space": 10 - self.level}


def test_constants_counters_and_gauges_are_read_together():
    tank = Tank()
    tank.filled.add()
    tank.filled.add(4)
    tank.level = 5
    assert tank.metrics.read() == {"name": "tank", "limit": None, "filled": 5, "level": 5, "space": 5}
    tank.metrics.gauges(lambda tank: {"space": 20 - tank.level})  # a later one is the truth
    assert tank.metrics.read()["space"] == 15


def test_a_counter_of_one_name_is_one_counter():
    metrics = Metrics(Tank())
    assert metrics.counter("a") is metrics.counter("a")


def test_metrics_do_not_keep_their_object_alive():
    metrics = Tank().metrics
    assert metrics.read() == {"name": "tank", "limit": None, "filled": 0}


@pytest.mark.threads
def test_nothing_is_lost_between_threads():
    counter = Counter()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [counter.add(3) for _ in range(2000)])
    assert counter.value == 4 * 3 * 2000
