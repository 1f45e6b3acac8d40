"""Tables on a device above a storage that kernels do not reach, and their equals in device memory."""

import pytest
import torch

import shoal
from shoal import Dram, Hbm
from shoal.storage import MemoryStorage
from shoal.storage.hbm import UNSAVED_FLAG
from support.device_pairs import Pair, assert_copies_sound, with_tiers
from support.device_tables import DEVICE, in_hbm
from support.inside import device_rows_of, tables_of

FORMS = {
    "hbm": lambda size, below: [Hbm(size), below],
    "dram": lambda size, below: [Hbm("1KiB"), Dram(size), below],
}
ON_ALL_FORMS = pytest.mark.parametrize("form", FORMS)
ON_ONE_FORM = pytest.mark.parametrize("form", [pytest.param("hbm", marks=pytest.mark.slow), "dram"])


def assert_sound(bags):
    """Rows are in memory, in the storage or in both; where they do not differ, they are equal."""
    assert_copies_sound(bags)
    for number, table in enumerate(tables_of(bags)):
        if table.below is None:
            continue
        rows, storage = device_rows_of(bags), table.below.lower.storage
        keys, _slots = rows.index.entries(number)
        assert len(keys) + table._rows.held_slots(number) <= rows.capacity(number)
        everywhere = set(keys.tolist()) | set(storage.keys().tolist())
        assert len(table) == len(everywhere)
        assert table.below.away == len(everywhere) - len(keys)
        here_now = rows.find_rows(number, keys)
        family = rows.families[number]
        saved = (rows.storage.read_flags(family, here_now) & UNSAVED_FLAG) == 0
        packed, found = storage.read(keys[saved].cpu())
        assert found.all()
        assert torch.equal(rows.storage.pack(family, here_now[saved]).cpu(), packed)


class Below(Pair):
    """A collection whose tables are above a storage, and its equal with all of it in device memory."""

    def __init__(self, form, *tables, size="4KiB", below=MemoryStorage, kind=shoal.EmbeddingBagCollection, alone=()):
        deep = [
            in_hbm(table) if table.name in alone else with_tiers(table, FORMS[form](size, below)) for table in tables
        ]
        whole = [in_hbm(table) for table in tables]
        super().__init__(*(kind(tables, device=DEVICE, seed=7) for tables in (deep, whole)), assert_sound)
