"""Forwards on the device: find, give birth, pool or gather. Launches only; nothing waits."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.index.device import FINDING, finding_grids
from shoal.ops.launch import Fill, Launch, Pieces, Send, Space, blocks, kind_of, power_of_two, variables
from shoal.ops.pool import triton as kernels
from shoal.table.device.cache import TIERING, tiering_pieces
from shoal.table.device.plan import DevicePlan, FamilyParts
from shoal.table.device.rows import TRITON_TYPES, DeviceRows, Pins


@dataclass(frozen=True)
class Looked:
    """What a lookup leaves for its update."""

    plan: DevicePlan
    values: Tensor
    offsets: Tensor
    batch: int
    kind: Hashable  # of values and offsets
    slots: Tensor
    tickets: Tensor  # of every item, where its gradient is and whose row it goes to
    shares: Tensor | None  # of every item, its factor
    found: torch.cuda.Event | None = None  # behind it the lookup reads the rows that it found, and nothing else

    def is_of(self, values: Tensor, offsets: Tensor) -> bool:
        """Whether these tensors are the forward's."""
        return (
            values.data_ptr() == self.values.data_ptr()
            and offsets.data_ptr() == self.offsets.data_ptr()
            and values.shape == self.values.shape
            and offsets.shape == self.offsets.shape
            and values.dtype == self.values.dtype
            and offsets.dtype == self.offsets.dtype
        )

    def again(self, values: Tensor, offsets: Tensor) -> "Looked":
        """The same in other tensors."""
        if self.is_of(values, offsets):
            return self
        return replace(self, values=values, offsets=offsets, kind=kind_of(values, offsets))


