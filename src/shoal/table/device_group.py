"""A group whose rows are in device memory: all tables of a collection, in families of one layout.

A step launches kernels and waits for nothing. What the kernels find wrong they count; the counts come back behind the
step, and the error is raised by the next call that sees them, or by `check`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table, debugging
from shoal.errors import CapacityError, DeviceError, InputError, NonFiniteError
from shoal.ops import launch
from shoal.table.content import TableContent
from shoal.table.device_lookup import Looked, Lookups, Pins
from shoal.table.device_plan import DevicePlan
from shoal.table.device_rows import DeviceRows, last_tier
from shoal.table.device_table import DeviceTable
from shoal.table.device_update import Settings, Updates
from shoal.table.group import Group
from shoal.table.lease import Leases


@dataclass
class Batch:
    """A batch as its forward saw it."""

    looked: Looked
    training: bool
    size: int
    sizes: _native.BatchSizes | None  # where somebody wants them
    stamp: int  # of its keys, where tables have tiers; else 0
    steps: Tensor | None = None  # of the tables, where other backwards came since; else as they are now
    applied: bool = False


class DeviceGroup(Group):
    """Tables in device memory."""

    tables: Sequence[DeviceTable]

    def __init__(
        self, name: str, configs: Sequence[Table], seed: int, device: torch.device, slab_bits: int = 15
    ) -> None:
        launch.require(device)
        self._rows = DeviceRows(configs, seed, device, slab_bits)
        super().__init__(name, seed, device, [DeviceTable(self._rows, number) for number in range(len(configs))])
        self._settings = Settings(self._rows, [table.optimizer_hyper for table in self.tables])
        self._lookups = Lookups(self._rows)
        self._updates = Updates(self._rows, self._settings)
        # The stream of the last call that had the tables to itself, and those of calls that read since.
        self._writer_stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._writer = -1 if self._writer_stream is None else self._writer_stream.cuda_stream
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        self._reported = np.zeros(3 * len(configs) + 1, dtype=np.int32)
        self._stamped = 0  # batches
        self._rows.oldest_at_work = self._oldest_at_work

    def _touch(self, batch: Batch) -> None:
        if batch.training and batch.looked.plan.trained:
            self._updates.touch(batch.looked, self._rows.steps if batch.steps is None else batch.steps)

    def replace(self, contents: Mapping[int, TableContent]) -> None:
        for number, content in contents.items():
            self._rows.require_room(number, len(content.keys), held=False)  # what leases hold is cleared first
        self.clear(list(contents))
        for number, content in contents.items():
            self.tables[number].fill(content)

    def _make_plan(self, names: tuple[str, ...]) -> DevicePlan:
        return DevicePlan(self._rows.configs, self._rows.families, names, self.device, self._rows.tiered)

    # ---- errors

    def check(self) -> None:
        """Wait for the device, and raise what went wrong so far."""
        with self.writing():
            self._heard_now()

    def _heard_now(self) -> None:
        self._raise(self._rows.hear_all())

    def _raise(self, counted: np.ndarray | None) -> None:
        """Raise the first thing that the device counted and nobody heard of."""
        if counted is None:
            return
        wrong = self._rows.ledger.wrong(counted)
        if np.array_equal(wrong, self._reported):
            return
        # One kind of error at a time: the others are for the next call that looks.
        tables = len(self.tables)
        new = wrong.astype(np.int64) - self._reported
        refusals, skipped = new[:tables], new[tables + 1 : -1 : 2]
        if new[-1]:
            self._reported[-1] = wrong[-1]
            raise InputError(
                f"[{self.name}] offsets must begin at 0, must not decrease and must end at the number of values; "
                f"{new[-1]} bags of an earlier batch did not keep to it. Those without a place among the values were "
                f"read as empty."
            )
        self._reported[:tables] = wrong[:tables]
        for number in np.nonzero(refusals)[0].tolist():
            self._rows.tidy(number, int(refusals[number]))
        refused = [
            f"{count} of {table.config.name!r}"
            for table, count in zip(self.tables, refusals.tolist(), strict=True)
            if count
        ]
        if refused:
            full = np.nonzero(refusals)[0].tolist()
            tiers = sorted({f"{last_tier(self.tables[number].config)}(...)" for number in full})
            raise CapacityError(
                f"[{self.name}] keys of an earlier batch found no room: {', '.join(refused)} (one that comes several "
                f"times may count as often). They have no row and learned nothing. Raise {' or '.join(tiers)} in "
                f"Table(tiers=), or erase keys that are not needed."
            )
        self._reported[tables:-1] = wrong[tables:-1]
        overflowed = [
            f"{count} of {table.config.name!r}"
            for table, count in zip(self.tables, skipped.tolist(), strict=True)
            if count and table.raises
        ]
        if overflowed and self.loss_scale is None:
            raise NonFiniteError(
                f"[{self.name}] gradients of an earlier backward must be finite, and their sum not too large (its norm "
                f"above 1e15); some were not: {', '.join(overflowed)} rows were left as they were. Find their source, "
                f"or set Clip(nonfinite='skip')."
            )

    # ---- forward

    def _follow(self, alone: bool) -> None:
        """Behind the last call that had the tables to itself and, where this one has, behind those that read since."""
        if self.device.type != "cuda":
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if alone and capturing:
            raise DeviceError(
                f"[{self.name}] the current stream is being captured into a CUDA graph, which would repeat one batch's "
                f"changes of the tables. Capture lookups in eval without gradients, or the model without the tables."
            )
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        follows = raw == self._writer and self._readers.keys() <= {raw} if alone else raw in self._readers
        if follows or capturing:
            return
        now = torch.cuda.current_stream(self.device)
        behind = dict(self._readers) if alone else {}
        if self._writer_stream is not None:
            behind[self._writer] = self._writer_stream
        for other, stream in behind.items():
            if other != raw:
                now.wait_stream(stream)
        if alone:
            if raw != self._writer:
                self._rows.scratch.forget()
            self._writer, self._writer_stream = raw, now
            self._readers.clear()
        else:
            self._readers[raw] = now

    def lookup(
        self,
        names: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        columns: int,
        training: bool,
        keep: bool,
        dtype: torch.dtype,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._require_float(dtype)
        self._check_tensors(names, values, offsets, weights)
        plan = self._plan(names)
        if not plan.columns or columns != plan.columns:
            raise InputError(
                f"[{self.name}] its outputs have {plan.columns} columns; got {columns}. Where tables do not pool, "
                f"call lookup_each."
            )
        size = (offsets.numel() - 1) // max(len(names), 1)
        out = torch.empty(size, columns, dtype=dtype, device=self.device)
        sizes = self._sizes(plan, values, offsets, counts) if training and plan.trained else None
        return out, self._lookup(plan, values, offsets, weights, out, size, sizes, training, keep)

    def _sizes(
        self, plan: DevicePlan, values: Tensor, offsets: Tensor, given: Sequence[int] | None
    ) -> _native.BatchSizes:
        """What follows from how many keys each feature has. Who does not know them waits for the device."""
        if given is None:
            features = len(plan.names)
            bags = (offsets.numel() - 1) // features
            bounds = offsets[:: max(bags, 1)].tolist() if bags else [0] * (features + 1)
            # Where offsets make no sense, any bound will do: such bags are read as empty.
            counts = [min(max(end - begin, 0), values.numel()) for begin, end in pairwise(bounds)]
            return plan.sizes(counts, self._rows.room)
        sizes = plan.sizes(given, self._rows.room) if len(given) == len(plan.names) else None
        if sizes is None or sizes.least < 0 or sizes.keys != values.numel():
            raise InputError(
                f"[{self.name}] the batch's lengths must agree with its values; its features have {list(given)} keys "
                f"by the one, and {values.numel()} in all by the other."
            )
        return sizes

    def lookup_each(
        self,
        names: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        counts: Sequence[int],
        size: int,
        training: bool,
        keep: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        self._require_float(dtype)
        self._check_tensors(names, values, offsets, None)
        plan = self._plan(names)
        if plan.columns:
            raise InputError(f"[{self.name}] its tables pool; call lookup.")
        sizes = self._sizes(plan, values, offsets, counts)
        if size != sizes.elements:
            raise InputError(f"[{self.name}] its outputs have {sizes.elements} elements; got {size}.")
        bags = (offsets.numel() - 1) // max(len(names), 1)
        out = torch.empty(size, dtype=dtype, device=self.device)
        return out, self._lookup(plan, values, offsets, None, out, bags, sizes, training, keep)

    def _lookup(
        self,
        plan: DevicePlan,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        size: int,
        sizes: _native.BatchSizes | None,
        training: bool,
        keep: bool,
    ) -> Tensor:
        if max(values.numel() * plan.copies, size * len(plan.parts)) >= 2**30:
            raise InputError(
                f"[{self.name}] on a device a batch holds less than 2^30 values and bags, counted once for every table "
                f"that a feature feeds; got {values.numel()} values for up to {plan.copies} and {size} bags for "
                f"{len(plan.parts)}. Split it."
            )
        with self.writing() if training or keep else self.reading():
            if training and self._rows.ledger.says_worse(self._reported):
                self._raise(self._rows.hear())
            if training and plan.trained and sizes is not None:
                self._rows.make_room(sizes.births)
            pins = self._pin() if plan.tiered and (training or keep) else Pins()
            looked = self._lookups.run(
                plan, values.contiguous(), offsets.contiguous(), self._floats(weights), training, keep, out, pins
            )
            if debugging() and training:
                self._heard_now()
            batch = Batch(looked, training, size, sizes, pins.stamp)
            if keep:
                return self._leases.begin(batch)
            if training:
                self._touch(batch)
            return Leases.none()

    def _pin(self) -> Pins:
        """For a batch whose rows must not move until its backward, if one follows."""
        self._stamped += 1
        return Pins(self._stamped, self._rows.pinned_from(self._stamped))

    def _oldest_at_work(self) -> int | None:
        """The oldest stamp of a batch whose backward may follow."""
        return min((batch.stamp for batch in self._leases.live() if batch.stamp and not batch.applied), default=None)

    # ---- backward

    def update(
        self,
        lease: Tensor,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        grads: Sequence[Tensor],
        weight_gradient: bool,
    ) -> Tensor:
        with self.writing():
            batch: Batch = self._leases.of(lease)
            plan = batch.looked.plan
            if not batch.looked.is_of(values, offsets) or weights is not None:
                self._check_tensors(plan.names, values, offsets, weights)
            self._check_gradients(batch, grads)
            looked = batch.looked.again(values.contiguous(), offsets.contiguous())
            rows = [self._gradient(grad) for grad in grads]
            result = self._nothing
            if weight_gradient:
                result = self._updates.weight_gradients(looked, rows[0])
            if batch.training and plan.trained:
                self._apply(batch, looked, rows)
            batch.applied = True
            if debugging():
                self._heard_now()
            return result

    def _apply(self, batch: Batch, looked: Looked, grads: Sequence[Tensor]) -> None:
        if self.settings_may_change:
            self._settings.refresh([table.optimizer_hyper for table in self.tables])
        scale = self.loss_scale
        inverse, skip = None, None
        if scale is not None:
            inverse = scale.inverse(self.device)
            skip = torch.stack([~torch.isfinite(grad).all() for grad in grads]).any().to(torch.int32).reshape(1)
            scale.found(skip)
        # Forwards that wait for their backward were made at the steps of now.
        for other in self._leases.live():
            if other is not batch and not other.applied and other.steps is None:
                other.steps = self._rows.steps.clone()
        self._updates.run(looked, grads, batch.steps, inverse, skip)

    def _check_gradients(self, batch: Batch, grads: Sequence[Tensor]) -> None:
        plan, sizes = batch.looked.plan, batch.sizes
        if plan.columns or sizes is None:
            wanted: list[tuple[int, ...]] = [(batch.size, plan.columns)]
        elif len(grads) == 1 and grads[0].dim() == 1:
            wanted = [(sizes.elements,)]
        else:
            wanted = [(sizes.counts[part.source], part.dim) for part in plan.parts]
        if [tuple(grad.shape) for grad in grads] != wanted:
            raise InputError(
                f"[{self.name}] the backward wants gradients of the shapes {wanted}; got "
                f"{[tuple(grad.shape) for grad in grads]}."
            )
        for grad in grads:
            if grad.device != self.device or not grad.is_floating_point():
                raise InputError(
                    f"[{self.name}] gradients must be floats on {self.device}; got {grad.dtype} on {grad.device}."
                )
