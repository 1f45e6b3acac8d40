"""A group whose rows are in host memory: all tables of a collection, whatever their layout."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table, get_num_threads
from shoal.errors import CapacityError, InputError, NonFiniteError
from shoal.index import NO_SLOT
from shoal.ops.pool import bags_of, bind_again, pool, pool_each
from shoal.ops.update import LeftOut, all_finite, update, weight_gradients
from shoal.table.content import TableContent
from shoal.table.group import Group
from shoal.table.host.arrivals import Arriving
from shoal.table.host.large import Large, LargeUpdate, bear, find_births, large_batch, touch
from shoal.table.host.pieces import Reader
from shoal.table.host.plan import Plan
from shoal.table.host.staging import HostStaging
from shoal.table.host.table import HostTable, filled
from shoal.table.lease import Leases
from shoal.table.lower.read import Asked, read_below
from shoal.table.lower.staged import Staged
from shoal.table.lower.tier import Below
from shoal.table.parts import Part
from shoal.table.refused import is_refused_memory
from shoal.table.request import Batch as Keyed
from shoal.table.request import Pooled, Request, Update
from shoal.table.staging import address_of


@dataclass
class Batch:
    """A batch as its forward saw it."""

    plan: Plan
    bags: _native.Bags  # with the slots of the keys
    keys: int
    size: int  # bags of each feature
    weights: Tensor | None
    training: bool
    known: bool = False  # slots were found when it was staged
    scores: Sequence[float] = ()  # by table
    large: Large | None = None  # where memory does not hold its rows

    @property
    def applied(self) -> bool:
        """Whether its backward is done. The core's: it changes with the rows."""
        return self.bags.applied


@dataclass(frozen=True)
class Missing:
    """The keys of a batch that are not in memory, by table."""

    keys: _native.MissingKeys
    tables: Sequence[int]
    births: Sequence[int]  # of each table's keys the first so many are born if they are not below


def _pin(group: "weakref.ref[HostGroup]", number: int, pins: _native.Pins, staged: bool, finding: bool) -> None:
    # The tables would keep their group, and their files, alive if they knew it.
    if held := group():
        held._pin(number, pins, staged, finding)


