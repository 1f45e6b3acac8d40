"""Rows in host memory by slot. Growth and compaction are tested in csrc/store/dram_test.cc, budgets in modules."""

import pytest
import torch

from shoal import _native
from shoal.config import Column, RowFormat
from shoal.storage.dram import DramStorage

COLUMNS = (Column("sum", 3), Column("count", 1, 2.0))
ZEROS = _native.Init(_native.InitKind.zeros)


def taken(storage, n):
    storage.reserve(n)
    return storage.take(n)


def weights(storage, slots):
    return storage.read(slots, ZEROS, torch.zeros(len(slots), dtype=torch.int64))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_was_written_is_read(dtype):
    storage = DramStorage(RowFormat(3, dtype, COLUMNS))
    slots = taken(storage, 5)
    rows = torch.arange(15.0).view(5, 3)
    sums, counts, scores = rows + 0.5, torch.arange(5.0)[:, None], torch.arange(5).double() / 3
    storage.write(slots, rows)
    storage.write_column(COLUMNS[0], slots, sums)
    storage.write_column(COLUMNS[1], slots, counts)
    storage.write_scores(slots, scores)
    back = slots.flip(0)
    assert torch.equal(weights(storage, back), rows.flip(0))
    assert torch.equal(storage.read_column(COLUMNS[0], back), sums.flip(0))
    assert torch.equal(storage.read_column(COLUMNS[1], back), counts.flip(0))
    assert torch.equal(storage.read_scores(back), scores.flip(0))


def test_of_a_slot_that_comes_twice_the_last_wins():
    storage = DramStorage(RowFormat(1))
    (slot,) = taken(storage, 1).tolist()
    storage.write(torch.tensor([slot, slot], dtype=torch.int32), torch.tensor([[1.0], [2.0]]))
    assert weights(storage, torch.tensor([slot], dtype=torch.int32)).tolist() == [[2.0]]


def test_without_a_slot_a_row_reads_as_it_is_born():
    storage = DramStorage(RowFormat(2, state=COLUMNS))
    none = torch.tensor([-1], dtype=torch.int32)
    born = _native.Init(_native.InitKind.constant, 0.25)
    assert storage.read(none, born, torch.tensor([7])).tolist() == [[0.25, 0.25]]
    assert storage.read_column(COLUMNS[1], none).tolist() == [[2.0]]
    assert storage.read_scores(none).isnan().all()
    assert storage.first_state.tolist() == [0.0, 0.0, 0.0, 2.0]


def test_slots_are_reused_lowest_first():
    storage = DramStorage(RowFormat(2))
    slots = taken(storage, 6)
    storage.give(slots[[4, 1]])
    assert taken(storage, 2).tolist() == slots[[1, 4]].tolist()


def test_bytes_after_is_what_bytes_will_say_and_memory_comes_back():
    storage = DramStorage(RowFormat(64, state=COLUMNS))
    assert storage.bytes == 0
    wanted = storage.bytes_after(100_000)
    slots = taken(storage, 100_000)
    assert storage.bytes == wanted > 100_000 * 64 * 4
    storage.give(slots)
    assert storage.sparse
    storage.release_tail()
    assert storage.bytes == 0
