"""Storages, disks and memory that fail while batches are staged: the loop goes on, and lookups raise what is theirs."""

import os
import threading

import pytest
import torch
from support.batches import assert_same_rows
from support.inside import nothing_is_staged
from support.prefetching import TABLE, backward, batches, spilling, train
from support.tiered import SMALL, assert_equal_outputs, collection

import shoal
from shoal import _native
from shoal.errors import PrefetchWarning, StorageError
from shoal.storage import MemoryStorage

pytestmark = pytest.mark.threads


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
@pytest.mark.parametrize("call", [_native.FileCall.read, _native.FileCall.write])
def test_a_disk_that_fails_is_the_lookups_to_tell(call, tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    loader = iter(shoal.prefetch(batches(60), ahead, depth=2))
    failures = 0
    try:
        for step, one in enumerate(batches(60)):
            two = next(loader)
            if step == 20:
                _native.inject_fault(call, "", 5, 0, 1 << 30)
            try:
                out = ahead(two)
            except StorageError:
                failures += 1
                _native.clear_faults()
                out = ahead(two)
            if step == 40:
                _native.clear_faults()
            wanted = plain(one)
            assert_equal_outputs([wanted, out], step)
            backward(wanted, step)
            backward(out, step)
    finally:
        _native.clear_faults()
    assert failures >= 1
    assert_same_rows(plain, ahead)


@pytest.mark.filterwarnings("ignore:.*could not be brought ahead:shoal.errors.PrefetchWarning")
def test_rows_that_are_lost_are_the_lookups_to_name_and_the_loop_goes_on_without_them(tmp_path):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    loader = iter(shoal.prefetch(batches(60), ahead, depth=3))
    failures = 0
    for step, one in enumerate(batches(60)):
        two = next(loader)
        if step == 30:
            for segment in tmp_path.rglob("*.seg"):
                os.truncate(segment, 0)
        try:
            out = ahead(two)
        except StorageError as error:
            failures += 1
            assert torch.isin(error.keys, two.values()).all()
            for module in (plain, ahead):
                assert module.table(error.table).erase(error.keys) == len(error.keys)
            out = ahead(two)
        wanted = plain(one)
        assert_equal_outputs([wanted, out], step)
        backward(wanted, step)
        backward(out, step)
    assert failures >= 1
    lost = ahead.table("t").unreadable()
    for module in (plain, ahead):
        assert module.table("t").erase(lost) == len(lost)
    assert_same_rows(plain, ahead)


class OneThread(MemoryStorage):
    """Serves the thread that made it, as sqlite3 does by default."""

    def read(self, keys):
        if threading.current_thread() is not threading.main_thread():
            raise ConnectionError("made in another thread")
        return super().read(keys)


def test_a_storage_that_fails_ahead_is_told_of_once_a_loop_and_counted():
    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), OneThread])
    for loop in range(2):
        wanted = train(plain, batches(20, seed=loop))
        with pytest.warns(PrefetchWarning) as told:
            got = train(ahead, shoal.prefetch(batches(20, seed=loop), ahead))
        assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
        assert len(told) == 1 and told[0].filename == train.__code__.co_filename
        said = str(told[0].message)
        assert "ConnectionError: made in another thread; [table 't'] raised by its lowest tier: OneThread.read" in said
        assert "lookup brings them itself" in said
    assert ahead.stats()["t"].tiers[-1].failures > 20
    assert_same_rows(plain, ahead)


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_storage_that_wants_to_end_the_thread(where):
    class Ending(MemoryStorage):
        def read(self, keys):
            return self._end("read") or super().read(keys)

        def write(self, keys, rows):
            return self._end("write") or super().write(keys, rows)

        def _end(self, what):
            if what == where and threading.current_thread() is not threading.main_thread():
                raise SystemExit

    plain, ahead = collection([TABLE]), collection([TABLE], [shoal.Dram(SMALL), Ending])
    wanted = train(plain, batches(30))
    with pytest.warns(PrefetchWarning, match="could not be brought ahead: SystemExit"):
        got = train(ahead, shoal.prefetch(batches(30), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)


def test_memory_that_is_refused_where_rows_are_placed_is_the_lookups_to_tell(tmp_path, monkeypatch):
    plain, ahead = collection([TABLE]), spilling("ssd", tmp_path)
    place, refused = _native.place, 0

    def refusing(tables, *rest):
        nonlocal refused
        if refused % 3 < 2:
            refused += 1
            return [-1] * len(tables)
        return place(tables, *rest)

    monkeypatch.setattr(_native, "place", refusing)
    wanted = train(plain, batches(40))
    got = train(ahead, shoal.prefetch(batches(40), ahead))
    assert all(torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    assert_same_rows(plain, ahead)
    assert refused >= 2 and nothing_is_staged(ahead)
