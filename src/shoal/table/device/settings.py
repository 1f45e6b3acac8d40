"""The optimizers' settings, where kernels read them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal import _native, optim
from shoal.ops.update import triton as kernels
from shoal.ops.update.apply import HYPER_COLUMNS
from shoal.optim.triton import STEPS as OPTIMIZER_STEPS
from shoal.table.device.rows import DeviceRows
from shoal.table.device.streams import send

_REDUCTIONS = {
    _native.Reduce.sum: kernels.SUM.value,
    _native.Reduce.mean: kernels.MEAN_OF.value,
    _native.Reduce.first: kernels.FIRST.value,
    _native.Reduce.last: kernels.LAST.value,
}


class Settings:
    """The tables' optimizer settings on the device; they travel again when they changed."""

    def __init__(self, rows: DeviceRows, hypers: Sequence[Any]) -> None:
        self._rows = rows
        self._sent: list[Any] = []
        self.kinds: dict[int, Any] = {}
        self.reductions: dict[int, int] = {}
        self.plain: dict[int, bool] = {}
        self.device = torch.zeros(len(rows.configs), HYPER_COLUMNS.value, dtype=torch.float64, device=rows.device)
        self.refresh(hypers)

    def refresh(self, hypers: Sequence[Mapping[str, Any]]) -> None:
        """Bring the settings as they are now to the device."""
        now = [list(hyper.values()) for hyper in hypers]
        if now == self._sent:
            return
        self._sent = now
        table = np.zeros(tuple(self.device.shape), dtype=np.float64)
        self.plain = {}
        for number, config in enumerate(self._rows.configs):
            optimizer, family = config.optimizer, self._rows.families[number]
            if optimizer is None:
                continue
            # Steps that depend on the table's step take it from the device: any other than 0 says so.
            step = optim.step(optimizer, hypers[number], 1)
            table[number, : len(step.device_numbers)] = step.device_numbers
            self.kinds[family] = OPTIMIZER_STEPS[step.kind]
            self.reductions[family] = _REDUCTIONS[step.reduce]
            self.plain[family] = self.plain.get(family, True) and step.is_plain
        self.device.copy_(send(torch.from_numpy(table), self.device.device), non_blocking=True)
