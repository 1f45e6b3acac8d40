"""How the features of a batch meet the tables of a group in device memory. Made once for each order of features."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.ops.launch import Layouts, Programs
from shoal.ops.library.uses import NO_TABLE, use_of
from shoal.ops.pool import triton as kernels
from shoal.table.parts import Part, parts_of


@dataclass(frozen=True)
class FamilyParts:
    """The parts of one family: a run of the plan's parts."""

    family: int
    first: int
    count: int
    parts: Tensor


class DevicePlan:
    """The parts of a lookup, ordered by family, and their form for the kernels."""

    def __init__(
        self,
        configs: Sequence[Table],
        families: Sequence[int],
        names: Sequence[str],
        device: torch.device,
        tiered: Collection[int] = (),
        deep: Collection[int] = (),
    ) -> None:
        """`tiered`: tables whose rows are in host memory. `deep`: tables with a storage below."""
        self.names = tuple(names)
        self.programs = Programs()
        self.layouts = Layouts()
        parts, self.columns, self.slot_lists = parts_of(configs, names)
        self.parts: list[Part] = parts
        # The kernels' order: parts of one family next to each other.
        order = sorted(range(len(parts)), key=lambda at: families[parts[at].table])
        number_of = {at: number for number, at in enumerate(order)}
        described = torch.tensor(
            [self._describe(n, configs[parts[at].table], parts[at]) for n, at in enumerate(order)], dtype=torch.int64
        )
        self.device_parts = described.to(device)
        self.families: list[FamilyParts] = []
        for family in sorted({families[part.table] for part in parts}):
            numbers = [n for n, at in enumerate(order) if families[parts[at].table] == family]
            first, count = numbers[0], len(numbers)
            self.families.append(FamilyParts(family, first, count, self.device_parts[first : first + count]))
        uses = np.full((self.slot_lists, len(names)), NO_TABLE, dtype=np.int32)
        in_slot_lists = np.full((self.slot_lists, len(names)), -1, dtype=np.int32)
        for at, part in enumerate(parts):
            # Others may insert what it lacks, or it may be below.
            sees = not part.trains and (
                part.table in tiered
                or part.table in deep
                or any(other.table == part.table and other.trains for other in parts)
            )
            uses[part.slot_list, part.source] = use_of(part.table, part.trains, sees)
            in_slot_lists[part.slot_list, part.source] = number_of[at]
        self.tables_of = torch.from_numpy(uses).to(device)
        self.parts_of = torch.from_numpy(in_slot_lists).to(device)
        self._sources_in_order = torch.tensor([part.source for part in parts], dtype=torch.int64).to(device)
        self._dims_in_order = torch.tensor([part.dim for part in parts], dtype=torch.int64).to(device)
        self._places = torch.tensor(order, dtype=torch.int64).to(device)
        self.order = order
        self.trained = sorted({part.table for part in parts if part.trains})
        self.tiered = any(part.table in tiered for part in parts)
        self.deep = any(part.table in deep for part in parts)
        self.all_train = all(part.trains for part in parts)
        self.trained_mask = torch.zeros(len(configs), dtype=torch.int64, device=device)
        self.trained_mask[torch.tensor(self.trained, dtype=torch.int64)] = 1
        self._batch_parts = _native.BatchParts([(part.source, part.table, part.dim, part.trains) for part in parts])
        self._sized: tuple[list[int], _native.BatchSizes] | None = None  # of the last batch
        # The items of a row are reduced in the order of its table's features; most often they lie so.
        places = [
            [(part.slot_list, part.source) for part in parts if part.table == table] for table in range(len(configs))
        ]
        self.in_feature_order = all(place == sorted(place) for place in places)
        # Whether items bring a part of their bag's gradient.
        self.has_mean = any(configs[part.table].pooling == "mean" for part in parts)
        # Gradients that begin at multiples of four elements are loaded four at a time.
        self.aligned = all(part.dim % 4 == 0 for part in parts)
        # Outputs without pooling lie as the batch does where each feature feeds one table, in order, in one family.
        self.in_order = (
            self.slot_lists == 1
            and len(self.families) == 1
            and [part.source for part in parts] == list(range(len(names)))
            and all(part.feature.mode != "write" for part in parts)
        )

    def sizes(self, counts: Sequence[int], room: _native.Room) -> _native.BatchSizes:
        """What follows from how many keys each feature has. REQUIRES: one number for each."""
        counts = list(counts)
        sized = self._sized  # once: other threads may be here too
        if sized is None or sized[0] != counts:
            sized = self._sized = counts, self._batch_parts.sizes(counts, room)
        return sized[1]

    def starts(self, offsets: Tensor, batch: int, size: int) -> Tensor:
        """Where each part's output begins and ends, without pooling: parts follow each other in the order of
        tables, and within `size` elements, whatever the offsets say."""
        bounds = offsets[:: max(batch, 1)] if batch else offsets.new_zeros(len(self.names) + 1)
        sizes = (bounds[1:] - bounds[:-1])[self._sources_in_order] * self._dims_in_order
        ends = torch.cumsum(sizes, 0)
        return torch.stack([ends - sizes, ends], dim=1).clamp_(0, size)[self._places]

    @staticmethod
    def _describe(number: int, config: Table, part: Part) -> list[int]:
        row = [0] * kernels.PART_COLUMNS.value
        row[kernels.SOURCE.value] = part.source
        row[kernels.COPY.value] = part.slot_list
        row[kernels.COLUMN.value] = part.column
        row[kernels.TABLE.value] = part.table
        row[kernels.MEAN.value] = config.pooling == "mean"
        row[kernels.SILENT.value] = part.feature.mode == "write"
        row[kernels.BLANK.value] = config.missing == "zero"
        row[kernels.NUMBER.value] = number
        return row
