"""Which thread does what, and how much is on its way at a time."""

import threading
import time

import pytest
import torch
from support.batches import assert_same_rows, kjt
from support.inside import staged_batches_of, table_of
from support.prefetching import TABLE, Stages, backward, batches, spilling, train
from support.tiered import SMALL, collection

import shoal
from shoal.storage import MemoryStorage
from shoal.table import StagedTogether
from shoal.table.host.staging import HostStaging
from shoal.table.lower.threads import IoThreads

pytestmark = pytest.mark.threads


def test_collections_are_read_beside_each_other():
    both_read = threading.Barrier(2)

    class Remote(MemoryStorage):
        def read(self, keys):
            if threading.current_thread() is not threading.main_thread():
                both_read.wait(60)
            return super().read(keys)

    both = [collection([TABLE], [shoal.Dram("1MiB"), Remote]) for _ in range(2)]
    unseen = [kjt({"t": [range(50 * n, 50 * n + 50)]}) for n in range(10)]
    for step, batch in enumerate(shoal.prefetch(unseen, both, depth=1)):  # one batch is read at a time
        for bags in both:
            backward(bags(batch), step)
    assert not both_read.broken


def test_a_batch_that_waits_for_one_collections_memory_takes_none_of_anothers(tmp_path):
    class Full(Stages):
        def may_read(self, is_first):
            return is_first

    one = spilling("memory", tmp_path)
    part = one.stage(batches(1)[0])
    part.find(1)
    both = StagedTogether([part, Full()], IoThreads(1))
    assert not both.may_read(is_first=False)
    assert one.stats()["t"].tiers[-1].ahead_bytes == 0
    assert both.may_read(is_first=True)
    both.expect()
    assert one.stats()["t"].tiers[-1].ahead_bytes > 0
    both.release()


def test_depth_hides_a_storages_latency():
    """As many reads are under way as batches, and batches come in order."""
    reading, lock, three_read = set(), threading.Lock(), threading.Event()

    class Remote(MemoryStorage):
        def read(self, keys):
            with lock:
                reading.add(threading.get_ident())
                if len(reading) == 3:
                    three_read.set()
            assert three_read.wait(60)  # the first one is not answered before the third one is asked
            time.sleep(0.005 * (int(keys[0]) % 2))  # some are answered before those that were asked sooner
            with lock:
                reading.discard(threading.get_ident())
            return super().read(keys)

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram("128KiB"), Remote])
    some = [kjt({"t": [range(50 * n, 50 * n + 50)]}) for n in range(40)]
    wanted, got = train(plain, some), train(ahead, shoal.prefetch(some, ahead, depth=4))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert three_read.is_set()


def test_rows_that_are_read_ahead_and_have_no_place_are_bounded():
    most = 0

    class Watched(MemoryStorage):
        def read(self, keys):
            nonlocal most
            most = max(most, table.below.ahead_bytes)
            return super().read(keys)

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), Watched])
    some = [kjt({"t": [range(100 * (n % 9), 100 * (n % 9) + 100)]}) for n in range(36)]
    table = table_of(ahead)
    batch_bytes = 100 * table.below.row_bytes
    assert 4 * batch_bytes > table.budget
    wanted = train(plain, some)
    got = train(ahead, shoal.prefetch(some, ahead, depth=8), lambda _step: time.sleep(0.01))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    # One that is being placed, the first that is read, and one that the loop was given without a place.
    assert batch_bytes <= most <= 3 * batch_bytes
    assert ahead.stats()["t"].tiers[-1].ahead_bytes == 0


def recorded(monkeypatch, *methods):
    """The threads that call methods of a batch on its way, by method."""
    seen = {method: [] for method in methods}

    def record(method, call):
        def recording(self, *arguments):
            seen[method].append(threading.current_thread().name)
            return call(self, *arguments)

        monkeypatch.setattr(HostStaging, method, recording)

    for method in methods:
        record(method, getattr(HostStaging, method))
    return seen


def test_the_loop_finds_and_places_and_threads_do_what_may_wait(tmp_path, monkeypatch):
    main = threading.current_thread().name
    seen = recorded(monkeypatch, "_find", "place_into_room", "place", "read", "_end_departures")
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    wanted = train(plain, batches(60))
    got = train(ahead, shoal.prefetch(batches(60), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert seen["_find"] == [main] * 60
    assert len(seen["read"]) == 60 and set(seen["read"]) == {"shoal-prefetch-read"}
    assert set(seen["place_into_room"]) == {main}
    # Memory is full after some steps: rows have to leave for others from then on.
    assert set(seen["place"]) == set(seen["_end_departures"]) == {"shoal-prefetch-place"}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_batches_are_on_their_way_as_depth_says(depth, tmp_path):
    ahead = spilling("memory", tmp_path, "1MiB")
    loaded, most_loaded, most_found, came = 0, 0, 0, threading.Condition()

    def loader():
        nonlocal loaded
        for batch in batches(30):
            with came:
                loaded += 1
                came.notify()
            yield batch

    for step, batch in enumerate(shoal.prefetch(loader(), ahead, depth=depth)):
        with came:  # the loader is as far as it may be, unless it is less far than it must be
            came.wait_for(lambda step=step: loaded >= min(step + depth + 2, 30), 60)
        most_loaded = max(most_loaded, loaded - (step + 1))
        most_found = max(most_found, len(staged_batches_of(ahead)) - 1)
        backward(ahead(batch), step)
    assert most_loaded == depth + 1 and most_found == depth
