"""Which keys of a batch no memory that kernels reach has: those that a storage below must be asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.index.arguments import Batch, Finding, FoundLists, TierLists, TierNumbers
from shoal.index.device import finding_grids
from shoal.ops.arguments import lengths, variables
from shoal.ops.launch import Fill, Launch, Pieces, Space, kind_of
from shoal.ops.library.uses import table_in, trains_in
from shoal.table.device.cache import tier_lengths
from shoal.table.device.plan import DevicePlan
from shoal.table.device.rows import DeviceRows, Pins


class _Lists(NamedTuple):
    found: FoundLists
    tier: TierLists


class _Call(NamedTuple):
    batch: Batch
    lists: _Lists


@dataclass(frozen=True)
class Missing:
    """Keys of one table, all different and in ascending order. On the host."""

    keys: Tensor
    trains: Tensor  # whether a feature brings them that trains
    times: Tensor  # how often they are in the batch


class MissingKeys:
    """The programs that find them. Keys that are there are stamped: they are needed soon, and stay."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows
        self._v = variables(_Call)
        self._is_deep = torch.zeros(len(rows.configs), dtype=torch.bool, device=rows.device)
        self._is_deep[torch.tensor(sorted(rows.deep), dtype=torch.int64, device=rows.device)] = True

    def launch(self, plan: DevicePlan, values: Tensor, offsets: Tensor, pins: Pins) -> Space:
        """Begin to find them; the answer is for `read`, once the device is done with what is launched here."""
        n, batch = values.numel(), (offsets.numel() - 1) // max(len(plan.names), 1)
        total = plan.slot_lists * n
        slots = torch.empty(total, dtype=torch.int32, device=self._rows.device)
        layout = plan.layouts.of(("missing", n), lambda: self._pieces(plan, total))
        space = Space.of(layout, self._rows.device)
        program = plan.programs.of(("missing", kind_of(values, offsets)), False, lambda: self._launches(plan))
        brought = Batch(n, batch, *finding_grids(n, plan.slot_lists), pins.stamp, values, offsets, slots)
        program.run(_Call(brought, space.as_(_Lists)))
        return space

    def _pieces(self, plan: DevicePlan, total: int) -> Pieces:
        families, asked = len(self._rows.storage.families), total if plan.tiered else 0
        found = lengths(FoundLists, counts=3 + families, lost=total, lost_of=total, won_at=0)
        tier = tier_lengths(asked, places=False)
        return Pieces(_Lists(found, tier))

    def _launches(self, plan: DevicePlan) -> list[Launch | Fill]:
        rows, shape = self._rows, (plan.slot_lists, len(plan.names))
        batch, lists = self._v
        launches: list[Launch | Fill] = [Fill(lists.found.counts, 3 + len(rows.storage.families), 0)]
        if not plan.tiered or rows.above is None:
            finding = Finding(batch, lists.found)
            return [*launches, rows.index.find(finding, plan.tables_of, shape, insert=True, stamped=True)]
        t = rows.above.tiering(batch, lists.found, lists.tier, TierNumbers(0, 0, 0, 0))  # nothing is placed
        return [
            *launches,
            rows.above.find(t, plan.tables_of, shape, None, None, stamped=True, tickets=None),
            rows.above.find_below(t, rows.uncounted, insert=True, place=False, keep=True),
            rows.above.pin(t),
        ]

    def read(self, space: Space, values: Tensor) -> Mapping[int, Missing]:
        """By table, the keys of tables with a storage. Waits for the device."""
        counts, lost, lost_of = (space.tensor(name) for name in ("counts", "lost", "lost_of"))
        total = int(counts[0])
        if not total:
            return {}
        uses = lost_of[:total]
        deep = self._is_deep[table_in(uses).long()]
        uses, items = uses[deep].long(), lost[:total][deep].long()
        keys, tables = values[items % values.numel()].long(), table_in(uses)
        order = torch.argsort(keys)
        order = order[torch.argsort(tables[order], stable=True)]
        keys, tables, trains = keys[order], tables[order], trains_in(uses[order]).long()
        is_first = torch.ones_like(keys, dtype=torch.bool)
        is_first[1:] = (keys[1:] != keys[:-1]) | (tables[1:] != tables[:-1])
        group = torch.cumsum(is_first, 0) - 1
        nothing = torch.zeros_like(keys)
        trained, times = nothing.scatter_add(0, group, trains), nothing.scatter_add(0, group, torch.ones_like(keys))
        told = torch.stack(
            [tables[is_first], keys[is_first], *(one[: int(is_first.sum())] for one in (trained, times))]
        )
        tables, keys, trained, times = told.cpu()
        missing = {}
        for table in torch.unique(tables).tolist():
            here = tables == table
            missing[table] = Missing(keys[here], trained[here] != 0, times[here])
        return missing
