"""A group: tables that are looked up and updated together, behind one lock.

The path of one batch is `lookup`, then `update`; see docs/design.md. Where rows are in host memory that is
table/host/group.py, where they are in device memory table/device/group.py.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import ForkError, InputError
from shoal.ops.update import all_finite
from shoal.table.content import TableContent
from shoal.table.decided import Decided
from shoal.table.job import this_rank
from shoal.table.lease import Leases
from shoal.table.lock import Around
from shoal.table.lower.threads import Readers
from shoal.table.protocols import GroupTable, Habits, LossScale
from shoal.table.request import Batch, Each, Pooled, Request, Update
from shoal.table.staging import Staging

# Orders of features that a group remembers. A batch that brings yet another one makes the oldest be forgotten.
_MOST_PLANS = 64
# Storages that are read at a time.
_READERS = 8


# How many forks lie between this process and the first: asking the operating system who we are takes longer.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Group(ABC):
    """Tables that are looked up and updated together. Training is one writer; eval lookups may come from any thread."""

    def __init__(self, name: str, seed: int, device: torch.device, tables: Sequence[GroupTable]) -> None:
        self.name = name
        self.seed = seed
        self.device = device
        self.tables: Sequence[GroupTable] = tables
        self.loss_scale: LossScale | None = None
        # Why it may not be used any more, where its collection has another group now.
        self.retired: str | None = None
        self.habits: Habits | None = None
        # Whether anyone can have changed the optimizers' settings since the tables were made.
        self.settings_may_change = False
        lock = _native.RwLock()
        self._shared, self._alone = lock.shared(), lock.alone()
        self._leases: Leases[Any] = Leases()
        self._plans: dict[tuple[str, ...], Any] = {}
        self._newest_plan: tuple[list[str], Any] | None = None
        self._limbo: set[int] = set()  # tables with erased rows whose slots wait for leases to end
        self._decided = Decided(self.tables)
        # A thread waits in each for a table's storage; none is made before it is needed.
        self.readers = Readers(_READERS)
        self._process, self._forks = os.getpid(), _forks
        this_rank()  # remembered for logs, which may be written when the process group is gone

    def births(self) -> int:
        """A number that grows by the rows that a lookup of this thread gives birth to. On a device it is that of all
        rows, and waits for the device."""
        with self.reading():
            return sum(len(table) for table in self.tables)

    def retire(self, why: str) -> None:
        """Refuse all calls from here on, with this text, and close the storages: another group may open them."""
        with self.writing():
            self.retired = why
            for table in self.tables:
                if table.lowest is not None:
                    table.lowest.close()

    def number_of(self, table: str) -> int | None:
        """The number of the table of that name."""
        return next((n for n, held in enumerate(self.tables) if held.config.name == table), None)

    # ---- locking

    @property
    def is_own(self) -> bool:
        """Whether this process made it, and is not a forked child."""
        return _forks == self._forks

    def _in_own_process(self) -> None:
        if not self.is_own:
            raise ForkError(
                f"[{self.name}] these tables belong to process {self._process}; this is its forked child "
                f"{os.getpid()}, whose copy nobody would see. Look ids up in the main process, or make a collection "
                f"here."
            )

    def reading(self) -> _native.Held:
        """Beside other readers: rows as they are between steps."""
        return _native.Held(self._shared, Around(self, self._entered_shared))

    def reading_all(self) -> _native.Held:
        """The same where scores are looked at: those of forwards that were dropped are raised first."""
        if self._leases.has_ended:
            with self.writing():
                pass
        return self.reading()

    def writing(self) -> _native.Held:
        """Alone."""
        return self._held_alone(self._entered_alone)

    def _held_alone(self, entered: Callable[[], bool | None]) -> _native.Held:
        return _native.Held(self._alone, Around(self, entered))

    def _entered_shared(self) -> bool | None:
        if self._decided.is_unfinished:
            return False
        self._follow(alone=False)
        return None

    def _entered_alone(self) -> None:
        self._follow(alone=True)
        self._decided.finish()
        self._collect_leases()

    def _follow(self, alone: bool) -> None:  # noqa: B027 (only devices have streams)
        """Be behind what others launched on a device, once the lock is held."""

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt left something that the next call has to do. Call while writing."""
        return self._decided.is_unfinished

    # ---- leases

    @property
    def newest_lease(self) -> int | None:
        """The newest live lease, which may hold any row of now."""
        return self._leases.newest

    @property
    def is_awaited(self) -> bool:
        """Whether a backward may follow a forward: a lease lives."""
        if self._leases.has_ended:
            with self.writing():
                pass
        return any(not batch.applied for batch in self._leases.live())

    def _collect_leases(self) -> None:
        self._leases.collect(self._touch)
        for number in tuple(self._limbo):
            self.tables[number].leases_ended(self._leases.oldest)
            if not self.tables[number].has_limbo:
                self._limbo.discard(number)

    def erase(self, number: int, keys: Tensor) -> int:
        """Remove rows of a table; returns how many there were. Call while writing."""
        erased: list[int] = []
        self._decided.do(self._erase, number, erased, keys)
        if self.newest_lease is None:
            self.tables[number].compact(erased[0])
        return erased[0]

    def _erase(self, number: int, erased: list[int], keys: Tensor) -> None:
        newest = self.newest_lease
        self._limbo.add(number)  # where nothing waits, the next call finds that
        erased.append(self.tables[number].erase(keys, newest))

    def assign(self, number: int, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys of a table. Call while writing."""
        self._decided.do(self.tables[number].assign, keys, weights)

    @abstractmethod
    def _touch(self, batch: Any) -> None:
        """The keys of a training lookup that no backward follows were used all the same."""

    def forget_forwards(self) -> None:
        """Forget every forward that waits for its backward. Call while writing."""
        self._leases.clear()
        self._collect_leases()

    def clear(self, numbers: Sequence[int]) -> None:
        """Forget all rows of some tables, and every forward that waits for its backward. Call while writing."""
        self._decided.do(self._clear, numbers)

    def _clear(self, numbers: Sequence[int]) -> None:
        self._leases.clear()
        try:
            for number in numbers:
                self.tables[number].clear()
        finally:
            self._forget_plans()

    def _replace_each(
        self, contents: Mapping[int, TableContent], first: Callable[[list[int]], None] | None = None
    ) -> None:
        """Replace the rows of tables that have no room for two sets of them, one table after the other: those that are
        not reached stay as they are. `first` replaces others before them, all or none, and says which."""
        done: list[int] = []
        at: int | None = None  # the one that is being replaced
        is_empty = False
        try:
            if first is not None:
                self._decided.do(first, done)
            for number, content in contents.items():
                is_empty = False
                at = number
                self.clear([number])
                is_empty = True
                self.tables[number].fill(content)
                done.append(number)
                at = None
        except BaseException as error:
            if self._decided.is_unfinished:  # an interrupt came
                self._decided.finish()
                is_empty = at is not None
            names = {number: repr(self.tables[number].config.name) for number in (*done, *contents)}
            what = ""
            if at is not None and at not in done:
                is_empty = (is_empty or not isinstance(error, Exception)) and self._is_cleared(at)
                what = "is empty now" if is_empty else "could not be emptied, and may have lost rows"
                what = f"[table {names[at]}] it was being loaded, and {what}. Load it again."
            rest = [other for other in contents if other not in done and other != at]
            told = [
                f"{', '.join(names[one] for one in some)} {verb}."
                for some, verb in ((done, "did load"), (rest, "stayed as before"))
                if some and (what or (done and rest))
            ]
            if what or told:
                error.add_note(" ".join([what, *told] if what else [f"[{self.name}]", *told]))
            raise

    def _is_cleared(self, number: int) -> bool:
        """Forget what was loaded so far; says whether that worked, for whoever has another error to tell."""
        try:
            self.clear([number])  # and whoever was staged meanwhile
        except Exception:
            return False
        return True

    def _forget_plans(self) -> None:
        """They know where rows were."""
        self._plans.clear()
        self._newest_plan = None

    @abstractmethod
    def replace(self, contents: Mapping[int, TableContent]) -> None:
        """Replace the rows of tables; if there is no room for all, none changes. Call while writing. Where a storage
        fails on the way, a note of the error says which tables are empty, loaded and as they were.

        REQUIRES: the contents fit the tables' configs.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise what went wrong on a device and was not raised yet; waits for it."""

    # ---- one batch

    def lookup(self, request: Request) -> tuple[Tensor, Tensor]:
        """Returns the output of a lookup and its lease, which is of no forward where no backward may follow."""
        request.check(self.name, self.device)
        return self._look_up(request)

    @abstractmethod
    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        """The same for a request that was checked."""

    @abstractmethod
    def update(self, change: Update) -> Tensor:
        """Apply a forward's output gradients; returns the gradient of the per-sample weights, or nothing."""

    def stage(self, batch: Batch) -> Staging | None:
        """Begin to bring the rows of a batch to the top tier, ahead of its lookup; None where they cannot be below."""
        return None

    @abstractmethod
    def _make_plan(self, names: tuple[str, ...]) -> Any: ...

    def _require_finite(self, batch: Batch) -> None:
        """Raise InputError where per-sample weights are NaN or infinite: so would be the rows that they pool, and all
        gradients. Weights of features that no table has are left alone. REQUIRES: weights are float32."""
        names, offsets, weights = batch.names, batch.offsets, batch.weights
        if weights is None or (all_finite(weights) if weights.is_cpu else bool(torch.isfinite(weights).all())):
            return
        used = {name for table in self.tables for name in table.config.feature_names}
        bags = batch.size
        is_bad = ~torch.isfinite(weights)
        for number, name in enumerate(names):
            begin, end = int(offsets[number * bags]), int(offsets[(number + 1) * bags])
            if name in used and (found := is_bad[begin:end].nonzero()).numel():
                at = begin + int(found[0])
                raise InputError(
                    f"[{self.name}] per-sample weights must be finite; got {float(weights[at])} for value {at} of the "
                    f"batch, in {name!r}, and {len(found)} such in it. Mend the weights, or leave the sample out."
                )

    def _require_output(self, plan: Any, output: Pooled | Each) -> None:
        """Raise InputError where the tables pool and the caller wants rows of each key, or the other way round."""
        if isinstance(output, Each):
            if plan.columns:
                raise InputError(f"[{self.name}] its tables pool; call lookup.")
        elif not plan.columns or output.columns != plan.columns:
            raise InputError(
                f"[{self.name}] its outputs have {plan.columns} columns; got {output.columns}. Where tables do not "
                f"pool, call lookup_each."
            )

    def _require_gradients(self, grads: Sequence[Tensor], wanted: Sequence[tuple[int, ...]]) -> None:
        """Raise InputError where a forward's gradients have other shapes, or cannot be summed on the device."""
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

    def _plan(self, names: Sequence[str]) -> Any:
        newest = self._newest_plan
        if newest is not None and newest[0] == names:  # quicker than a hash of many names
            return newest[1]
        wanted = tuple(names)
        plan = self._plans.get(wanted)
        self._newest_plan = None if plan is None else (list(wanted), plan)
        if plan is None:
            plan = self._plans[wanted] = self._make_plan(wanted)
            for oldest in list(self._plans)[:-_MOST_PLANS]:  # a copy: others make some meanwhile
                self._plans.pop(oldest, None)
        return plan

    @staticmethod
    def _gradient(grad: Tensor) -> Tensor:
        grad = grad.detach().to(torch.float32)
        return grad if grad.stride(-1) == 1 else grad.contiguous()
