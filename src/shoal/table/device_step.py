"""One batch on the device: lookups, and the updates that follow them. Launches only; nothing waits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _native, optim
from shoal.index.device import WALKERS, Items
from shoal.ops.launch import Launcher, Launches, Scratch, blocks, kind_of, power_of_two
from shoal.ops.pool import triton as pool_kernels
from shoal.ops.update import triton as update_kernels
from shoal.optim.triton import STEPS as OPTIMIZER_STEPS
from shoal.table.device_plan import DevicePlan, FamilyParts
from shoal.table.device_rows import TRITON_TYPES, DeviceRows

_REDUCTIONS = {
    _native.Reduce.sum: update_kernels.SUM.value,
    _native.Reduce.mean: update_kernels.MEAN_OF.value,
    _native.Reduce.first: update_kernels.FIRST.value,
    _native.Reduce.last: update_kernels.LAST.value,
}


@dataclass(frozen=True)
class Looked:
    """What a lookup leaves for its update."""

    plan: DevicePlan
    items: Items
    slots: Tensor
    tickets: Tensor  # of every item, where its gradient is and whose row it goes to
    shares: Tensor | None  # of every item, its factor

    def again(self, values: Tensor, offsets: Tensor) -> "Looked":
        """The same in other tensors."""
        if values.data_ptr() == self.items.values.data_ptr() and offsets.data_ptr() == self.items.offsets.data_ptr():
            return self
        return replace(self, items=replace(self.items, values=values, offsets=offsets))


@dataclass(frozen=True)
class Dealt:
    """What an update needs of every item, in sorted order."""

    tickets: Tensor
    shares: Tensor | None
    keys: Tensor | None  # where weights are rounded


@dataclass(frozen=True)
class Gradients:
    """Gradients as the kernels find them: from `base` on, each part `moved` elements from where its output was."""

    base: Tensor
    moved: Tensor | None
    aligned: bool
    held: Sequence[Tensor] = ()  # what else the kernels read must live until they are launched


def _together(plan: DevicePlan, grads: Sequence[Tensor]) -> Gradients:
    if plan.columns or len(grads) == 1:
        whole = grads[0].contiguous()
        return Gradients(whole, None, whole.data_ptr() % 16 == 0)
    grads = [grad.contiguous() for grad in grads]
    base = min((grad for grad in grads if grad.numel()), key=Tensor.data_ptr, default=grads[0])
    places = [(grad.data_ptr() - base.data_ptr()) // 4 if grad.numel() else 0 for grad in grads]
    begins = np.cumsum([0, *(grad.numel() for grad in grads)])[:-1]
    moved = [place - int(begin) for place, begin in zip(places, begins, strict=True)]
    aligned = all(grad.data_ptr() % 16 == 0 for grad in grads)
    if not any(moved):
        return Gradients(base, None, aligned, grads)
    if max(places) >= 2**39:  # more than a ticket has room for
        return Gradients(torch.cat([grad.reshape(-1) for grad in grads]), None, True)
    table = torch.tensor([moved[at] for at in plan.order], dtype=torch.int64)
    return Gradients(base, _send(table, base.device), aligned, grads)


def _send(table: Tensor, device: torch.device) -> Tensor:
    """A small tensor on its way to the device, which nobody waits for."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class Settings:
    """The tables' optimizer settings on the device; they travel again when they changed."""

    def __init__(self, rows: DeviceRows, hypers: Sequence[Any]) -> None:
        self._rows = rows
        self._sent: list[Any] = []
        self.kinds: dict[int, Any] = {}
        self.reductions: dict[int, int] = {}
        self.plain: dict[int, bool] = {}
        self.device = torch.zeros(
            len(rows.configs), update_kernels.HYPER_COLUMNS.value, dtype=torch.float64, device=rows.device
        )
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
            limits = [optimizer.clip.value or 0.0, optimizer.clip.norm or 0.0, optimizer.max_norm or 0.0]
            row = [step.lr, step.weight_decay, step.shrink, *limits, *step.settings]
            if "betas" in hypers[number]:  # a beta of 0 leaves nothing to correct
                row += [math.log(beta) if beta > 0.0 else -1e4 for beta in hypers[number]["betas"]]
            table[number, : len(row)] = row
            self.kinds[family] = OPTIMIZER_STEPS[step.kind]
            self.reductions[family] = _REDUCTIONS[step.reduce]
            plain = not any(limits) and step.weight_decay == 0.0 and step.shrink == 1.0
            self.plain[family] = self.plain.get(family, True) and plain
        self.device.copy_(_send(torch.from_numpy(table), self.device.device), non_blocking=True)


