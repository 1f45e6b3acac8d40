"""The word that says how a feature uses a table."""

import pytest
import torch
import triton
import triton.language as tl
from support.device_tables import DEVICE

from shoal.ops.library.uses import NO_TABLE, is_inserted, may_be_inserted, table_in, table_of, trains, trains_in, use_of


@triton.jit
def read(uses, out, N: tl.constexpr):
    at = tl.arange(0, N)
    use = tl.load(uses + at)
    tl.store(out + at, table_of(use))
    tl.store(out + N + at, trains(use).to(tl.int32))
    tl.store(out + 2 * N + at, is_inserted(use).to(tl.int32))


@pytest.mark.parametrize(("does_train", "sees"), [(False, False), (True, False), (False, True)])
def test_what_is_written_is_read_by_torch_and_by_kernels(does_train, sees):
    tables = torch.tensor([0, 1, 7, 2**29 - 1], dtype=torch.int32)
    uses = torch.tensor([use_of(table, does_train, sees) for table in tables.tolist()], dtype=torch.int32)
    wanted = [tables, torch.full_like(tables, does_train), torch.full_like(tables, does_train or sees)]
    out = torch.empty(3, 4, dtype=torch.int32, device=DEVICE)
    read[(1,)](uses.to(DEVICE), out, N=4)
    assert out.tolist() == [one.tolist() for one in wanted]
    assert [
        table_in(uses).tolist(),
        trains_in(uses).int().tolist(),
        may_be_inserted(uses).int().tolist(),
    ] == out.tolist()


def test_no_use_of_a_table_is_the_word_of_none():
    assert NO_TABLE < 0 <= use_of(0, trains=False)
