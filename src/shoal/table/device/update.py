"""Backwards on the device: sort, reduce, update. Launches only; nothing waits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.index.device import WALKERS, steps_of
from shoal.ops.arguments import lengths, variables
from shoal.ops.launch import Fill, Launch, Pieces, Send, Space, blocks, kind_of, power_of_two
from shoal.ops.pool import triton as pool_kernels
from shoal.ops.sort import Sorter
from shoal.ops.update import triton as kernels
from shoal.ops.update.arguments import (
    Aim,
    Applied,
    Deal,
    Dealt,
    Listed,
    Long,
    Touch,
    Update,
    UpdateLong,
    UpdateSingle,
    WeightGradients,
)
from shoal.table.device.calls import ItemCall, UpdateCall, UpdateSpace
from shoal.table.device.gradients import together
from shoal.table.device.lookup import Looked
from shoal.table.device.plan import DevicePlan
from shoal.table.device.rows import TRITON_TYPES, DeviceRows
from shoal.table.device.settings import Settings
from shoal.table.device.shapes import Shape

# Items that a program deals, or looks at one by one.
_DEALT = 256
_BY_ITEM = 256


class Updates:
    """The programs of backwards."""

    def __init__(self, rows: DeviceRows, settings: Settings) -> None:
        self._rows = rows
        self._settings = settings
        self._no_scale = torch.ones(1, dtype=torch.float32, device=rows.device)
        self._no_skip = torch.zeros(1, dtype=torch.int32, device=rows.device)
        # The tables' steps as an update found them.
        self._steps_now = torch.zeros_like(rows.steps)
        self._sorter = Sorter(rows.device)
        self._shapes = [Shape.of(family.layout) for family in rows.storage.families]
        self._single_shapes = [Shape.of_single(family.layout) for family in rows.storage.families]
        self._keyed = any(config.dtype != "float32" for config in rows.configs)
        self._v = variables(UpdateCall, len(rows.storage.families))
        self._by_item = variables(ItemCall)

    def run(
        self, looked: Looked, grads: Sequence[Tensor], scores: Tensor | None, inverse_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Reduce the gradients of every row and apply its table's optimizer.

        `grads`: one tensor shaped as the pooled output, or one for each part. `scores`: what the rows' scores become,
        by table; the tables' steps if there are none.
        """
        rows, plan, settings = self._rows, looked.plan, self._settings
        gradients = together(plan, grads)
        targets, total = self._targets(looked), looked.slots.numel()
        shared, moved, scaled = looked.shares is not None, gradients.moved is not None, skip is not None
        chunks = blocks(total, kernels.PIECE.value)
        layout = plan.layouts.of(("update", total, shared), lambda: self._pieces(total, chunks, shared))
        space = rows.scratch.take(layout)
        self._sort(looked, targets, space)
        # Programs without a row cost too: as many rows have one item, more or less, as had in the last updates.
        singles = min(rows.ledger.rows_of_one_item() * 9 // 8 or total, total)
        aligned = plan.aligned and gradients.aligned
        kind = (looked.kind, kind_of(scores, gradients.base, inverse_scale))
        program = plan.programs.of(
            ("update", kind, aligned, moved, shared, scaled, *settings.plain.values()),
            True,
            lambda: self._launches(plan, aligned, moved, shared, scaled),
        )
        ledger_copy, ledger_event = rows.ledger.next()
        shapes = zip(self._single_shapes, self._shapes, strict=True)
        programs = [
            (
                min(single.most_programs, blocks(singles, single.rows)),
                min(several.most_programs, blocks(total, 2 * several.rows)),
            )
            for single, several in shapes
        ]
        program.run(
            UpdateCall(
                tickets=looked.tickets,
                item_shares=targets if looked.shares is None else looked.shares,
                values=looked.values,
                grads=gradients.base,
                moved=targets if gradients.moved is None else gradients.moved,
                scores=self._steps_now if scores is None else scores,
                inverse_scale=self._no_scale if inverse_scale is None else inverse_scale,
                skip=self._no_skip if skip is None else skip,
                space=space.as_(UpdateSpace),
                total=total,
                n=looked.values.numel(),
                deal_blocks=max(1, blocks(total, _DEALT)),
                long_walkers=min(WALKERS, chunks),
                single_blocks=tuple(single for single, _ in programs),
                update_blocks=tuple(several for _, several in programs),
                ledger_copy=ledger_copy,
                ledger_event=ledger_event,
            )
        )
        rows.sent()

    def _pieces(self, total: int, chunks: int, shared: bool) -> Pieces:
        families = self._rows.storage.families
        widest = max(power_of_two(family.layout.dim) for family in families)
        return Pieces(
            lengths(
                UpdateSpace,
                sorted=total,
                order=total,
                counts=2 + len(families),
                dealt=total,
                dealt_shares=total if shared else 0,
                dealt_keys=total if self._keyed else 0,
                pieces=total,
                piece_slots=total,
                piece_tickets=total,
                sums=2 * chunks * widest,
                sum_counts=2 * chunks,
                long_rows=chunks,
            )
        )

    def _sort(self, looked: Looked, targets: Tensor, space: Space) -> None:
        """The slots to update, sorted, and their items: those of one row in the order of its table's features."""
        ordered, order = space.tensor("sorted"), space.tensor("order")
        if looked.plan.in_feature_order:
            self._sorter.sort(targets, ordered, order)
            return
        by_part = torch.sort(looked.tickets >> pool_kernels.TICKET_BITS.value, stable=True).indices
        self._sorter.sort(targets[by_part], ordered, order)
        order.copy_(by_part[order])

    def _targets(self, looked: Looked) -> Tensor:
        """The slots of the items that train; -1 for the others."""
        plan, v = looked.plan, self._by_item
        if plan.all_train:
            return looked.slots
        targets = torch.empty_like(looked.slots)
        features = len(plan.names)

        def launches() -> list[Launch]:
            arguments = Aim(v.slots, plan.tables_of, v.offsets, targets=v.out, n=v.n, batch=v.batch, features=features)
            constants = {"STEPS": steps_of(features), "BLOCK": _BY_ITEM}
            return [Launch(kernels.aim, (v.blocks, plan.slot_lists), arguments, constants)]

        self._run_by_item(looked, "aim", launches, out=targets)
        return targets

    def touch(self, looked: Looked, steps: Tensor) -> None:
        """Score the rows that a batch used in training, where no update does."""
        rows, plan, v = self._rows, looked.plan, self._by_item
        features = len(plan.names)

        def launches() -> list[Launch]:
            made = []
            for family in plan.families:
                layout = rows.storage.families[family.family].layout
                arguments = Touch(
                    anchor=rows.anchor,
                    slabs=rows.storage.slabs,
                    tables=rows.index.tables,
                    tables_of=plan.tables_of,
                    offsets=v.offsets,
                    slots=v.slots,
                    steps=v.steps,
                    n=v.n,
                    batch=v.batch,
                    features=features,
                    family=family.family,
                    tail_stride=layout.tail_stride,
                )
                constants = {
                    "SLAB_BITS": rows.storage.slab_bits,
                    "STATE": layout.state_floats,
                    "STEPS": steps_of(features),
                    "BLOCK": _BY_ITEM,
                }
                made.append(Launch(kernels.touch, (v.blocks, plan.slot_lists), arguments, constants))
            return made

        self._run_by_item(looked, "touch", launches, steps=steps)

    def weight_gradients(self, looked: Looked, grads: Tensor) -> Tensor:
        """The gradient of every per-sample weight, from the rows as they are now."""
        rows, plan, v = self._rows, looked.plan, self._by_item
        grads = grads.contiguous()
        out = torch.zeros(plan.slot_lists, looked.values.numel(), dtype=torch.float32, device=rows.device)

        def launches() -> list[Launch]:
            made = []
            for family in plan.families:
                layout = rows.storage.families[family.family].layout
                d = power_of_two(layout.dim)
                arguments = WeightGradients(
                    anchor=rows.anchor,
                    slabs=rows.storage.slabs,
                    parts=family.parts,
                    inits=rows.inits,
                    scales=rows.scales,
                    normal=rows.normal,
                    values=v.values,
                    offsets=v.offsets,
                    slots=v.slots,
                    grads=v.grads,
                    out=v.out,
                    n=v.n,
                    batch=v.batch,
                    weight_stride=layout.weight_stride,
                    grad_stride=plan.columns,
                )
                constants = {
                    "WEIGHTS": TRITON_TYPES[layout.dtype],
                    "WEIGHT_BYTES": layout.weight_type.itemsize,
                    "HAS_NORMAL": rows.has_normal,
                    "SLAB_BITS": rows.storage.slab_bits,
                    "DIM": layout.dim,
                    "D": d,
                    "IDS": max(1, min(16, 2048 // d)),
                }
                made.append(Launch(kernels.weight_gradients, (v.batch, family.count), arguments, constants))
            return made

        self._run_by_item(looked, "weight_gradients", launches, out=out, grads=grads)
        return out.sum(0)

    def _run_by_item(
        self, looked: Looked, what: str, launches: Callable[[], list[Launch]], steps: Tensor | None = None,
        out: Tensor | None = None, grads: Tensor | None = None,
    ) -> None:  # fmt: skip
        n, unused = looked.values.numel(), looked.slots
        looked.plan.programs.of((what, looked.kind, kind_of(steps, grads)), False, launches).run(
            ItemCall(
                slots=looked.slots,
                values=looked.values,
                offsets=looked.offsets,
                steps=unused if steps is None else steps,
                out=unused if out is None else out,
                grads=unused if grads is None else grads,
                n=n,
                batch=looked.batch,
                blocks=blocks(n, _BY_ITEM),
            )
        )

    def _launches(
        self, plan: DevicePlan, aligned: bool, moved: bool, shared: bool, scaled: bool
    ) -> list[Launch | Fill | Send]:
        rows, v, space = self._rows, self._v, self._v.space
        deal = Deal(
            sorted_slots=space.sorted,
            order=space.order,
            tickets=v.tickets,
            parts=plan.device_parts,
            moved=v.moved,
            item_shares=v.item_shares,
            values=v.values,
            dealt=self._dealt(),
            steps=rows.steps,
            steps_now=self._steps_now,
            trained=plan.trained_mask,
            skip=v.skip,
            skipped=rows.tally[2],
            listed=self._listed(),
            total=v.total,
            n=v.n,
            tables=len(rows.configs),
        )
        modes = {"MOVED": moved, "SHARED": shared, "KEYED": self._keyed, "SCALED": scaled, "BLOCK": _DEALT}
        launches: list[Launch | Fill | Send] = [
            Fill(space.counts, 2 + len(rows.storage.families), 0),
            Launch(kernels.deal, (v.deal_blocks,), deal, modes),
        ]
        for family in plan.families:
            if family.family in self._settings.kinds:
                launches += self._family(family.family, aligned, shared, scaled)
        return [*launches, Send(v.ledger_copy, rows.ledger.device, v.ledger_event)]

    def _dealt(self) -> Dealt:
        space = self._v.space
        return Dealt(space.dealt, space.dealt_shares, space.dealt_keys)

    def _listed(self) -> Listed:
        space = self._v.space
        return Listed(space.pieces, space.piece_slots, space.piece_tickets, space.counts)

    def _family(self, family: int, aligned: bool, shared: bool, scaled: bool) -> list[Launch]:
        rows, settings, v, space = self._rows, self._settings, self._v, self._v.space
        layout, storage = rows.storage.families[family].layout, rows.storage
        d, shape = power_of_two(layout.dim), self._shapes[family]
        single_shape = self._single_shapes[family]
        reduce = {"REDUCE": settings.reductions[family]}
        step = {"STEP": settings.kinds[family], "PLAIN": settings.plain[family], "SCALED": scaled}
        stored = {
            "WEIGHTS": TRITON_TYPES[layout.dtype],
            "WEIGHT_BYTES": layout.weight_type.itemsize,
            "SLAB_BITS": storage.slab_bits,
            "DIM": layout.dim,
            "D": d,
            "STATE": layout.state_floats,
        }
        given = {"SHARED": shared, "ALIGNED": aligned, "ALONE": len(storage.families) == 1}
        applied = Applied(settings.device, rows.inits, self._steps_now, v.scores, rows.update_counts)
        long = Long(space.sums, space.sum_counts, space.long_rows, space.counts[2 + family :])
        single = UpdateSingle(
            anchor=rows.anchor,
            slabs=storage.slabs,
            families=storage.family_of,
            applied=applied,
            dealt_shares=space.dealt_shares,
            dealt_keys=space.dealt_keys,
            grads=v.grads,
            listed=self._listed(),
            told=rows.ledger.single_rows,
            inverse_scale=v.inverse_scale,
            skip=v.skip,
            family=family,
            weight_stride=layout.weight_stride,
            tail_stride=layout.tail_stride,
        )
        several = Update(
            anchor=rows.anchor,
            slabs=storage.slabs,
            families=storage.family_of,
            applied=applied,
            sorted_slots=space.sorted,
            dealt=self._dealt(),
            grads=v.grads,
            listed=self._listed(),
            long=long,
            inverse_scale=v.inverse_scale,
            skip=v.skip,
            total=v.total,
            family=family,
            weight_stride=layout.weight_stride,
            tail_stride=layout.tail_stride,
        )
        longest = UpdateLong(
            anchor=rows.anchor,
            slabs=storage.slabs,
            applied=applied,
            sorted_slots=space.sorted,
            dealt=space.dealt,
            dealt_keys=space.dealt_keys,
            long=long,
            skip=v.skip,
            total=v.total,
            weight_stride=layout.weight_stride,
            tail_stride=layout.tail_stride,
        )
        return [
            Launch(
                kernels.update_single,
                (v.single_blocks[family],),
                single,
                {**step, **reduce, **given, **stored, "ROWS": single_shape.rows},
                {"num_warps": single_shape.warps},
            ),
            Launch(
                kernels.update,
                (v.update_blocks[family],),
                several,
                {**step, **reduce, **given, **stored, "PIECES": shape.rows, "ITEMS": shape.items},
                {"num_warps": shape.warps},
            ),
            Launch(
                kernels.update_long,
                (v.long_walkers,),
                longest,
                {**step, **reduce, **stored, "SUMS": max(1, min(32, 4096 // d))},
                {"num_warps": 4},
            ),
        ]
