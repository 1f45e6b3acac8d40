"""How much memory rows need, and how many rows the lowest tier holds."""

import re

import pytest
import torch
from support.batches import kjt, train_step
from support.inside import table_of
from support.tiered import backward, collection, tier

import shoal
from shoal.errors import CapacityError, ConfigError
from shoal.storage import MemoryStorage


@pytest.mark.parametrize("dim", [1, 8, 300])
@pytest.mark.parametrize("rows", [100, 1000, 5000])
def test_the_memory_that_rows_are_said_to_need_is_enough(dim, rows):
    """Where lookups that wait for their backward hold all of it, others have no place."""
    table, little = {"name": "t", "dim": dim}, shoal.Dram(16 * rows * (dim + 20) + 4096)
    bags = collection([table], [little, MemoryStorage])
    batch = kjt({"t": [list(range(table_of(bags).room.spare(10**6)))]})
    more = torch.arange(10**6, 10**6 + rows), torch.ones(rows, dim)
    kept = bags(batch)
    with pytest.raises(CapacityError, match=r"table 't'\] its memory of .* stay until the backwards") as refused:
        bags.table("t").assign(*more)
    size = int(re.search(r"set Dram\((\d+)\) or more", str(refused.value))[1])
    backward(kept, 0)
    bags.table("t").assign(*more)
    bags = collection([table], [shoal.Dram(size), MemoryStorage])
    kept = bags(batch)
    bags.table("t").assign(*more)
    assert tier(bags, 0).bytes <= size
    backward(kept, 0)


@pytest.mark.parametrize("below", [[], [MemoryStorage]])
def test_memory_that_holds_no_row_is_refused_at_once(below):
    with pytest.raises(ConfigError, match=r"Table 't'\] tiers: wanted memory for a row .*; got Dram\(1\)"):
        collection([{"name": "t", "dim": 8}], [shoal.Dram(1), *below])


def test_the_lowest_tier_bounds_the_table(tmp_path):
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram("1MiB"), shoal.Ssd(tmp_path, "512KiB")])
    capacity = tier(bags, 1).capacity
    bags.table("t").assign(torch.arange(capacity), torch.randn(capacity, 8))
    with pytest.raises(CapacityError, match=rf"{capacity} rows and 1 new.*Raise Ssd\(size=\)"):
        bags(kjt({"t": [[capacity]]}))
    with pytest.raises(CapacityError, match=r"Raise Ssd\(size=\)"):
        bags.table("t").assign([-1], torch.randn(1, 8))
    train_step(bags, kjt({"t": [[1, 2, 3]]}))
    bags.table("t").erase([5])
    train_step(bags, kjt({"t": [[capacity]]}))
    assert len(bags.table("t")) == capacity
    with pytest.raises(CapacityError, match="Nothing was loaded"):
        other = collection([{"name": "t", "dim": 8}])
        other.table("t").assign(torch.arange(capacity + 1), torch.randn(capacity + 1, 8))
        bags.load_state_dict(other.state_dict())
    assert len(bags.table("t")) == capacity
