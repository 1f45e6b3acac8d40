"""A group whose rows are in device memory: all tables of a collection, in families of one layout.

A step launches kernels and waits for nothing. What the kernels find wrong they count; the counts come to the host
after the step, and the error is raised by the next call that sees them, or by `check` (table/device/wrong.py).
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table, debugging
from shoal.errors import ConfigError, DeviceError, InputError
from shoal.ops import launch
from shoal.table.content import TableContent
from shoal.table.device.cache import Traffic
from shoal.table.device.forward import Forward
from shoal.table.device.lookup import Looked, Lookups
from shoal.table.device.missing import MissingKeys
from shoal.table.device.plan import DevicePlan
from shoal.table.device.residency import DeviceMemory
from shoal.table.device.rows import DeviceRows, Pins
from shoal.table.device.settings import Settings
from shoal.table.device.staging import DeviceStaging
from shoal.table.device.streams import Streams
from shoal.table.device.table import DeviceTable
from shoal.table.device.update import Updates
from shoal.table.device.wrong import Wrong
from shoal.table.group import Group
from shoal.table.lease import Leases
from shoal.table.lifecycle.admission import Admission
from shoal.table.lower.read import Asked, read_below
from shoal.table.nonfinite import Judged
from shoal.table.replacement import Replacement
from shoal.table.request import Batch, Pooled, Request, Update
from shoal.table.staging import Staging, address_of


def _at_work(group: "weakref.ref[DeviceGroup]", coming: bool) -> Sequence[int]:
    # The rows would keep their group, and its files, alive if they knew it.
    held = group()
    return () if held is None else held.at_work(coming)


def _nonfinite(grads: Sequence[Tensor]) -> Tensor:
    """One number on the device: not 0 if something is not finite."""
    return torch.stack([~torch.isfinite(grad).all() for grad in grads]).any().to(torch.int32).reshape(1)


class DeviceGroup(Group):
    """Tables on a device."""

    tables: Sequence[DeviceTable]
    staged: dict[tuple[int, int], DeviceStaging]

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
        self._traffic = None if self._rows.above is None else Traffic(self._rows.above.tiers)
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        self._wrong = Wrong(name, self._rows, self.tables)
        self._rows.at_work = partial(_at_work, weakref.ref(self))
        self.missing = MissingKeys(self._rows)

    def admit_by(self, number: int, admission: Admission | None) -> None:
        if admission is not None:
            raise ConfigError(
                f"[{self.name}] wanted to admit keys of table {self.tables[number].config.name!r} by a policy; on "
                f"{self.device} kernels give every key its row. Use tables on cpu."
            )

    def _touch(self, forward: Forward) -> None:
        if forward.training and forward.plan.trained:
            self._streams.forget_lookup()
            self._updates.touch(forward.looked, self._rows.steps if forward.steps is None else forward.steps)

    def _replace(self, contents: Mapping[int, TableContent]) -> None:
        # Tables of one layout share slots: first those whose rows become fewer, so that others find theirs free.
        held = self._rows.ledger.keys.tolist()
        more = {number: len(content.keys) - held[number] for number, content in contents.items()}
        more |= dict.fromkeys(self._rows.deep & more.keys(), 0)  # they keep to theirs
        Replacement(self, {number: contents[number] for number in sorted(contents, key=more.__getitem__)}).run()

    def _make_plan(self, names: tuple[str, ...]) -> DevicePlan:
        rows = self._rows
        return DevicePlan(rows.configs, rows.families, names, self.device, rows.tiered, rows.deep)

    def check(self) -> None:
        with self.writing():
            self._raise_all()

    def _raise_all(self) -> None:
        """Wait for the device, and raise what went wrong so far."""
        self._wrong.raise_all(is_scaled=self.loss_scale is not None)

    def _follow(self, exclusive: bool) -> None:
        self._streams.follow(exclusive)

    def _updating(self) -> _native.Held:
        """Takes the exclusive lock, while rows that come ahead of their lookup may still be on their way."""
        return self._held_exclusively(self._entered_to_update)

    def _entered_to_update(self) -> None:
        # Slots that are freed may be taken again: not while others are given out.
        self._streams.follow(exclusive=True, update=not self._limbo)
        self.decided.finish()
        self._collect_leases()

    # ---- forward

    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        batch, output = request.batch, request.output
        plan = self._plan(batch.names)
        self._require_output(plan.columns, output)
        sizes: _native.BatchSizes | None = None
        if isinstance(output, Pooled):
            shape: tuple[int, ...] = (batch.size, output.columns)
            if request.training and plan.trained:
                sizes = self._sizes(plan, batch)
        else:
            shape, sizes = (output.size,), self._sizes(plan, batch)
            if output.size != sizes.elements:
                raise InputError(f"[{self.name}] its outputs have {sizes.elements} elements; got {output.size}.")
        out = torch.empty(shape, dtype=request.dtype, device=self.device)
        self._require_few(plan, batch)
        self._require_no_capture(plan)
        return out, self._lookup(plan, request, out, sizes)

    def _sizes(self, plan: DevicePlan, batch: Batch) -> _native.BatchSizes:
        """What follows from how many keys each feature has. Where the caller does not know, it waits for the device."""
        values, offsets, given = batch.values, batch.offsets, batch.counts
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

    def _require_few(self, plan: DevicePlan, batch: Batch) -> None:
        values, bags = batch.values.numel(), batch.size
        if max(values * plan.slot_lists, bags * len(plan.parts)) >= 2**30:
            raise InputError(
                f"[{self.name}] on a device a batch holds less than 2^30 values and bags, counted once for every table "
                f"that a feature feeds; got {values} values for up to {plan.slot_lists} and {bags} bags for "
                f"{len(plan.parts)}. Split it."
            )

    def _require_no_capture(self, plan: DevicePlan) -> None:
        if plan.deep and self._streams.is_capturing:
            deep = sorted({part.table for part in plan.parts} & self._rows.deep)
            names = ", ".join(repr(self.tables[number].config.name) for number in deep)
            raise DeviceError(
                f"[{self.name}] the current stream is being captured into a CUDA graph; before every lookup of {names} "
                f"the host asks the storage below device memory, which a graph would not repeat. Look up outside of "
                f"it, and capture the rest of the model."
            )

    def _lookup(self, plan: DevicePlan, request: Request, out: Tensor, sizes: _native.BatchSizes | None) -> Tensor:
        training, keep = request.training, request.keep
        batch = request.batch.for_kernels()
        if debugging():
            self._require_finite(batch)
        with self.writing() if training or keep or plan.deep else self.reading():
            if training:
                self._wrong.raise_known(is_scaled=self.loss_scale is not None)
            pins = self._rows.pin() if plan.deep or (plan.tiered and (training or keep)) else Pins()
            staging = self.staged.get(address_of(request.batch.values))
            if staging is not None and not staging.is_of(request.batch.values, request.batch.offsets):
                staging = None
            fetched = self._bring(plan, batch, pins, training, staging) if plan.deep else {}
            if training and plan.trained and sizes is not None:
                self._rows.make_room(sizes.births)
            looked = self._lookups.run(plan, batch.values, batch.offsets, batch.weights, training, keep, out, pins)
            for number, positions in fetched.items():
                self.below(number).fetched += positions
            if debugging() and training:
                self._raise_all()
            forward = Forward(looked, training, batch.size, sizes, pins.number)
            if training and not keep:
                self._touch(forward)
            if pins.number:
                # Rows that a lease holds stay while they are read.
                self._streams.looked_up(looked.found if keep else None)
                self._updated.clear()
            return self._leases.begin(forward) if keep else Leases.none()

    def _bring(
        self,
        plan: DevicePlan,
        batch: Batch,
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
        missing = self.missing.read(self.missing.launch(plan, batch.values, batch.offsets, pins), batch.values)
        belows = [self.below(number) for number in missing]
        known = staging.answers if staging is not None else {}
        answers = read_below(
            [
                Asked(below.lower, one.keys, known.get(number))
                for below, (number, one) in zip(belows, missing.items(), strict=True)
            ],
            self.io_threads,
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
        numbers = [forward.number for forward in self._leases.live() if forward.number and not forward.applied]
        if coming:
            numbers += [staging.number for staging in tuple(self.staged.values())]
        return numbers

    # ---- ahead

    def stage(self, batch: Batch) -> Staging | None:
        # Its device is busy with what others made for it: the first lookup makes the plan.
        plan: DevicePlan | None = self._plans.known(batch.names)
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
        with self._held_exclusively(lambda: None), self._streams.place(staging.ready):
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

    def _judge(self, forward: Forward, change: Update, grads: Sequence[Tensor]) -> Judged:
        return Judged(False if self.loss_scale is None else _nonfinite(grads))

    def _update(self, forward: Forward, change: Update, grads: Sequence[Tensor], skip: bool | Tensor | None) -> Tensor:
        looked = forward.looked.again(change.values.contiguous(), change.offsets.contiguous())
        result = self._nothing
        if change.weight_gradient:
            result = self._updates.weight_gradients(looked, grads[0])
        if forward.training and forward.plan.trained:
            self._apply(forward, looked, grads, skip)
        forward.applied = True
        if forward.number:
            self._updated.append(forward.number)
        if debugging():
            self._raise_all()
        return result

    def _apply(self, forward: Forward, looked: Looked, grads: Sequence[Tensor], skip: bool | Tensor | None) -> None:
        if self.settings_may_change:
            self._settings.refresh([table.optimizer_hyper for table in self.tables])
        scale = self.loss_scale
        inverse = None if scale is None else scale.inverse(self.device)
        if scale is not None and skip is None:
            skip = _nonfinite(grads)
            scale.found(skip)
        if skip is not None and not isinstance(skip, Tensor):
            skip = torch.ones(1, dtype=torch.int32, device=self.device) if skip else None
        # Forwards that wait for their backward were made at the steps of now.
        for other in self._leases.live():
            if other is not forward and not other.applied and other.steps is None:
                other.steps = self._rows.steps.clone()
        self._updates.run(looked, grads, forward.steps, inverse, skip)
