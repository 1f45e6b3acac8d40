"""Forwards on the device: find, give birth, pool or gather. Launches only; nothing waits."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.index.arguments import Batch, Finding, FoundLists, TierLists, TierNumbers
from shoal.ops.arguments import I32, Event, Floats, Host, Int, SomeF32, SomeI64, lengths, variables
from shoal.ops.launch import Fill, Launch, Pieces, Send, Space, blocks, kind_of, power_of_two
from shoal.ops.pool import triton as kernels
from shoal.ops.pool.arguments import Gather, GatherLacking, Lacking, Pool, PoolLacking
from shoal.table.device.cache import tier_lengths
from shoal.table.device.plan import DevicePlan, FamilyParts
from shoal.table.device.rows import TRITON_TYPES, DeviceRows, FreeSlots, Pins


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
    found: torch.cuda.Event | None = None  # after it the lookup only reads the rows that it found

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


class _Lists(NamedTuple):
    found: FoundLists
    features_of: I32
    lacking: I32
    tier: TierLists


class _Call(NamedTuple):
    free: FreeSlots
    batch: Batch
    lists: _Lists
    numbers: TierNumbers
    weights: SomeF32
    out: Floats
    starts: SomeI64
    tickets: SomeI64
    shares: SomeF32
    row_blocks: tuple[Int, ...]  # by family
    ledger_copy: Host
    ledger_event: Event


class _PlaceLists(NamedTuple):
    found: FoundLists
    tier: TierLists


class _PlaceCall(NamedTuple):
    batch: Batch
    lists: _PlaceLists
    numbers: TierNumbers


class Lookups:
    """The programs of forwards."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows
        self._placing = variables(_PlaceCall)
        self._v = variables(_Call, len(rows.storage.families))

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
        device, total = rows.device, plan.slot_lists * n
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
        # Lookups of eval may run at the same time.
        space = rows.scratch.take(layout) if training else Space.of(layout, device)
        place = plan.tiered and training
        program = plan.programs.of(
            ("lookup", kind, kind_of(weights), out.dtype, insert, place, keep, training or keep),
            training or keep,
            lambda: self._launches(plan, insert, place, keep, weights is not None, shared, training or keep),
        )
        over, block = (batch, _bags_together) if plan.columns else (n, _rows_together)
        grids = (1, 1) if rows.above is None else rows.above.grids(total)
        ledger_copy, ledger_event = rows.ledger.next() if insert else (0, None)
        program.run(
            _Call(
                free=rows.free_slots(),
                batch=rows.batch(values, offsets, slots, batch, plan.slot_lists, pins.stamp),
                lists=space.as_(_Lists),
                numbers=TierNumbers(pins.oldest, pins.held, *grids),
                weights=out if weights is None else weights,  # any tensor: not read
                out=out,
                starts=starts,
                tickets=tickets,
                shares=out if shares is None else shares,
                row_blocks=tuple(blocks(over, block(family.layout.dim)) for family in rows.storage.families),
                ledger_copy=ledger_copy,
                ledger_event=0 if ledger_event is None else ledger_event,
            )
        )
        if insert:
            rows.sent()
        return Looked(plan, values, offsets, batch, kind, slots, tickets, shares, ledger_event)

    def place(self, plan: DevicePlan, values: Tensor, offsets: Tensor, pins: Pins) -> None:
        """Bring the rows of a batch up, where it has a row and there is room above. Nothing is born or counted."""
        rows = self._rows
        n, batch = values.numel(), (offsets.numel() - 1) // max(len(plan.names), 1)
        if not n or rows.above is None:
            return
        total = plan.slot_lists * n
        slots = torch.empty(total, dtype=torch.int32, device=rows.device)
        layout = plan.layouts.of(
            ("place", n),
            lambda: Pieces(_PlaceLists(rows.found_lengths(total, insert=False), tier_lengths(total))),
        )
        program = plan.programs.of(
            ("place", kind_of(values, offsets)),
            False,  # the driver would not keep the stream's priority
            lambda: self._placing_launches(plan),
        )
        program.run(
            _PlaceCall(
                batch=rows.batch(values, offsets, slots, batch, plan.slot_lists, pins.stamp),
                lists=Space.of(layout, rows.device).as_(_PlaceLists),
                numbers=TierNumbers(pins.oldest, pins.held, *rows.above.grids(total)),
            )
        )

    def _placing_launches(self, plan: DevicePlan) -> list[Launch | Fill]:
        v, rows = self._placing, self._rows
        assert rows.above is not None
        t = rows.above.tiering(v.batch, v.lists.found, v.lists.tier, v.numbers)
        return rows.place_ahead(t, plan.tables_of, (plan.slot_lists, len(plan.names)))

    def _pieces(self, plan: DevicePlan, n: int, batch: int, insert: bool, moves: bool) -> Pieces:
        total = plan.slot_lists * n
        features_of, lacking = (0, len(plan.parts) * batch) if plan.columns else (total, total)
        found = self._rows.found_lengths(total, insert)
        tier = tier_lengths(total if plan.tiered else 0, moves)
        return Pieces(lengths(_Lists, found=found, features_of=features_of, lacking=lacking, tier=tier))

    def _launches(
        self, plan: DevicePlan, insert: bool, place: bool, keep: bool, weighted: bool, shared: bool, at_work: bool
    ) -> list[Launch | Fill | Send]:
        rows, v, shape = self._rows, self._v, (plan.slot_lists, len(plan.names))
        # Without pooling every item gets its ticket with its row.
        pooled = bool(plan.columns)
        features_of, tickets = None if pooled else v.lists.features_of, v.tickets if keep and pooled else None
        if plan.tiered:
            assert rows.above is not None
            t = rows.above.tiering(v.batch, v.lists.found, v.lists.tier, v.numbers)
            finding = rows.find_in_tiers(v.free, t, plan.tables_of, shape, insert, place, keep, features_of, tickets)
        else:
            finding = rows.find(
                v.free, Finding(v.batch, v.lists.found), plan.tables_of, shape, insert, features_of, True,
                tickets=tickets, stamped=plan.deep and at_work,
            )  # fmt: skip
        launches: list[Launch | Fill | Send] = [*finding]
        if insert:
            # Who makes room for the next batch wants to know of this one's keys while the device is busy with it.
            launches.append(Send(v.ledger_copy, rows.ledger.device, v.ledger_event))
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

    def _lacking(self, family: int) -> Lacking:
        """The list of what lacks rows, and how many of the family are in it."""
        lists = self._v.lists
        return Lacking(lists.lacking, lists.found.counts[1 + family :])

    def _pool(self, plan: DevicePlan, family: FamilyParts, keep: bool, weighted: bool, shared: bool) -> list[Launch]:
        v, rows = self._v, self._rows
        layout = rows.storage.families[family.family].layout
        stored, lacking = self._stored(family.family), self._lacking(family.family)
        d = stored["D"]
        bags, ids = _bags_together(layout.dim), 8 if d < 128 else 4
        pool = Pool(
            anchor=rows.anchor,
            slabs=rows.storage.slabs,
            parts=family.parts,
            offsets=v.batch.offsets,
            weights=v.weights,
            slots=v.batch.slots,
            out=v.out,
            tickets=v.tickets,
            shares=v.shares,
            lacking=lacking,
            bad_bags=rows.ledger.bad_batches,
            n=v.batch.n,
            batch=v.batch.batch,
            out_stride=plan.columns,
            weight_stride=layout.weight_stride,
        )
        pool_lacking = PoolLacking(
            anchor=rows.anchor,
            slabs=rows.storage.slabs,
            parts=family.parts,
            inits=rows.inits,
            scales=rows.scales,
            normal=rows.normal,
            values=v.batch.values,
            offsets=v.batch.offsets,
            weights=v.weights,
            slots=v.batch.slots,
            out=v.out,
            lacking=lacking,
            n=v.batch.n,
            batch=v.batch.batch,
            out_stride=plan.columns,
            weight_stride=layout.weight_stride,
        )
        return [
            Launch(
                kernels.pool,
                (v.row_blocks[family.family], family.count),
                pool,
                {"WEIGHTED": weighted, "SHARED": shared, "KEEP": keep, **stored, "BAGS": bags, "IDS": ids},
                {"num_warps": max(1, min(8, bags * ids * d // 2048)), "enable_fp_fusion": False},
            ),
            Launch(
                kernels.pool_lacking,
                (v.batch.walkers,),
                pool_lacking,
                {"WEIGHTED": weighted, **stored, "HAS_NORMAL": rows.has_normal, "IDS": 16},
                {"num_warps": 4, "enable_fp_fusion": False},
            ),
        ]

    def _gather(self, plan: DevicePlan, family: FamilyParts, keep: bool) -> list[Launch]:
        v, rows = self._v, self._rows
        layout = rows.storage.families[family.family].layout
        stored, lacking = self._stored(family.family), self._lacking(family.family)
        features, order = len(plan.names), {"IN_ORDER": plan.in_order}
        gather = Gather(
            anchor=rows.anchor,
            slabs=rows.storage.slabs,
            parts=plan.device_parts,
            parts_of=plan.parts_of,
            offsets=v.batch.offsets,
            starts=v.starts,
            features_of=v.lists.features_of,
            slots=v.batch.slots,
            out=v.out,
            tickets=v.tickets,
            lacking=lacking,
            bad_bags=rows.ledger.bad_batches,
            n=v.batch.n,
            batch=v.batch.batch,
            features=features,
            weight_stride=layout.weight_stride,
            first_part=family.first,
            end_part=family.first + family.count,
        )
        gather_lacking = GatherLacking(
            parts=plan.device_parts,
            parts_of=plan.parts_of,
            inits=rows.inits,
            scales=rows.scales,
            normal=rows.normal,
            values=v.batch.values,
            offsets=v.batch.offsets,
            starts=v.starts,
            features_of=v.lists.features_of,
            out=v.out,
            lacking=lacking,
            n=v.batch.n,
            batch=v.batch.batch,
            features=features,
        )
        return [
            Launch(
                kernels.gather,
                (v.row_blocks[family.family], plan.slot_lists),
                gather,
                {"KEEP": keep, **order, **stored, "BLOCK": _rows_together(layout.dim)},
                {"num_warps": 1, "enable_fp_fusion": False},
            ),
            Launch(
                kernels.gather_lacking,
                (v.batch.walkers,),
                gather_lacking,
                {
                    **order,
                    "HAS_NORMAL": rows.has_normal,
                    **{name: stored[name] for name in ("WEIGHTS", "DIM", "D")},
                    "BLOCK": max(1, min(16, 2048 // stored["D"])),
                },
                {"num_warps": 4, "enable_fp_fusion": False},
            ),
        ]