def _block(dim: int) -> int:
    return power_of_two(dim)


class Lookups:
    """The launches of forwards."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows
        self._launches = Launches()

    def run(
        self,
        plan: DevicePlan,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        training: bool,
        keep: bool,
        out: Tensor,
        counts: np.ndarray,
    ) -> Looked:
        """Find the rows, give birth to those that lack in training, and write the output."""
        rows, names = self._rows, len(plan.names)
        batch = (offsets.numel() - 1) // max(names, 1)
        insert = training and bool(plan.trained)
        items = Items(values, offsets, plan.tables_of, batch, names, plan.copies)
        if insert:
            rows.make_room(plan.most_births(counts))
        device, total = rows.device, plan.copies * items.n
        features_of = None if plan.columns else torch.empty(total, dtype=torch.int32, device=device)
        found = rows.find(items, insert, features_of, count=True)
        # Items of bad bags get no ticket; without pooling there are none.
        tickets = (
            torch.full((total if keep else 0,), -1, dtype=torch.int64, device=device)
            if plan.columns
            else torch.empty(total if keep else 0, dtype=torch.int64, device=device)
        )
        shared = keep and bool(plan.columns) and (weights is not None or plan.has_mean)
        shares = torch.empty(total, dtype=torch.float32, device=device) if shared else None
        looked = Looked(plan, items, found.slots, tickets, shares)
        lacking = torch.empty(len(plan.parts) * batch if plan.columns else total, dtype=torch.int32, device=device)
        for family in plan.families:
            count = found.counts[2 + family.family :]
            if features_of is None:
                self._pool(looked, family, weights, out, lacking, count, keep)
            else:
                self._gather(looked, family, features_of, out, lacking, count, keep)
        return looked

    def _pool(
        self,
        looked: Looked,
        family: FamilyParts,
        weights: Tensor | None,
        out: Tensor,
        lacking: Tensor,
        count: Tensor,
        keep: bool,
    ) -> None:
        items, slots = looked.items, looked.slots
        rows = self._rows
        layout = rows.storage.families[family.family].layout
        if not items.batch:
            return
        d = _block(layout.dim)
        in_bags = max(1, min(16, 256 // d)) if d < 128 else 1
        ids = 8 if d < 128 else 4
        given = out if weights is None else weights  # any tensor: not read
        kind = (*items.kind, kind_of(weights), out.dtype)
        weighted, shared = weights is not None, looked.shares is not None
        stored = {
            "WEIGHTS": TRITON_TYPES[layout.dtype],
            "WEIGHT_BYTES": layout.weight_type.itemsize,
            "SLAB_BITS": rows.storage.slab_bits,
            "DIM": layout.dim,
            "D": d,
        }
        self._launches.of(
            ("pool", family.family, weighted, shared, keep),
            lambda: Launcher(
                pool_kernels.pool,
                {"WEIGHTED": weighted, "SHARED": shared, "KEEP": keep, **stored, "BAGS": in_bags, "IDS": ids},
                num_warps=max(1, min(8, in_bags * ids * d // 2048)),
                enable_fp_fusion=False,
            ),
        )(
            kind, (blocks(items.batch, in_bags), family.count),
            rows.anchor, rows.storage.slabs, family.parts, items.offsets, given, slots, out, looked.tickets,
            out if looked.shares is None else looked.shares, lacking, count, rows.ledger.bad_bags,
            items.n, items.batch, out.stride(0), layout.weight_stride,
        )  # fmt: skip
        self._launches.of(
            ("pool_lacking", family.family, weighted),
            lambda: Launcher(
                pool_kernels.pool_lacking,
                {"WEIGHTED": weighted, **stored, "HAS_NORMAL": rows.has_normal, "IDS": 16},
                num_warps=4,
                enable_fp_fusion=False,
            ),
        )(
            kind, (min(WALKERS, max(1, items.batch)),),
            rows.anchor, rows.storage.slabs, family.parts, rows.inits, rows.scales, rows.normal, items.values,
            items.offsets, given, slots, out, lacking, count, items.n, items.batch, out.stride(0), layout.weight_stride,
        )  # fmt: skip

    def _gather(
        self,
        looked: Looked,
        family: FamilyParts,
        features_of: Tensor,
        out: Tensor,
        lacking: Tensor,
        count: Tensor,
        keep: bool,
    ) -> None:
        plan, items, slots = looked.plan, looked.items, looked.slots
        rows = self._rows
        layout = rows.storage.families[family.family].layout
        d = _block(layout.dim)
        if not items.n:
            return
        starts = slots if plan.in_order else plan.starts(items.offsets, items.batch)
        kind = (*items.kind, out.dtype, starts.dtype)
        block = max(1, 1024 // d)
        stored = {"WEIGHTS": TRITON_TYPES[layout.dtype], "DIM": layout.dim, "D": d}
        self._launches.of(
            ("gather", family.family, keep, plan.in_order),
            lambda: Launcher(
                pool_kernels.gather,
                {
                    "KEEP": keep,
                    "IN_ORDER": plan.in_order,
                    "WEIGHT_BYTES": layout.weight_type.itemsize,
                    "SLAB_BITS": rows.storage.slab_bits,
                    **stored,
                    "BLOCK": block,
                },
                num_warps=1,
                enable_fp_fusion=False,
            ),
        )(
            kind, (blocks(items.n, block), plan.copies),
            rows.anchor, rows.storage.slabs, plan.device_parts, plan.parts_of, items.offsets, starts, features_of,
            slots, out, looked.tickets, lacking, count, items.n, items.batch, items.features, layout.weight_stride,
            family.first, family.first + family.count,
        )  # fmt: skip
        few = max(1, min(16, 2048 // d))
        self._launches.of(
            ("gather_lacking", family.family, plan.in_order),
            lambda: Launcher(
                pool_kernels.gather_lacking,
                {"IN_ORDER": plan.in_order, "HAS_NORMAL": rows.has_normal, **stored, "BLOCK": few},
                num_warps=4,
                enable_fp_fusion=False,
            ),
        )(
            kind, (min(WALKERS, blocks(items.n, few)),),
            plan.device_parts, plan.parts_of, rows.inits, rows.scales, rows.normal, items.values, items.offsets, starts,
            features_of, out, lacking, count, items.n, items.batch, items.features,
        )  # fmt: skip


class Updates:
    """The launches of backwards."""

    def __init__(self, rows: DeviceRows, settings: Settings) -> None:
        self._rows = rows
        self._settings = settings
        self._no_scale = torch.ones(1, dtype=torch.float32, device=rows.device)
        self._no_skip = torch.zeros(1, dtype=torch.int32, device=rows.device)
        self._scratch = Scratch(rows.device)
        self._launches = Launches()

    def _launch(self, kernel: Any, family: int, warps: int, **constants: Any) -> Launcher:
        return self._launches.of(
            (kernel.__name__, family, *constants.values()), lambda: Launcher(kernel, constants, num_warps=warps)
        )

    def run(
        self, looked: Looked, grads: Sequence[Tensor], scores: Tensor, inverse_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Reduce the gradients of every row and apply its table's optimizer.

        `grads`: one tensor shaped as the pooled output, or one for each part.
        """
        rows, plan = self._rows, looked.plan
        if len(looked.slots):
            gradients = _together(plan, grads)
            ordered, order = self._sorted(looked)
            dealt = self._deal(looked, ordered, order, gradients.moved)
            for family in plan.families:
                if family.family in self._settings.kinds:
                    self._family(family.family, looked, gradients, scores, ordered, dealt, inverse_scale, skip)
        rows.steps += plan.trained_mask if skip is None else plan.trained_mask * (1 - skip)

    def _sorted(self, looked: Looked) -> tuple[Tensor, Tensor]:
        """The slots to update, sorted, and their items: those of one row in the order of its table's features."""
        targets = self._targets(looked)
        if looked.plan.in_feature_order:
            return torch.sort(targets, stable=True)
        by_part = torch.sort(looked.tickets >> pool_kernels.TICKET_BITS.value, stable=True).indices
        ordered, order = torch.sort(targets[by_part], stable=True)
        return ordered, by_part[order]

    def _targets(self, looked: Looked) -> Tensor:
        plan, items = looked.plan, looked.items
        if plan.all_train:
            return looked.slots
        targets = torch.empty_like(looked.slots)
        self._launch(update_kernels.aim, 0, 4, STEPS=items.steps, BLOCK=512)(
            items.kind, (blocks(items.n, 512), plan.copies),
            looked.slots, plan.tables_of, items.offsets, targets, items.n, items.batch, items.features,
        )  # fmt: skip
        return targets

    def touch(self, looked: Looked, steps: Tensor) -> None:
        """Score the rows that a batch used in training, where no update does."""
        rows, plan, items = self._rows, looked.plan, looked.items
        for family in plan.families if items.n else []:
            layout = rows.storage.families[family.family].layout
            self._launch(
                update_kernels.touch, family.family, 4,
                SLAB_BITS=rows.storage.slab_bits, STATE=layout.state_floats, STEPS=items.steps, BLOCK=256,
            )(
                items.kind, (blocks(items.n, 256), plan.copies),
                rows.anchor, rows.storage.slabs, rows.index.tables, plan.tables_of, items.offsets, looked.slots, steps,
                items.n, items.batch, items.features, family.family, layout.tail_stride,
            )  # fmt: skip

    def weight_gradients(self, looked: Looked, grads: Tensor) -> Tensor:
        """The gradient of every per-sample weight, from the rows as they are now."""
        rows, plan, items = self._rows, looked.plan, looked.items
        grads = grads.contiguous()
        out = torch.zeros(plan.copies, items.n, dtype=torch.float32, device=rows.device)
        for family in plan.families if items.batch else []:
            layout = rows.storage.families[family.family].layout
            d = _block(layout.dim)
            self._launch(
                update_kernels.weight_gradients, family.family, 4,
                WEIGHTS=TRITON_TYPES[layout.dtype], WEIGHT_BYTES=layout.weight_type.itemsize,
                HAS_NORMAL=rows.has_normal, SLAB_BITS=rows.storage.slab_bits, DIM=layout.dim, D=d,
                IDS=max(1, min(16, 2048 // d)),
            )(
                (items.kind, kind_of(grads)), (items.batch, family.count),
                rows.anchor, rows.storage.slabs, family.parts, rows.inits, rows.scales, rows.normal, items.values,
                items.offsets, looked.slots, grads, out, items.n, items.batch, layout.weight_stride, grads.stride(0),
            )  # fmt: skip
        return out.sum(0)

    def _deal(self, looked: Looked, ordered: Tensor, order: Tensor, moved: Tensor | None = None) -> Dealt:
        items, total = looked.items, len(order)
        keyed = any(config.dtype != "float32" for config in self._rows.configs)
        tickets = self._scratch.take("tickets", total, torch.int64)
        shares = None if looked.shares is None else self._scratch.take("shares", total, torch.float32)
        keys = self._scratch.take("keys", total, torch.int64) if keyed else None
        deal = {"MOVED": moved is not None, "SHARED": shares is not None, "KEYED": keyed, "BLOCK": 512}
        self._launch(update_kernels.deal, 0, 4, **deal)(
            items.kind, (blocks(total, 512),),
            ordered, order, looked.tickets, looked.plan.device_parts, tickets if moved is None else moved,
            tickets if looked.shares is None else looked.shares, items.values, tickets,
            tickets if shares is None else shares, tickets if keys is None else keys, total, items.n,
        )  # fmt: skip
        return Dealt(tickets, shares, keys)

    def _family(
        self, family: int, looked: Looked, gradients: Gradients, scores: Tensor, ordered: Tensor, dealt: Dealt,
        inverse_scale: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        rows, plan, items, settings = self._rows, looked.plan, looked.items, self._settings
        layout = rows.storage.families[family].layout
        d, total = _block(layout.dim), len(looked.slots)
        # Many rows at once hide the latency of memory; few leave registers for wide rows.
        together = max(1, min(64, 2048 // d)) if d < 128 else max(1, 256 // d)
        length = max(32, together)
        chunks = blocks(total, length)
        sums = self._scratch.take("sums", 2 * chunks * d, torch.float32)
        sum_counts = self._scratch.take("sum_counts", 2 * chunks, torch.float32)
        kept = layout.weight_type.itemsize
        alone = len(rows.storage.families) == 1
        scaled = skip is not None
        skip = self._no_skip if skip is None else skip
        grads, aligned = gradients.base, plan.aligned and gradients.aligned
        kind = (items.kind, scores.data_ptr() % 16 == 0)
        shared, reduction, plain = looked.shares is not None, settings.reductions[family], settings.plain[family]

        def constants() -> tuple[dict[str, Any], dict[str, Any]]:
            step = {"STEP": settings.kinds[family], "PLAIN": plain, "REDUCE": reduction, "SCALED": scaled}
            return step, {
                "ALONE": alone,
                "WEIGHTS": TRITON_TYPES[layout.dtype],
                "WEIGHT_BYTES": kept,
                "SLAB_BITS": rows.storage.slab_bits,
                "DIM": layout.dim,
                "D": d,
                "STATE": layout.state_floats,
                "LENGTH": length,
            }

        def make_update() -> Launcher:
            step, stored = constants()
            chosen = {**step, "SHARED": shared, "ALIGNED": aligned, **stored, "ITEMS": together}
            return Launcher(update_kernels.update, chosen, num_warps=max(1, min(16, together * d // 2048)))

        def make_crossing() -> Launcher:
            step, stored = constants()
            chosen = {**step, **stored, "SUMS": max(1, min(16, 8192 // d))}
            return Launcher(update_kernels.update_crossing, chosen, num_warps=4)

        self._launches.of(("update", family, plain, scaled, shared, aligned), make_update)(
            kind, (chunks,),
            rows.anchor, rows.storage.slabs, rows.storage.family_of, settings.device, rows.inits, rows.steps, scores,
            rows.update_counts, ordered, dealt.tickets, grads if dealt.shares is None else dealt.shares,
            dealt.tickets if dealt.keys is None else dealt.keys, grads, sums, sum_counts,
            self._no_scale if inverse_scale is None else inverse_scale, skip, total, family,
            layout.weight_stride, layout.tail_stride,
        )  # fmt: skip
        self._launches.of(("crossing", family, plain, scaled), make_crossing)(
            kind, (chunks,),
            rows.anchor, rows.storage.slabs, rows.storage.family_of, settings.device, rows.inits, rows.steps, scores,
            rows.update_counts, ordered, dealt.tickets, dealt.tickets if dealt.keys is None else dealt.keys, sums,
            sum_counts, skip, total, family, layout.weight_stride, layout.tail_stride,
        )  # fmt: skip