class HostGroup(Group):
    """Tables in host memory."""

    tables: Sequence[HostTable]

    def __init__(self, name: str, configs: Sequence[Table], seed: int) -> None:
        super().__init__(name, seed, torch.device("cpu"), [HostTable(config, seed, name) for config in configs])
        self._at_work: Batch | None = None  # a lookup whose rows are being brought
        self._born = threading.local()
        self.staged: dict[tuple[int, int], HostStaging] = {}
        # Whoever changes an index has this alone, inside the group's lock. Staging finds under it, beside an update,
        # which changes rows only.
        self.indexes = _native.RwLock()
        for number, table in enumerate(self.tables):
            table.pin = partial(_pin, weakref.ref(self), number)
            table.indexes = self.indexes

    def _touch(self, batch: Batch) -> None:
        if batch.large is not None:
            touch(self.tables, batch, batch.large)
            return
        for part in batch.plan.parts:
            if part.trains and batch.training:
                table = self.tables[part.table]
                batch.bags.touch(table.storage.rows, part.source, part.copy, batch.scores[part.table], table.listed)

    def replace(self, contents: Mapping[int, TableContent]) -> None:
        for number, content in contents.items():
            self.tables[number].require_room(len(content.keys))
        made = {
            number: filled(self.tables[number].config, self.seed, content)
            for number, content in contents.items()
            if self.tables[number].below is None
        }
        rest = {number: contents[number] for number in contents if number not in made}
        self._replace_each(rest, partial(self._take_over, made))

    def _take_over(self, made: Mapping[int, HostTable], done: list[int]) -> None:
        self._clear(list(made))
        for number, table in made.items():
            self.tables[number].take_over(table)
        self._forget_plans()
        done[:] = made

    def _forget_plans(self) -> None:
        with self.indexes.alone():  # staging makes plans too
            super()._forget_plans()

    def _clear(self, numbers: Sequence[int]) -> None:
        try:
            super()._clear(numbers)
        finally:
            # Behind it: who was staged meanwhile knows rows that are no more.
            for staging in list(self.staged.values()):
                staging.release()

    def check(self) -> None:
        """Nothing: what goes wrong in host memory is raised at once."""

    def _make_plan(self, names: tuple[str, ...]) -> Plan:
        return Plan(self.tables, names)

    # ---- forward

    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        keyed = request.batch.for_kernels()
        self._require_finite(keyed)
        alone = request.training or request.keep
        asked: dict[int, Staged] = {}
        staging: HostStaging | None = None
        try:
            while True:
                # Leases begin one after the other. The plan is read under the lock too: a load replaces the rows it
                # points to.
                with self.writing() if alone else self.reading():
                    if staging is None and self.staged:
                        staging = self._take_staged(keyed.values)
                    batch = self._begin(keyed, request.training, staging)
                    out, lacking = self._read(batch, request)
                    if lacking:
                        missing = self._missing(batch, lacking)
                        if not self._can_hold(batch, missing):
                            return out, self._in_pieces(batch, keyed, out, request.keep)
                        if not alone:
                            self._ask(missing, asked)
                            if any(staged.found for staged in asked.values()):
                                # Rows are to come into memory, which those who read beside each other may not do.
                                alone = True
                                if staging is not None:  # until then its rows stay
                                    staging.put_back()
                                    staging = None
                                continue
                        try:
                            self._complete(batch, missing, asked or (staging.answers if staging else {}), alone)
                        except CapacityError:
                            if not batch.plan.deep:
                                raise
                            return out, self._in_pieces(batch, keyed, out, request.keep)
                    self._stamp(batch, alone)
                    return out, self._kept(batch, request.keep)
        finally:
            if staging is not None:
                staging.release()
            for number, staged in asked.items():
                self.below(number).unstage(staged)

    def _read(self, batch: Batch, request: Request) -> tuple[Tensor, list[int]]:
        """The output of a batch, and how many keys of each part are not in memory."""
        plan, output = batch.plan, request.output
        self._require_output(plan, output)
        if isinstance(output, Pooled):
            return pool(plan.lookup, batch.bags, batch.size, plan.columns, request.dtype, request.training, batch.known)
        bounds, counts = batch.bags.bounds, request.batch.counts
        if counts is not None and list(counts) != [end - begin for begin, end in pairwise(bounds)]:
            raise InputError(
                f"[{self.name}] the batch's lengths must agree with its offsets; its features have {list(counts)} "
                f"keys by the one and begin at {bounds} by the other. Do not change a batch's tensors in place."
            )
        wanted = sum((bounds[part.source + 1] - bounds[part.source]) * part.dim for part in plan.parts)
        if output.size != wanted:
            raise InputError(f"[{self.name}] its outputs have {wanted} elements; got {output.size}.")
        return pool_each(plan.lookup, batch.bags, output.size, request.dtype, request.training, batch.known)

    def _take_staged(self, values: Tensor) -> HostStaging | None:
        """What was staged for the batch with these values, which is at work from here on."""
        staging = self.staged.get(address_of(values))
        return None if staging is None or not staging.is_found else self.staged.pop(staging.address, None)

    def _begin(self, keyed: Keyed, training: bool, staging: HostStaging | None) -> Batch:
        """A batch for the kernels, with its slots where it was staged and they are still right."""
        names, values, offsets, weights, _counts = keyed
        plan = self._plan(names)
        known = staging is not None and staging.is_still_right(plan, values, offsets)
        if staging is not None and known:
            bags = staging.bags
            bind_again(bags, values, offsets, weights)
        else:
            bags = bags_of(values, offsets, weights, len(names), plan.copies)
        return Batch(plan, bags, values.numel(), keyed.size, weights, training, known)

    def _kept(self, batch: Batch, keep: bool) -> Tensor:
        """The lease of a batch that was looked up; where no backward can follow, there is none."""
        trains = batch.training and bool(batch.plan.trained)
        if trains:
            batch.scores = [float(table.step) for table in self.tables]
        if keep:
            return self._leases.begin(batch)
        if trains:
            self._decided.do(self._touch, batch)
            self._compact(batch)
        return Leases.none()

    # ---- rows that are not in memory

    def births(self) -> int:
        return getattr(self._born, "rows", 0)

    def below(self, number: int) -> Below:
        """What a table has below its memory. REQUIRES: it has something."""
        below = self.tables[number].below
        assert below is not None
        return below

    def _missing(self, batch: Batch, lacking: Sequence[int]) -> "Missing":
        """The keys that are to be born, or may be below, by table."""
        bearing: dict[int, list[tuple[int, int]]] = {}
        others: dict[int, list[tuple[int, int]]] = {}
        for part, lacks in zip(batch.plan.parts, lacking, strict=True):
            if lacks and part.trains and batch.training:
                bearing.setdefault(part.table, []).append((part.source, part.copy))
            elif lacks and self.tables[part.table].below is not None:
                others.setdefault(part.table, []).append((part.source, part.copy))
        numbers = list(bearing | others)
        parts = [bearing.get(number, []) + others.get(number, []) for number in numbers]
        keys = batch.bags.missing(parts, get_num_threads())
        births = [keys.count_after(at, len(bearing.get(number, []))) for at, number in enumerate(numbers)]
        return Missing(keys, numbers, births)

    def _ask(self, missing: "Missing", asked: dict[int, Staged]) -> None:
        """What is below of the keys that are missing, into `asked`: who gave it lets it go."""
        for at, number in enumerate(missing.tables):
            asked[number] = self.below(number).stage(missing.keys.keys(at), ahead=False)
        answers = read_below([Asked(self.below(number), staged.keys) for number, staged in asked.items()], self.readers)
        for staged, answer in zip(asked.values(), answers, strict=True):
            staged.set(answer)

    def _complete(self, batch: Batch, missing: "Missing", answers: Mapping[int, Staged], alone: bool) -> None:
        """Rows for keys that were not in memory, then what waited for them. All of it, or nothing changes."""
        if not alone:
            for at in range(len(missing.tables)):
                none = torch.full((missing.keys.counts[at],), NO_SLOT, dtype=torch.int32, device="cpu")
                batch.bags.fill(missing.keys, at, none)
            batch.bags.finish(get_num_threads())
            return
        tables = [self.tables[number] for number in missing.tables]
        deep = [at for at, table in enumerate(tables) if table.below is not None]
        read_now = read_below(
            [
                Asked(self.below(missing.tables[at]), missing.keys.keys(at), answers.get(missing.tables[at]))
                for at in deep
            ],
            self.readers,
        )
        below = dict(zip(deep, read_now, strict=True))
        arrivals, comes = [], []
        for at, table in enumerate(tables):
            come, which = table.arrivals(missing.keys.keys(at), missing.births[at], below.get(at))
            arrivals.append(come)
            comes.append(which)
        try:
            self._at_work = batch
            with Arriving(tables, arrivals) as slots:
                for at, (taken, which) in enumerate(zip(slots, comes, strict=True)):
                    if which is not None:
                        all_slots = torch.full((len(which),), NO_SLOT, dtype=torch.int32, device="cpu")
                        taken = all_slots.masked_scatter_(which, taken)
                    batch.bags.fill(missing.keys, at, taken)
                batch.bags.finish(get_num_threads())
        finally:
            self._at_work = None
        self._born.rows = self.births() + sum(come.births for come in arrivals)
        for at, (table, come, which) in enumerate(zip(tables, arrivals, comes, strict=True)):
            if which is not None and come.fetched is not None:
                table.tally.add(fetched=missing.keys.positions(at, which.masked_scatter(which, come.fetched)))

    # ---- more rows than memory holds

    def _can_hold(self, batch: Batch, missing: "Missing") -> bool:
        """Whether memory can have all rows of a batch, where all others leave but those that wait for a backward."""
        at_most = batch.keys + sum(one.keys for one in self._leases.live() if not one.applied)
        for number, count in zip(missing.tables, missing.keys.counts, strict=True):
            table = self.tables[number]
            if table.below is None or table.room.can_hold(count, at_most):
                continue
            pins = _native.Pins(table.storage.rows)
            self._pin(number, pins, False, False)
            self._pin_batch(batch, number, pins)
            if not table.room.can_hold(count, pins.count):
                return False
        return True

    def _in_pieces(self, batch: Batch, keyed: Keyed, out: Tensor, keep: bool) -> Tensor:
        """The output of a batch whose rows memory cannot hold, and its lease. No row comes into memory for it."""
        plan, values, offsets = batch.plan, keyed.values, keyed.offsets
        batch.bags = bags_of(values, offsets, batch.weights, len(plan.names), plan.copies)
        large = batch.large = large_batch(plan, batch.bags, batch.training)
        find_births(self.tables, large)
        reader = Reader(self.tables, plan, values, offsets, batch.weights, large.to_bear, large.seen)
        reader.read(out)
        births = bear(self.tables, large)
        reader.count()
        self._born.rows = self.births() + births
        return self._kept(batch, keep)

    def _erase(self, number: int, erased: list[int], keys: Tensor) -> None:
        gone = keys
        large = [batch.large for batch in self._leases.live() if batch.large is not None and not batch.applied]
        for one in large:
            one.seen.keep(number, self.tables[number], keys)
        try:
            super()._erase(number, erased, keys)
        except Exception:
            with suppress(Exception):
                stays = self.tables[number].contains(keys)
                gone = keys[~stays]
                for one in large:
                    one.seen.forget(number, keys[stays])
            raise
        finally:
            for one in large:
                one.erased.setdefault(number, []).append(gone)

    def _stamp(self, batch: Batch, alone: bool) -> None:
        """Say that rows were used, where no backward will."""
        for part in batch.plan.fetching:
            table = self.tables[part.table]
            if table.is_full and not (part.trains and batch.training):
                batch.bags.stamp(table.storage.rows, part.source, part.copy, table.clock)
        if alone:
            for number in {part.table for part in batch.plan.fetching}:
                self.tables[number].tick()

    def stage(self, batch: Keyed) -> HostStaging | None:
        batch.check(self.name, self.device)
        values = batch.values
        if all(table.below is None for table in self.tables) or not (values.numel() and values.is_contiguous()):
            return None
        return HostStaging(self, list(batch.names), values, batch.offsets.contiguous())

    def _pin(self, number: int, pins: _native.Pins, staged: bool, finding: bool) -> None:
        """Pin the rows of a table that batches at work need, those of batches that were staged, and those that others
        have found so far, who do so beside this unless the indexes are held."""
        batches: list[Batch | HostStaging] = [batch for batch in self._leases.live() if not batch.applied]
        if self._at_work is not None:
            batches.append(self._at_work)
        if staged:
            batches += [staging for staging in list(self.staged.values()) if finding or staging.is_found]
        for batch in batches:
            self._pin_batch(batch, number, pins)

    @staticmethod
    def _pin_batch(batch: Batch | HostStaging, number: int, pins: _native.Pins) -> None:
        for part in batch.plan.parts:
            if part.table == number:
                batch.bags.pin(pins, part.source, part.copy)

    # ---- backward

    def update(self, change: Update) -> Tensor:
        with self.writing():
            batch = self._leases.of(change.lease)
            keyed = Keyed(batch.plan.names, change.values, change.offsets, change.weights)
            keyed.check(self.name, self.device)
            shapes = self._gradient_shapes(batch)
            grads = self._of_parts(batch, change.grads, shapes)
            self._require_gradients(grads, shapes)
            _names, values, offsets, batch.weights, _counts = keyed.for_kernels()
            bind_again(batch.bags, values, offsets, batch.weights)
            rows = [self._gradient(grad) for grad in grads]
            result = torch.empty(0, dtype=torch.float32, device="cpu")
            if change.weight_gradient and batch.large is not None:
                reader = Reader(self.tables, batch.plan, values, offsets, batch.weights, {}, batch.large.seen)
                result = reader.weight_gradients(rows[0])
            elif change.weight_gradient:
                plan = batch.plan
                result = weight_gradients(
                    plan.weight_rows, plan.weight_features, rows, plan.weight_missing, batch.bags, batch.keys
                )
            if batch.training and batch.plan.trained:
                self._apply(batch, rows, values, offsets)
            else:
                batch.bags.applied = True
            self._compact(batch)
            return result

    @staticmethod
    def _gradient_shapes(batch: Batch) -> list[tuple[int, ...]]:
        plan, bounds = batch.plan, batch.bags.bounds
        if plan.columns:
            return [(batch.size, plan.columns)]
        return [(bounds[part.source + 1] - bounds[part.source], part.dim) for part in plan.parts]

    @staticmethod
    def _of_parts(batch: Batch, grads: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """One gradient for each part, where one came for all."""
        if batch.plan.columns or len(grads) != 1 or grads[0].dim() != 1:
            return grads
        sizes = [keys * dim for keys, dim in shapes]
        if grads[0].numel() != sum(sizes):
            return grads
        return [one.view(shape) for one, shape in zip(grads[0].split(sizes), shapes, strict=True)]

    def _apply(self, batch: Batch, grads: Sequence[Tensor], values: Tensor, offsets: Tensor) -> None:
        plan, trained = batch.plan, [self.tables[number] for number in batch.plan.trained]
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor()
        if self._is_skipped(batch, grads, offsets):
            for table in trained:
                table.counters.add("skipped_backwards")
            self._decided.do(self._leave_out, batch)
            return
        grads = grads if len(grads) == 1 else [grads[at] for at in plan.training_parts]
        if batch.large is not None:
            left_out = self._apply_in_pieces(batch, batch.large, grads, values, offsets, factor)
        else:
            left_out = update(
                [
                    table.native_update(batch.scores[number], 1.0 / factor)
                    for number, table in zip(plan.trained, trained, strict=True)
                ],
                plan.update_features,
                grads,
                batch.bags,
            )
        overflowed = [(trained[counts.table], counts.overflowed) for counts in left_out]
        if overflowed and self.loss_scale is not None:
            self.loss_scale.found_nonfinite()
        elif any(table.raises for table, _ in overflowed):
            rows = ", ".join(f"{count} of {table.config.name!r}" for table, count in overflowed)
            raise NonFiniteError(
                f"[{self.name}] gradients are finite, but for some rows their sum is too large (its norm above 1e15): "
                f"{rows}. These rows were left as they were, the others updated. Scale the loss down, or clip; where "
                f"a GradScaler scales it, set bags.scaler = scaler."
            )

    def _apply_in_pieces(
        self, batch: Batch, large: Large, grads: Sequence[Tensor], values: Tensor, offsets: Tensor, factor: float
    ) -> Sequence[LeftOut]:
        change = LargeUpdate(self.tables, batch, large, factor, self._decided)
        self._decided.do(change.run, values, offsets, batch.weights, *grads)
        return change.left_out

    def _leave_out(self, batch: Batch) -> None:
        """A backward that changes no row: its keys were used all the same."""
        self._touch(batch)
        batch.bags.applied = True

    def _is_skipped(self, batch: Batch, grads: Sequence[Tensor], offsets: Tensor) -> bool:
        """Whether NaN or infinity is on its way to the rows, and settings say to skip; raises where they do not."""
        if all(all_finite(grad) for grad in grads) and (batch.weights is None or all_finite(batch.weights)):
            return False
        if self.loss_scale is not None:
            self.loss_scale.found_nonfinite()
            return True
        reached = [part for part in batch.plan.parts if part.trains and self._is_reached(batch, grads, offsets, part)]
        stopped = [part for part in reached if self.tables[part.table].raises]
        if stopped:
            names = sorted({self.tables[part.table].config.name for part in stopped})
            raise NonFiniteError(
                f"[{self.name}] gradients must be finite; NaN or infinity reached {', '.join(map(repr, names))} "
                f"through {', '.join(repr(part.feature.name) for part in stopped)}. No row was changed. Find their "
                f"source, or set Clip(nonfinite='skip') to leave such a backward out; where a GradScaler scales the "
                f"loss, set bags.scaler = scaler."
            )
        return bool(reached)

    def _is_reached(self, batch: Batch, grads: Sequence[Tensor], offsets: Tensor, part: Part) -> bool:
        if batch.weights is not None:
            bounds = batch.bags.bounds
            if not all_finite(batch.weights[bounds[part.source] : bounds[part.source + 1]]):
                return True
        if not batch.plan.columns:
            return not all_finite(grads[batch.plan.parts.index(part)])
        # The gradient of an empty bag goes nowhere.
        bags = offsets[part.source * batch.size : (part.source + 1) * batch.size + 1]
        return not all_finite(grads[0][bags.diff() > 0, part.column : part.column + part.dim])

    def _compact(self, batch: Batch) -> None:
        """Between leases, give memory of erased rows back: a little in each call."""
        if all(other.applied for other in self._leases.live()):
            for table in self.tables:
                try:
                    table.compact(batch.keys // len(self.tables))
                except (MemoryError, RuntimeError) as error:
                    # The batch is done, and another one will do this after it.
                    if not is_refused_memory(error):
                        raise