def _bags_together(dim: int) -> int:
    """Bags that a program pools side by side."""
    return max(1, min(16, 256 // power_of_two(dim))) if dim <= 64 else 1


def _rows_together(dim: int) -> int:
    """Rows that a program gathers."""
    return max(1, 1024 // power_of_two(dim))


class Lookups:
    """The programs of forwards."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows
        self._placing = variables(*FINDING, *TIERING)
        families = range(len(rows.storage.families))
        own = ("weights", "out", "starts", "tickets", "shares")
        self._v = variables(
            *rows.variables, "features_of", "lacking", *TIERING, *own, *(f"row_blocks{family}" for family in families),
            "ledger_copy", "ledger_event",
        )  # fmt: skip

    def run(
        self,
        plan: DevicePlan,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        training: bool,
        keep: bool,
        out: Tensor,
        pins: Pins,
    ) -> Looked:
        """Find the rows, give birth to those that lack in training, and write the output. REQUIRES: room was made."""
        rows = self._rows
        n, batch = values.numel(), (offsets.numel() - 1) // max(len(plan.names), 1)
        device, total = rows.device, plan.copies * n
        insert = training and bool(plan.trained)
        slots = torch.empty(total, dtype=torch.int32, device=device)
        tickets = torch.empty(total, dtype=torch.int64, device=device) if keep else slots
        shared = keep and bool(plan.columns) and (weights is not None or plan.has_mean)
        shares = torch.empty(total, dtype=torch.float32, device=device) if shared else None
        kind = kind_of(values, offsets)
        starts = slots if plan.columns or plan.in_order else plan.starts(offsets, batch, out.numel())
        moves = plan.tiered and (training or keep)
        layout = plan.layouts.of(
            ("lookup", n, batch, insert, moves), lambda: self._pieces(plan, n, batch, insert, moves)
        )
        # Lookups of eval may run beside each other.
        space = rows.scratch.take(layout) if training else Space.of(layout, device)
        place = plan.tiered and training
        program = plan.programs.of(
            ("lookup", kind, kind_of(weights), out.dtype, insert, place, keep, training or keep),
            training or keep,
            lambda: self._launches(plan, insert, place, keep, weights is not None, shared, training or keep),
        )
        over, block = (batch, _bags_together) if plan.columns else (n, _rows_together)
        told = rows.ledger.next() if insert else ()
        program.run(
            *rows.values(values, offsets, slots, space, batch, plan.copies, pins.stamp), pins.oldest, pins.held,
            *((1, 1) if rows.above is None else rows.above.grids(total)),
            out if weights is None else weights,  # any tensor: not read
            out, starts, tickets, out if shares is None else shares,
            *(blocks(over, block(family.layout.dim)) for family in rows.storage.families),
            *told,
        )  # fmt: skip
        if insert:
            rows.sent()
        return Looked(plan, values, offsets, batch, kind, slots, tickets, shares, told[1] if told else None)

    def place(self, plan: DevicePlan, values: Tensor, offsets: Tensor, pins: Pins) -> None:
        """Bring the rows of a batch up, where it has a row and there is room above. Nothing is born or counted."""
        rows = self._rows
        n, batch = values.numel(), (offsets.numel() - 1) // max(len(plan.names), 1)
        if not n or rows.above is None:
            return
        total = plan.copies * n
        slots = torch.empty(total, dtype=torch.int32, device=rows.device)
        layout = plan.layouts.of(
            ("place", n), lambda: Pieces(*rows.finding_pieces(total, insert=False), *tiering_pieces(total, True))
        )
        program = plan.programs.of(
            ("place", kind_of(values, offsets)),
            False,  # the driver would not keep the stream's priority
            lambda: rows.place_ahead(self._placing, plan.tables_of, (plan.copies, len(plan.names))),
        )
        program.run(
            n, batch, *finding_grids(n, plan.copies), pins.stamp, values, offsets, slots,
            Space.of(layout, rows.device), pins.oldest, pins.held, *rows.above.grids(total),
        )  # fmt: skip

    def _pieces(self, plan: DevicePlan, n: int, batch: int, insert: bool, moves: bool) -> Pieces:
        total = plan.copies * n
        features_of, lacking = (0, len(plan.parts) * batch) if plan.columns else (total, total)
        finding = self._rows.finding_pieces(total, insert)
        tiering = tiering_pieces(total if plan.tiered else 0, moves)
        return Pieces(*finding, (torch.int32, features_of), (torch.int32, lacking), *tiering)

    def _launches(
        self, plan: DevicePlan, insert: bool, place: bool, keep: bool, weighted: bool, shared: bool, at_work: bool
    ) -> list[Launch | Fill | Send]:
        v, shape = self._v, (plan.copies, len(plan.names))
        # Without pooling every item gets its ticket with its row.
        pooled = bool(plan.columns)
        features_of, tickets = None if pooled else v.features_of, v.tickets if keep and pooled else None
        if plan.tiered:
            finding = self._rows.find_in_tiers(v, plan.tables_of, shape, insert, place, keep, features_of, tickets)
        else:
            finding = self._rows.find(
                v, plan.tables_of, shape, insert, features_of, True, tickets=tickets, stamped=plan.deep and at_work
            )
        launches: list[Launch | Fill | Send] = [*finding]
        if insert:
            # Who makes room for the next batch wants to know of this one's keys while the device is busy with it.
            launches.append(Send(v.ledger_copy, self._rows.ledger.device, v.ledger_event))
        for family in plan.families:
            if plan.columns:
                launches += self._pool(plan, family, keep, weighted, shared)
            else:
                launches += self._gather(plan, family, keep)
        return launches

    def _stored(self, family: int) -> dict[str, Any]:
        layout = self._rows.storage.families[family].layout
        return {
            "WEIGHTS": TRITON_TYPES[layout.dtype],
            "WEIGHT_BYTES": layout.weight_type.itemsize,
            "SLAB_BITS": self._rows.storage.slab_bits,
            "DIM": layout.dim,
            "D": power_of_two(layout.dim),
        }

    def _pool(self, plan: DevicePlan, family: FamilyParts, keep: bool, weighted: bool, shared: bool) -> list[Launch]:
        v, rows = self._v, self._rows
        layout = rows.storage.families[family.family].layout
        stored, count = self._stored(family.family), v.counts[1 + family.family :]
        d = stored["D"]
        bags, ids = _bags_together(layout.dim), 8 if d < 128 else 4
        modes = {"WEIGHTED": weighted, "SHARED": shared, "KEEP": keep}
        return [
            Launch(
                kernels.pool,
                (getattr(v, f"row_blocks{family.family}"), family.count),
                (
                    rows.anchor, rows.storage.slabs, family.parts, v.offsets, v.weights, v.slots, v.out, v.tickets,
                    v.shares, v.lacking, count, rows.ledger.bad_batches, v.n, v.batch, plan.columns,
                    layout.weight_stride,
                ),
                {**modes, **stored, "BAGS": bags, "IDS": ids},
                {"num_warps": max(1, min(8, bags * ids * d // 2048)), "enable_fp_fusion": False},
            ),
            Launch(
                kernels.pool_lacking,
                (v.walkers,),
                (
                    rows.anchor, rows.storage.slabs, family.parts, rows.inits, rows.scales, rows.normal, v.values,
                    v.offsets, v.weights, v.slots, v.out, v.lacking, count, v.n, v.batch, plan.columns,
                    layout.weight_stride,
                ),
                {"WEIGHTED": weighted, **stored, "HAS_NORMAL": rows.has_normal, "IDS": 16},
                {"num_warps": 4, "enable_fp_fusion": False},
            ),
        ]  # fmt: skip

    def _gather(self, plan: DevicePlan, family: FamilyParts, keep: bool) -> list[Launch]:
        v, rows = self._v, self._rows
        layout = rows.storage.families[family.family].layout
        stored, count = self._stored(family.family), v.counts[1 + family.family :]
        features, order = len(plan.names), {"IN_ORDER": plan.in_order}
        return [
            Launch(
                kernels.gather,
                (getattr(v, f"row_blocks{family.family}"), plan.copies),
                (
                    rows.anchor, rows.storage.slabs, plan.device_parts, plan.parts_of, v.offsets, v.starts,
                    v.features_of, v.slots, v.out, v.tickets, v.lacking, count, rows.ledger.bad_batches, v.n, v.batch,
                    features, layout.weight_stride, family.first, family.first + family.count,
                ),
                {"KEEP": keep, **order, **stored, "BLOCK": _rows_together(layout.dim)},
                {"num_warps": 1, "enable_fp_fusion": False},
            ),
            Launch(
                kernels.gather_lacking,
                (v.walkers,),
                (
                    plan.device_parts, plan.parts_of, rows.inits, rows.scales, rows.normal, v.values, v.offsets,
                    v.starts, v.features_of, v.out, v.lacking, count, v.n, v.batch, features,
                ),
                {
                    **order,
                    "HAS_NORMAL": rows.has_normal,
                    **{name: stored[name] for name in ("WEIGHTS", "DIM", "D")},
                    "BLOCK": max(1, min(16, 2048 // stored["D"])),
                },
                {"num_warps": 4, "enable_fp_fusion": False},
            ),
        ]  # fmt: skip
