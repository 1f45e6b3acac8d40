"""The groups of a collection's tables.

A group locks, looks up and updates its tables together. Tables that differ in tiers, devices or ranks need groups of
their own, so a collection can have several: `Groups` has the interface of one. A collection with one group has that
group itself, at no cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Table
from shoal.errors import InputError, NonFiniteError
from shoal.modules.outputs import Columns, Parts
from shoal.table import (
    Batch,
    Each,
    Group,
    GroupTable,
    LossScale,
    Pooled,
    Request,
    StagedTogether,
    Staging,
    TableContent,
    Update,
    open_group,
    registry,
)
from shoal.table.forked import OwnProcess
from shoal.table.lease import Leases
from shoal.table.lifecycle.admission import Admission
from shoal.table.lock import in_lock_order
from shoal.table.lower.threads import IoThreads
from shoal.table.nonfinite import require_skipping
from shoal.table.protocols import Habits

# Groups whose rows are read from below at a time.
_MOST_IO_THREADS = 8


def groups_of(configs: Sequence[Table]) -> list[list[int]]:
    """Which tables are in a group together, by their numbers: today all of them."""
    return [list(range(len(configs)))]


def open_groups(name: str, configs: Sequence[Table], seed: int, device: torch.device) -> "Group | Groups":
    """Open the groups of these tables, and register them under the collection's name for operators."""
    numbers = [sorted(some) for some in groups_of(configs)]
    target: Group | Groups
    if len(numbers) == 1:
        target = open_group(name, configs, seed, device)
    else:
        members = [
            open_group(f"{name}/{at}", [configs[number] for number in some], seed, device)
            for at, some in enumerate(numbers)
        ]
        target = Groups(name, members, numbers)
        registry.register_members(name, members)
    registry.register(target)
    return target


@dataclass(eq=False)
class _Forward:
    """A forward that waits for its backward."""

    split: Columns | Parts
    leases: list[Tensor]  # numbers of the groups' leases, which do not keep them
    results: dict[int, Tensor] = field(default_factory=dict)  # gradients of per-sample weights, by group
    done: set[int] = field(default_factory=set)  # groups that the backward was applied to

    @property
    def applied(self) -> bool:
        """Whether the backward is done."""
        return len(self.done) == len(self.leases)


