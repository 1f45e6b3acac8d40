"""What an optimizer's step may tell its kernel."""

import pytest

from shoal import _native
from shoal.config import RowFormat
from shoal.errors import InputError
from shoal.storage.dram import DramStorage


def test_more_settings_than_a_kernel_takes_are_refused() -> None:
    storage = DramStorage(RowFormat(4))
    update = _native.UpdateTable(storage.rows, 0, _native.Backwards())
    kinds = _native.Optimizer.adam, _native.Reduce.sum
    update.set(*kinds, 0.1, [0.5] * 6, 0.0, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(InputError, match="takes 6 settings beside lr; got 7"):
        update.set(*kinds, 0.1, [0.5] * 7, 0.0, 1.0, 0.0, 0.0, 0.0)
