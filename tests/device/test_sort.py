"""The order of a batch's slots: ascending, and of equal ones the first first."""

import numpy as np
import pytest
import torch
from support.device_tables import DEVICE

from shoal.ops.sort import Sorter


def sorted_slots(slots):
    """What the sorter makes of slots, in memory that it is given."""
    ordered, order = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.int64)
    Sorter(slots.device).sort(slots, ordered, order)
    return ordered.cpu(), order.cpu()


@pytest.mark.parametrize(
    ("n", "bound"), [(0, 1), (1, 5), (1000, 40), (300_000, 40_000_000), (50_000, 1), (7777, 2**31)]
)
def test_equal_slots_keep_their_order_and_those_of_minus_one_come_first(n, bound):
    generator = torch.Generator().manual_seed(n)
    slots = torch.randint(-1, bound, (n,), dtype=torch.int64, generator=generator).to(torch.int32)
    wanted = np.argsort(slots.numpy(), kind="stable")
    ordered, order = sorted_slots(slots.to(DEVICE))
    assert torch.equal(order, torch.from_numpy(wanted))
    assert torch.equal(ordered, slots[wanted])


def test_the_last_slot_there_can_be_is_sorted():
    ordered, order = sorted_slots(torch.tensor([2**31 - 1, 0, -1, 2**31 - 1], dtype=torch.int32, device=DEVICE))
    assert ordered.tolist() == [-1, 0, 2**31 - 1, 2**31 - 1]
    assert order.tolist() == [2, 1, 0, 3]