class Groups:
    """Several groups behind the interface of one; tables have the numbers that they have in the collection.

    A lookup asks one group after the other. If one raises, rows that the ones before gave birth to are erased, and
    their leases end as if there had been no lookup; on a device, which alone knows its births, these stay. A backward
    first looks at the gradients of all groups, and decides once for all of them. Where a group raises after that, the
    groups before it took the step: the same backward, run again, goes to the others alone.
    """

    def __init__(self, name: str, members: Sequence[Group], numbers: Sequence[Sequence[int]]) -> None:
        self.name = name
        self.members = tuple(members)
        places = {number: (at, n) for at, some in enumerate(numbers) for n, number in enumerate(some)}
        self._places = [places[number] for number in range(len(places))]
        self.tables: Sequence[GroupTable] = [self.members[at].tables[n] for at, n in self._places]
        self.habits: Habits | None = None
        self._leases: Leases[_Forward] = Leases()
        self._own = _native.RwLock().exclusive()  # of the leases alone
        self._io_threads = IoThreads(_MOST_IO_THREADS)
        configs = [table.config for table in self.tables]
        groups = [at for at, _ in self._places]
        self._columns = Columns.of([one.dim * len(one.features) for one in configs], groups, len(members))
        self._parts = [
            (at, feature.name, config.dim)
            for at, config in zip(groups, configs, strict=True)
            for feature in config.features
        ]
        self._pools = configs[0].pooling != "none"
        self._trains = any(
            config.optimizer is not None and feature.mode != "read" for config in configs for feature in config.features
        )

    # ---- what all groups have alike

    @property
    def seed(self) -> int:
        """With a table's name and a key, it decides a key's first row."""
        return self.members[0].seed

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.members[0].device

    @property
    def process(self) -> OwnProcess:
        """The process that made them."""
        return self.members[0].process

    @property
    def loss_scale(self) -> LossScale | None:
        """What scales the loss."""
        return self.members[0].loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: LossScale | None) -> None:
        for member in self.members:
            member.loss_scale = scale

    @property
    def settings_may_change(self) -> bool:
        """Whether the optimizers' settings can have changed since the tables were made."""
        return any(member.settings_may_change for member in self.members)

    @settings_may_change.setter
    def settings_may_change(self, may: bool) -> None:
        for member in self.members:
            member.settings_may_change = may

    # ---- what goes to each

    def place_of(self, number: int) -> tuple[Group, int]:
        """The group of the table of that number, and its number there."""
        at, there = self._places[number]
        return self.members[at], there

    def admit_by(self, number: int, admission: Admission | None) -> None:
        """Let a policy say which keys get a row in a table; None admits all."""
        group, there = self.place_of(number)
        group.admit_by(there, admission)

    def number_of(self, table: str) -> int | None:
        """The number of the table of that name."""
        return next((n for n, held in enumerate(self.tables) if held.config.name == table), None)

    @property
    def is_awaited(self) -> bool:
        """Whether a backward may follow a forward."""
        return any(member.is_awaited for member in self.members)

    @property
    def newest_lease(self) -> int | None:
        """The newest live lease of all groups."""
        return max((lease for member in self.members if (lease := member.newest_lease) is not None), default=None)

    def births(self) -> int:
        """A number that grows by the rows that a lookup of this thread gives birth to; see `Group.births`."""
        return sum(member.births() for member in self.members)

    def check(self) -> None:
        """Raise what went wrong on a device and was not raised yet; waits for it."""
        for member in self.members:
            member.check()

    def retire(self, why: str) -> None:
        """Refuse all calls from here on, with this text, and close the storages."""
        for member in self.members:
            member.retire(why)

    @contextmanager
    def _held(self, lock: Callable[[Group], _native.Held]) -> Iterator[None]:
        with ExitStack() as locks:
            for member in in_lock_order(self.members):
                locks.enter_context(lock(member))
            yield

    def reading(self) -> AbstractContextManager[None]:
        """Takes the shared locks. Rows do not change while they are held."""
        return self._held(Group.reading)

    def reading_all(self) -> AbstractContextManager[None]:
        """The same where scores are looked at."""
        return self._held(Group.reading_all)

    def writing(self) -> AbstractContextManager[None]:
        """Takes the exclusive locks."""
        return self._held(Group.writing)

    def replace(self, contents: Mapping[int, TableContent]) -> None:
        """Replace the rows of tables; if there is no room for all, none changes. Call while writing. Where a group
        fails on the way, a note of the error says which tables of the others did load."""
        for number, content in contents.items():
            self.tables[number].require_room(len(content.keys))
        loaded: list[str] = []
        for at, member in enumerate(self.members):
            own = {number: there for number, (where, there) in enumerate(self._places) if where == at}
            some = {there: contents[number] for number, there in own.items() if number in contents}
            if not some:
                continue
            try:
                member.replace(some)
            except BaseException as error:
                if loaded:
                    error.add_note(f"[{self.name}] {', '.join(loaded)} did load.")
                raise
            loaded += [repr(member.tables[there].config.name) for there in some]

    def stage(self, batch: Batch) -> Staging | None:
        """Begin to bring the rows of a batch to the top tiers, ahead of its lookup; None where none can be below."""
        parts: list[Staging] = []
        try:
            for member in self.members:
                if (part := member.stage(batch)) is not None:
                    parts.append(part)
        except BaseException:
            for part in parts:
                part.release()
            raise
        return StagedTogether(parts, self._io_threads) if len(parts) > 1 else next(iter(parts), None)

    # ---- one batch

    def lookup(self, request: Request) -> tuple[Tensor, Tensor]:
        """Returns the output of a lookup and its lease, which is of no forward where no backward may follow."""
        request.check(self.name, self.device)
        split = self._split(request)
        # The leases of a training lookup end together, once no group can fail: only then rows count as used.
        keep = request.keep or request.training
        outs: list[Tensor] = []
        leases: list[Tensor] = []
        births: list[list[tuple[int, Tensor]]] = []
        for member in self.members:
            member.require_features(request.batch.names)
        try:
            outputs: Sequence[Pooled | Each] = split.outputs
            for member, output in zip(self.members, outputs, strict=True):
                with member.noting_births() as born:
                    out, lease = member.lookup(request._replace(output=output, keep=keep))
                outs.append(out)
                leases.append(lease)
                births.append(born)
            out = split.together(outs)
        except BaseException as error:
            if request.training:
                self._undo(leases, births, error)
            raise
        if request.keep:
            forward = _Forward(split, [lease.clone() for lease in leases])
            with self._own:
                self._leases.collect(lambda _: None)
                return out, self._leases.begin(forward, leases)
        if request.training:
            del lease
            leases.clear()
            with self.writing():  # which deals with leases that ended
                pass
        return out, Leases.none()

    def _split(self, request: Request) -> Columns | Parts:
        output = request.output
        if isinstance(output, Pooled):
            columns = sum(one.columns for one in self._columns.outputs) if self._pools else 0
            if not columns or output.columns != columns:
                raise InputError(
                    f"[{self.name}] its outputs have {columns} columns; got {output.columns}. Where tables do not "
                    f"pool, call lookup_each."
                )
            return self._columns
        if self._pools:
            raise InputError(f"[{self.name}] its tables pool; call lookup.")
        counts = dict(zip(request.batch.names, request.batch.counts or (), strict=False))
        # A feature that the batch lacks is the group's to name.
        shapes = [(counts.get(name, 0), dim) for _, name, dim in self._parts]
        split = Parts([at for at, _, _ in self._parts], shapes, len(self.members))
        wanted = sum(one.size for one in split.outputs)
        if wanted != output.size:
            raise InputError(f"[{self.name}] its outputs have {wanted} elements; got {output.size}.")
        return split

    def _undo(self, leases: list[Tensor], births: list[list[tuple[int, Tensor]]], error: BaseException) -> None:
        for member, lease, born in zip(self.members, leases, births, strict=False):
            try:
                member.undo(lease, born)
            except Exception as again:
                names = sorted({repr(member.tables[number].config.name) for number, _ in born})
                error.add_note(
                    f"[{self.name}] First rows of this lookup in {', '.join(names)} could not be erased again "
                    f"({again!r:.200}). They are as they were born."
                )

    def update(self, change: Update) -> Tensor:
        """Apply a forward's output gradients; returns the gradient of the per-sample weights, or nothing."""
        with self._own:
            self._leases.collect(lambda _: None)
            forward = self._leases.of(change.lease)
        forward.split.require_gradients(self.name, change.grads)
        changes = {
            at: change._replace(lease=lease, grads=forward.split.of_group(at, change.grads))
            for at, lease in enumerate(forward.leases)
            if at not in forward.done
        }
        skip = self._judge(changes)
        overflows: list[NonFiniteError] = []
        for at, own in changes.items():
            member = self.members[at]
            try:
                forward.results[at] = member.update(own, skip)
            except BaseException as error:
                if member.awaits(own.lease):
                    self._tell_rest(error, forward)
                    raise
                forward.done.add(at)
                if not isinstance(error, NonFiniteError):
                    self._tell_rest(error, forward)
                    raise
                overflows.append(error)  # of some rows, which were left out: the others took the step
            forward.done.add(at)
        if overflows:
            for other in overflows[1:]:
                overflows[0].add_note(str(other))
            raise overflows[0]
        result = forward.results[0]
        for at in range(1, len(self.members)):
            result = result + forward.results[at]
        return result

    def _judge(self, changes: Mapping[int, Update]) -> bool | Tensor:
        """Whether a backward changes no row; raises where settings say so. One decision for all groups."""
        judged = {at: self.members[at].judge(change) for at, change in changes.items()}
        scale = self.loss_scale
        if scale is None:
            numbers = {table.config.name: number for number, table in enumerate(self.tables)}
            reached = [one for found in judged.values() for one in found.reached]
            reached.sort(key=lambda one: numbers[one.table])  # features of one table stay in their order
            require_skipping(self.name, reached)
            return bool(reached)
        skip: bool | Tensor = False
        for found in judged.values():
            skip = found.is_found | skip
        if isinstance(skip, Tensor):
            scale.found(skip)
        elif skip and self._trains:
            scale.found_nonfinite()
        return skip

    def _tell_rest(self, error: BaseException, forward: _Forward) -> None:
        """Have an error say which tables took the step, where others did not."""
        names: tuple[list[str], list[str]] = ([], [])
        for table, (at, _) in zip(self.tables, self._places, strict=True):
            names[at in forward.done].append(repr(table.config.name))
        if forward.done and names[0]:
            error.add_note(
                f"[{self.name}] The update came to {', '.join(names[1])}, and not to {', '.join(names[0])}. Run the "
                f"backward again: it goes to these alone."
            )
