"""A group whose rows are in host memory: all tables of a collection, whatever their layout."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.errors import CapacityError, InputError
from shoal.ops.pool import bags_of, bind_again, pool, pool_each
from shoal.table.content import TableContent
from shoal.table.group import Group
from shoal.table.host.forward import Forward
from shoal.table.host.in_use import InUse
from shoal.table.host.large import bear, find_births, large_batch
from shoal.table.host.missing import Missing
from shoal.table.host.pieces import Reader
from shoal.table.host.plan import Plan
from shoal.table.host.staging import HostStaging
from shoal.table.host.table import HostTable, filled
from shoal.table.host.update import Updates
from shoal.table.lease import Leases
from shoal.table.lifecycle.admission import Admission
from shoal.table.lower.staged import Staged
from shoal.table.lower.tier import Below
from shoal.table.nonfinite import Judged
from shoal.table.refused import is_refused_memory
from shoal.table.replacement import Replacement
from shoal.table.request import Batch, Pooled, Request, Update
from shoal.table.staging import address_of


class HostGroup(Group):
    """Tables in host memory."""

    tables: Sequence[HostTable]
    staged: dict[tuple[int, int], HostStaging]

    def __init__(self, name: str, configs: Sequence[Table], seed: int) -> None:
        super().__init__(name, seed, torch.device("cpu"), [HostTable(config, seed, name) for config in configs])
        self._born = threading.local()
        self._admissions: dict[int, Admission] = {}
        self._in_use = InUse(self._leases, self.staged)
        self._updates = Updates(name, self.tables, self.decided)
        # Indexes change under its exclusive lock, inside the group's. Staging finds under its shared one, concurrently
        # with updates, which change rows only.
        self.indexes = _native.RwLock()
        for number, table in enumerate(self.tables):
            table.pin = partial(self._in_use.pin, number)
            table.indexes = self.indexes

    def births(self) -> int:
        return getattr(self._born, "rows", 0)

    @contextmanager
    def noting_births(self) -> Iterator[list[tuple[int, Tensor]]]:
        noted: list[tuple[int, Tensor]] = []
        self._born.noted = noted
        try:
            yield noted
        finally:
            self._born.noted = None

    def admit_by(self, number: int, admission: Admission | None) -> None:
        with self.writing():
            if admission is None:
                self._admissions.pop(number, None)
            else:
                self._admissions[number] = admission

    def below(self, number: int) -> Below:
        """What a table has below its memory. REQUIRES: it has something."""
        below = self.tables[number].below
        assert below is not None
        return below

    def check(self) -> None:
        """Nothing: what goes wrong in host memory is raised at once."""

    def _make_plan(self, names: tuple[str, ...]) -> Plan:
        return Plan(self.tables, names)

    def _forget_plans(self) -> None:
        with self.indexes.exclusive():  # staging makes plans too
            super()._forget_plans()

    def _touch(self, forward: Forward) -> None:
        forward.touch(self.tables)

    # ---- rows that calls change

    def _replace(self, contents: Mapping[int, TableContent]) -> None:
        made = {
            number: filled(self.tables[number].config, self.seed, content)
            for number, content in contents.items()
            if self.tables[number].below is None
        }
        rest = {number: contents[number] for number in contents if number not in made}
        Replacement(self, rest).run(partial(self._take_over, made))

    def _take_over(self, made: Mapping[int, HostTable], done: list[int]) -> None:
        self._clear(list(made))
        for number, table in made.items():
            self.tables[number].take_over(table)
        self._forget_plans()
        done[:] = made

    def _erase(self, number: int, erased: list[int], keys: Tensor) -> None:
        gone = keys
        large = [forward.large for forward in self._leases.live() if forward.large is not None and not forward.applied]
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
                one.drop(number, gone)

    def _compact(self, forward: Forward) -> None:
        """Between leases, give memory of erased rows back: a little in each call."""
        if all(other.applied for other in self._leases.live()):
            for table in self.tables:
                try:
                    table.compact(forward.keys // len(self.tables))
                except (MemoryError, RuntimeError) as error:
                    # The batch is done, and another one will do this after it.
                    if not is_refused_memory(error):
                        raise

    # ---- forward

    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        batch, keep = request.batch.for_kernels(), request.keep
        self._require_finite(batch)
        is_exclusive = request.training or keep
        asked: dict[int, Staged] = {}
        staging: HostStaging | None = None
        try:
            while True:
                # Leases begin one after the other. The plan is read under the lock too: a load replaces the rows that
                # it points to.
                with self.writing() if is_exclusive else self.reading():
                    if staging is None and self.staged:
                        staging = self._take_staged(batch.values)
                    forward = self._begin(batch, request.training, staging)
                    out, lacking = self._pool(forward, request)
                    if lacking:
                        missing = Missing(self.tables, forward, lacking)
                        if not missing.fit(self._in_use):
                            return out, self._in_pieces(forward, batch, out, keep)
                        if not is_exclusive:
                            missing.ask(asked, self.io_threads)
                            if any(staged.found for staged in asked.values()):
                                # Rows are to come into memory, which the shared lock does not allow.
                                is_exclusive = True
                                if staging is not None:  # until then its rows stay
                                    staging.put_back()
                                    staging = None
                                continue
                            missing.read_as_missing()
                        elif not self._has_brought(missing, forward, batch, asked, staging):
                            return out, self._in_pieces(forward, batch, out, keep)
                    forward.stamp(self.tables)
                    if is_exclusive:
                        for number in forward.plan.deep:
                            self.tables[number].tick()
                    return out, self._kept(forward, keep)
        finally:
            if staging is not None:
                staging.release()
            for number, staged in asked.items():
                self.below(number).unstage(staged)

    def _take_staged(self, values: Tensor) -> HostStaging | None:
        """What was staged for the batch with these values, which is at work from here on."""
        staging = self.staged.get(address_of(values))
        return None if staging is None or not staging.is_found else self.staged.pop(staging.address, None)

    def _begin(self, batch: Batch, training: bool, staging: HostStaging | None) -> Forward:
        """A batch for the kernels, with its slots where it was staged and they are still right."""
        names, values, offsets, weights, _counts = batch
        plan = self._plan(names)
        known = staging is not None and staging.is_still_right(plan, values, offsets)
        if staging is not None and known:
            bags = staging.bags
            bind_again(bags, values, offsets, weights)
        else:
            bags = bags_of(values, offsets, weights, len(names), plan.slot_lists)
        return Forward(plan, bags, values.numel(), batch.size, weights, training, known)

    def _pool(self, forward: Forward, request: Request) -> tuple[Tensor, list[int]]:
        """The output, and how many keys each part lacks if it is not finished."""
        plan, bags, output = forward.plan, forward.bags, request.output
        self._require_output(plan.columns, output)
        dtype, training = request.dtype, request.training
        if isinstance(output, Pooled):
            return pool(plan.lookup, bags, forward.size, plan.columns, dtype, training, forward.known)
        bounds, counts = bags.bounds, request.batch.counts
        if counts is not None and list(counts) != [end - begin for begin, end in pairwise(bounds)]:
            raise InputError(
                f"[{self.name}] the batch's lengths must agree with its offsets; its features have {list(counts)} "
                f"keys by the one and begin at {bounds} by the other. Do not change a batch's tensors in place."
            )
        wanted = sum((bounds[part.source + 1] - bounds[part.source]) * part.dim for part in plan.parts)
        if output.size != wanted:
            raise InputError(f"[{self.name}] its outputs have {wanted} elements; got {output.size}.")
        return pool_each(plan.lookup, bags, output.size, dtype, training, forward.known)

    def _has_brought(
        self,
        missing: Missing,
        forward: Forward,
        batch: Batch,
        asked: Mapping[int, Staged],
        staging: HostStaging | None,
    ) -> bool:
        """Bring what is missing into memory. False: memory turned out to be too small, and nothing changed."""
        answers = asked or (staging.answers if staging is not None else {})
        try:
            came = missing.bring(answers, batch.values, self._admissions, self._in_use, self.io_threads)
        except CapacityError:
            if not forward.plan.deep:
                raise
            return False
        self._born.rows = self.births() + sum(come.births for _number, come in came)
        if (noted := getattr(self._born, "noted", None)) is not None:
            noted += [(number, come.born) for number, come in came]
        return True

    def _in_pieces(self, forward: Forward, batch: Batch, out: Tensor, keep: bool) -> Tensor:
        """Fill the output of a batch whose rows memory cannot hold; returns its lease. No row comes into memory."""
        _names, values, offsets, weights, _counts = batch
        plan = forward.plan
        forward.bags = bags_of(values, offsets, weights, len(plan.names), plan.slot_lists)
        forward.refused.clear()
        large = forward.large = large_batch(plan, forward.bags, forward.training)
        find_births(self.tables, forward, large, values, self._admissions)
        reader = Reader(self.tables, plan, values, offsets, weights, large.to_bear, large.seen)
        reader.read(out)
        births = bear(self.tables, large)
        reader.count()
        self._born.rows = self.births() + births
        if (noted := getattr(self._born, "noted", None)) is not None:
            noted += large.to_bear.items()
        return self._kept(forward, keep)

    def _kept(self, forward: Forward, keep: bool) -> Tensor:
        """The lease of a batch that was looked up. Where no backward can follow, it holds nothing."""
        trains = forward.training and bool(forward.plan.trained)
        if trains:
            forward.scores = [float(table.step) for table in self.tables]
        if keep:
            return self._leases.begin(forward)
        if trains:
            self.decided.do(self._touch, forward)
            self._compact(forward)
        return Leases.none()

    def stage(self, batch: Batch) -> HostStaging | None:
        batch.check(self.name, self.device)
        values = batch.values
        if all(table.below is None for table in self.tables) or not (values.numel() and values.is_contiguous()):
            return None
        return HostStaging(self, list(batch.names), values, batch.offsets.contiguous())

    # ---- backward

    def _judge(self, forward: Forward, change: Update, grads: Sequence[Tensor]) -> Judged:
        batch = Batch(forward.plan.names, change.values, change.offsets, change.weights).for_kernels()
        forward.weights = batch.weights
        return self._updates.judge(forward, grads, batch.offsets)

    def _update(self, forward: Forward, change: Update, grads: Sequence[Tensor], skip: bool | Tensor | None) -> Tensor:
        batch = Batch(forward.plan.names, change.values, change.offsets, change.weights).for_kernels()
        _names, values, offsets, forward.weights, _counts = batch
        bind_again(forward.bags, values, offsets, forward.weights)
        result = torch.empty(0, dtype=torch.float32, device="cpu")
        if change.weight_gradient:
            result = self._updates.weight_gradients(forward, values, offsets, grads)
        if forward.training and forward.plan.trained:
            self._updates.run(forward, grads, values, offsets, self.loss_scale, skip)
        else:
            forward.bags.applied = True
        self._compact(forward)
        return result
