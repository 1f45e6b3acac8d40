"""A group without a place for rows: what a collection has on torch's meta device."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.errors import ConfigError, DeviceError
from shoal.table.host.group import HostGroup
from shoal.table.host.staging import HostStaging
from shoal.table.request import Batch, Request


class MetaGroup(HostGroup):
    """Tables that have settings and no rows. They can be asked what they hold, which is nothing, and not changed."""

    def __init__(self, name: str, configs: Sequence[Table], seed: int) -> None:
        # Without tiers: these open files and storages, which are for a group with rows.
        super().__init__(name, [replace(config, tiers=None) for config in configs], seed)
        self.device = torch.device("meta")

    def retire(self, why: str) -> None:
        self.retired = why

    def _held_exclusively(self, entered: Callable[[], bool | None]) -> _native.Held:
        raise self._refused()

    def lookup(self, request: Request) -> tuple[Tensor, Tensor]:
        raise self._refused()

    def stage(self, batch: Batch) -> HostStaging | None:
        raise self._refused()

    def _refused(self) -> ConfigError | DeviceError:
        if self.retired is not None:
            return ConfigError(self.retired)
        return DeviceError(
            f"[{self.name}] wanted tables with a place for rows; these are on meta, "
            f"which has none. Call to_empty(device='cpu') or to_empty(device='cuda') on it or on the model first."
        )
