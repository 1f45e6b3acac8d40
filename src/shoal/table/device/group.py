"""A group whose rows are in device memory: all tables of a collection, in families of one layout.

A step launches kernels and waits for nothing. What the kernels find wrong they count; the counts come back behind the
step, and the error is raised by the next call that sees them, or by `check`.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table, debugging
from shoal.errors import CapacityError, DeviceError, InputError, NonFiniteError
from shoal.ops import launch
from shoal.table.content import TableContent
from shoal.table.device.cache import Traffic
from shoal.table.device.lookup import Looked, Lookups
from shoal.table.device.missing import MissingKeys
from shoal.table.device.plan import DevicePlan
from shoal.table.device.residency import DeviceMemory
from shoal.table.device.rows import DeviceRows, Pins, last_tier
from shoal.table.device.staging import DeviceStaging
from shoal.table.device.streams import Streams
from shoal.table.device.table import DeviceTable
from shoal.table.device.update import Settings, Updates
from shoal.table.group import Group
from shoal.table.lease import Leases
from shoal.table.lower.read import Asked, read_below
from shoal.table.request import Batch as Keyed
from shoal.table.request import Pooled, Request, Update
from shoal.table.staging import Staging, address_of


@dataclass
class Batch:
    """A batch as its forward saw it."""

    looked: Looked
    training: bool
    size: int
    sizes: _native.BatchSizes | None  # where somebody wants them
    number: int  # where tables have tiers; else 0
    steps: Tensor | None = None  # of the tables, where other backwards came since; else as they are now
    applied: bool = False


def _at_work(group: "weakref.ref[DeviceGroup]", coming: bool) -> Sequence[int]:
    # The rows would keep their group, and its files, alive if they knew it.
    held = group()
    return () if held is None else held.at_work(coming)


class DeviceGroup(Group):
    """Tables on a device."""

    tables: Sequence[DeviceTable]

    def __init__(
        self, name: str, configs: Sequence[Table], seed: int, device: torch.device, slab_bits: int = 15
    ) -> None:
        launch.require(device)
        self._rows = DeviceRows(configs, seed, device, slab_bits)
        tables = [DeviceTable(self._rows, number, name) for number in range(len(configs))]
        super().__init__(name, seed, device, tables)
        self._settings = Settings(self._rows, [table.optimizer_hyper for table in self.tables])
        self._lookups = Lookups(self._rows)
        self._updates = Updates(self._rows, self._settings)
        self._streams = Streams(name, device, self._rows.scratch.forget)
        # Batches that were updated since the last lookup: rows that are placed do not wait for them.
        self._updated: list[int] = []
        self.staged: dict[tuple[int, int], DeviceStaging] = {}
        self._traffic = None if self._rows.above is None else Traffic(self._rows.above.tiers)
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        self._reported = np.zeros(3 * len(configs) + 2, dtype=np.int32)
        self._rows.at_work = partial(_at_work, weakref.ref(self))
        self.missing = MissingKeys(self._rows)

    def _touch(self, batch: Batch) -> None:
        if batch.training and batch.looked.plan.trained:
            self._streams.forget_lookup()
            self._updates.touch(batch.looked, self._rows.steps if batch.steps is None else batch.steps)

    def replace(self, contents: Mapping[int, TableContent]) -> None:
        for number, content in contents.items():
            self.tables[number].require_room(len(content.keys))
        # Tables of one layout share slots: first those whose rows become fewer, so that others find theirs free.
        held = self._rows.ledger.keys.tolist()
        more = {number: len(content.keys) - held[number] for number, content in contents.items()}
        more |= dict.fromkeys(self._rows.deep & more.keys(), 0)  # they keep to theirs
        self._replace_each({number: contents[number] for number in sorted(contents, key=more.__getitem__)})

    def _make_plan(self, names: tuple[str, ...]) -> DevicePlan:
        rows = self._rows
        return DevicePlan(rows.configs, rows.families, names, self.device, rows.tiered, rows.deep)

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
        refusals, skipped, (bags, weights) = new[:tables], new[tables + 1 : -2 : 2], new[-2:].tolist()
        if bags:
            self._reported[-2] = wrong[-2]
            raise InputError(
                f"[{self.name}] offsets must begin at 0, must not decrease and must end at the number of values; "
                f"{bags} bags of an earlier batch did not keep to it. Those without a place among the values were "
                f"read as empty."
            )
        if weights:
            self._reported[-1] = wrong[-1]
            raise InputError(
                f"[{self.name}] per-sample weights must be finite; {weights} of an earlier batch were not (one whose "
                f"feature feeds several tables counts for each). They were read as 0. Mend the weights, or leave the "
                f"sample out; shoal.debug() refuses the batch itself."
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
        self._reported[tables:-2] = wrong[tables:-2]
        overflowed = [
            f"{count} of {table.config.name!r}"
            for table, count in zip(self.tables, skipped.tolist(), strict=True)
            if count and table.raises
        ]
        if overflowed and self.loss_scale is None:
            raise NonFiniteError(
                f"[{self.name}] gradients of an earlier backward must be finite, and their sum not too large (its norm "
                f"above 1e15); some were not: {', '.join(overflowed)} rows were left as they were. Find their source, "
                f"or set Clip(nonfinite='skip'); where a GradScaler scales the loss, set bags.scaler = scaler."
            )

    # ---- forward

    def _follow(self, alone: bool) -> None:
        self._streams.follow(alone)

    def _clear(self, numbers: Sequence[int]) -> None:
        try:
            super()._clear(numbers)
        finally:
            for staging in tuple(self.staged.values()):  # they know rows that are no more
                staging.release()

    def _updating(self) -> _native.Held:
        """Alone, and beside rows that are placed ahead."""
        return self._held_alone(self._entered_to_update)

    def _entered_to_update(self) -> None:
        # Slots that are freed may be taken again: not beside those that are given out.
        self._streams.follow(alone=True, update=not self._limbo)
        self._decided.finish()
        self._collect_leases()

    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        keyed, output = request.batch, request.output
        plan = self._plan(keyed.names)
        self._require_output(plan, output)
        sizes: _native.BatchSizes | None = None
        if isinstance(output, Pooled):
            shape: tuple[int, ...] = (keyed.size, output.columns)
            if request.training and plan.trained:
                sizes = self._sizes(plan, keyed)
        else:
            shape, sizes = (output.size,), self._sizes(plan, keyed)
            if output.size != sizes.elements:
                raise InputError(f"[{self.name}] its outputs have {sizes.elements} elements; got {output.size}.")
        out = torch.empty(shape, dtype=request.dtype, device=self.device)
        return out, self._lookup(plan, request, out, sizes)

    def _sizes(self, plan: DevicePlan, keyed: Keyed) -> _native.BatchSizes:
        """What follows from how many keys each feature has. Where the caller does not know, it waits for the device."""
        values, offsets, given = keyed.values, keyed.offsets, keyed.counts
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

    def _lookup(self, plan: DevicePlan, request: Request, out: Tensor, sizes: _native.BatchSizes | None) -> Tensor:
        _batch, _output, _dtype, training, keep = request
        values, size = request.batch.values, request.batch.size
        if max(values.numel() * plan.copies, size * len(plan.parts)) >= 2**30:
            raise InputError(
                f"[{self.name}] on a device a batch holds less than 2^30 values and bags, counted once for every table "
                f"that a feature feeds; got {values.numel()} values for up to {plan.copies} and {size} bags for "
                f"{len(plan.parts)}. Split it."
            )
        keyed = request.batch.for_kernels()
        if debugging():
            self._require_finite(keyed)
        if plan.deep and self._streams.is_capturing:
            deep = sorted({part.table for part in plan.parts} & self._rows.deep)
            names = ", ".join(repr(self.tables[number].config.name) for number in deep)
            raise DeviceError(
                f"[{self.name}] the current stream is being captured into a CUDA graph; before every lookup of {names} "
                f"the host asks the storage below device memory, which a graph would not repeat. Look up outside of "
                f"it, and capture the rest of the model."
            )
        with self.writing() if training or keep or plan.deep else self.reading():
            if training and self._rows.ledger.says_worse(self._reported):
                self._raise(self._rows.hear())
            pins = self._rows.pin() if plan.deep or (plan.tiered and (training or keep)) else Pins()
            staging = self.staged.get(address_of(values))
            if staging is not None and not staging.is_of(values, request.batch.offsets):
                staging = None
            _names, values, offsets, weights, _counts = keyed
            fetched = self._bring(plan, values, offsets, pins, training, staging) if plan.deep else {}
            if training and plan.trained and sizes is not None:
                self._rows.make_room(sizes.births)
            looked = self._lookups.run(plan, values, offsets, weights, training, keep, out, pins)
            for number, positions in fetched.items():
                self.below(number).fetched += positions
            if debugging() and training:
                self._heard_now()
            batch = Batch(looked, training, size, sizes, pins.number)
            if training and not keep:
                self._touch(batch)
            if pins.number:
                # Rows that a lease holds stay while they are read.
                self._streams.looked_up(looked.found if keep else None)
                self._updated.clear()
            return self._leases.begin(batch) if keep else Leases.none()

    def _bring(
        self,
        plan: DevicePlan,
        values: Tensor,
        offsets: Tensor,
        pins: Pins,
        training: bool,
        staging: DeviceStaging | None,
    ) -> dict[int, int]:
        """Bring the batch's rows from storages to where kernels reach them, and make room for births; returns at how
        many positions such rows are, by table. Waits, unless it was all done ahead."""
        if staging is not None and staging.is_still_right(plan):
            births = staging.births if training else {}
            if all(self.below(number).has_room_for_births(many, pins) for number, many in births.items()):
                return {}
        missing = self.missing.read(self.missing.launch(plan, values, offsets, pins), values)
        belows = [self.below(number) for number in missing]
        known = staging.answers if staging is not None else {}
        answers = read_below(
            [
                Asked(below.lower, one.keys, known.get(number))
                for below, (number, one) in zip(belows, missing.items(), strict=True)
            ],
            self.readers,
        )
        return {
            number: below.bring(one, answer, pins, training)
            for (number, one), below, answer in zip(missing.items(), belows, answers, strict=True)
        }

    def below(self, number: int) -> DeviceMemory:
        """The storage below a table. REQUIRES: it has one."""
        below = self.tables[number].below
        assert below is not None
        return below

    def at_work(self, coming: bool) -> list[int]:
        """The numbers of batches whose backward may follow; with `coming`, also of those on their way."""
        numbers = [batch.number for batch in self._leases.live() if batch.number and not batch.applied]
        if coming:
            numbers += [staging.number for staging in tuple(self.staged.values())]
        return numbers

    # ---- ahead

    def stage(self, batch: Keyed) -> Staging | None:
        # Its device is busy with what others made for it: the first lookup makes the plan.
        plan: DevicePlan | None = self._plans.get(tuple(batch.names))
        if plan is None or not (plan.tiered or plan.deep) or self._streams.is_captured:
            return None
        batch.check(self.name, self.device)
        if self._traffic is not None:
            self._traffic.hear_of(batch.values.numel())
            if not (plan.deep or self._traffic.is_heavy):
                return None
        return DeviceStaging(self, plan, batch.values, batch.offsets)

    @property
    def placing_stream(self) -> torch.cuda.Stream:
        """The stream on which rows come ahead of their lookup."""
        stream = self._streams.placing
        assert stream is not None
        return stream

    def number_ahead(self) -> int:
        """For a batch on its way."""
        return self._rows.stamps.number()

    def pins_of(self, number: int) -> Pins:
        """For the batch of that number, as others are at work now. REQUIRES: the lock is held."""
        return self._rows.pins_of(number)

    def place(self, staging: DeviceStaging) -> None:
        """Bring rows up to device memory, as far as there is room. Waits for nothing."""
        if self._rows.stamps.are_used_up(staging.number):  # and no lookup may come that has the tables to itself
            with self.writing():
                self._rows.restamp()
        with self._held_alone(lambda: None), self._streams.place(staging.ready):
            if self.staged.get(staging.address) is not staging:
                return  # looked up already, or dropped
            if self._streams.is_captured:  # since it was staged: a graph that runs would not wait for rows that move
                return
            pins = self.pins_of(staging.number)
            if not self._streams.waits_for_updates:
                updated = [self._rows.stamps.of(number) for number in self._updated]
                in_use = (min((one, *updated)) for one in (pins.oldest, pins.held))
                pins = Pins(pins.number, pins.stamp, *in_use)
            self._lookups.place(staging.plan, staging.values, staging.offsets, pins)

    # ---- backward

    def update(self, change: Update) -> Tensor:
        values, offsets, weights = change.values, change.offsets, change.weights
        with self._updating():
            batch: Batch = self._leases.of(change.lease)
            plan = batch.looked.plan
            if not batch.looked.is_of(values, offsets) or weights is not None:
                Keyed(plan.names, values, offsets, weights).check(self.name, self.device)
            self._require_gradients(change.grads, self._gradient_shapes(batch, change.grads))
            looked = batch.looked.again(values.contiguous(), offsets.contiguous())
            rows = [self._gradient(grad) for grad in change.grads]
            result = self._nothing
            if change.weight_gradient:
                result = self._updates.weight_gradients(looked, rows[0])
            if batch.training and plan.trained:
                self._apply(batch, looked, rows)
            batch.applied = True
            if batch.number:
                self._updated.append(batch.number)
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

    @staticmethod
    def _gradient_shapes(batch: Batch, grads: Sequence[Tensor]) -> list[tuple[int, ...]]:
        plan, sizes = batch.looked.plan, batch.sizes
        if plan.columns or sizes is None:
            return [(batch.size, plan.columns)]
        if len(grads) == 1 and grads[0].dim() == 1:
            return [(sizes.elements,)]
        return [(sizes.counts[part.source], part.dim) for part in plan.parts]
