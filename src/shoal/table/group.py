"""A group: tables that are looked up and updated together, behind one lock.

The path of one batch is `lookup`, then `update`; see docs/design.md. This file has what both backends do of it, and
the lock. table/host/group.py has the rest for rows in host memory, table/device/group.py for rows in device memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.errors import InputError
from shoal.ops.update import all_finite
from shoal.table.content import TableContent
from shoal.table.decided import Decided
from shoal.table.forked import OwnProcess
from shoal.table.job import this_rank
from shoal.table.lease import Leases
from shoal.table.lifecycle.admission import Admission
from shoal.table.lock import Around
from shoal.table.lower.threads import IoThreads
from shoal.table.nonfinite import Judged
from shoal.table.plans import Plans
from shoal.table.protocols import GroupTable, Habits, LossScale
from shoal.table.request import Batch, Each, Pooled, Request, Update
from shoal.table.staging import Staging

# Storages that are read at a time.
_MOST_IO_THREADS = 8


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
        # Whether the optimizers' settings can have changed since the tables were made.
        self.settings_may_change = False
        lock = _native.RwLock()
        self._shared, self._exclusive = lock.shared(), lock.exclusive()
        self._leases: Leases[Any] = Leases()
        self._plans: Plans[Any] = Plans()
        self._limbo: set[int] = set()  # tables with erased rows whose slots wait for leases to end
        self.staged: dict[tuple[int, int], Any] = {}  # batches that are staged, by the address of their values
        self.decided = Decided(self.tables)
        # Each of its threads waits for a table's storage; none is started before it is needed.
        self.io_threads = IoThreads(_MOST_IO_THREADS)
        self.process = OwnProcess()
        this_rank()  # remembered for logs, which may be written when the process group is gone

    def births(self) -> int:
        """A number that grows by the rows that a lookup of this thread gives birth to. On a device it is that of all
        rows, and waits for the device."""
        with self.reading():
            return sum(len(table) for table in self.tables)

    @abstractmethod
    def admit_by(self, number: int, admission: Admission | None) -> None:
        """Let a policy say which keys get a row in a table; None admits all."""

    def retire(self, why: str) -> None:
        """Refuse all calls from here on, with this text, and close the storages: another group may open them."""
        with self.writing():
            self.retired = why
            for table in self.tables:
                if table.lowest is not None:
                    table.lowest.close()

    def number_of(self, table: str) -> int | None:
        """Returns the number of the table of that name."""
        return next((n for n, held in enumerate(self.tables) if held.config.name == table), None)

    @property
    def members(self) -> "tuple[Group, ...]":
        """The groups of which this is made: itself alone."""
        return (self,)

    def place_of(self, number: int) -> "tuple[Group, int]":
        """The group of the table of that number, and its number there."""
        return self, number

    # ---- the lock

    def reading(self) -> _native.Held:
        """Takes the shared lock. Rows do not change while it is held, and are as they are between steps."""
        return _native.Held(self._shared, Around(self, self._entered_shared))

    def reading_all(self) -> _native.Held:
        """Takes the shared lock, with scores up to date: those of forwards that were dropped are raised first."""
        if self._leases.has_ended:
            with self.writing():
                pass
        return self.reading()

    def writing(self) -> _native.Held:
        """Takes the exclusive lock, and does what interrupted calls and leases that ended have left to do."""
        return self._held_exclusively(self._entered_exclusive)

    def _updating(self) -> _native.Held:
        """Takes the exclusive lock for an update."""
        return self.writing()

    def _held_exclusively(self, entered: Callable[[], bool | None]) -> _native.Held:
        return _native.Held(self._exclusive, Around(self, entered))

    def _entered_shared(self) -> bool | None:
        if self.decided.is_unfinished:
            return False
        self._follow(exclusive=False)
        return None

    def _entered_exclusive(self) -> None:
        self._follow(exclusive=True)
        self.decided.finish()
        self._collect_leases()

    def _follow(self, exclusive: bool) -> None:  # noqa: B027 (only devices have streams)
        """Order what will be launched after what other streams launched. Called once the lock is held."""

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt left something that the next call has to do. Call while writing."""
        return self.decided.is_unfinished

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
        return any(not forward.applied for forward in self._leases.live())

    def _collect_leases(self) -> None:
        self._leases.collect(self._touch)
        for number in tuple(self._limbo):
            self.tables[number].leases_ended(self._leases.oldest)
            if not self.tables[number].has_limbo:
                self._limbo.discard(number)

    @abstractmethod
    def _touch(self, forward: Any) -> None:
        """Raise the scores of a training forward that no backward follows: its keys were used all the same."""

    def forget_forwards(self) -> None:
        """Forget every forward that waits for its backward. Call while writing."""
        self._leases.clear()
        self._collect_leases()

    # ---- rows that calls change

    def erase(self, number: int, keys: Tensor) -> int:
        """Remove rows of a table; returns how many there were. Call while writing."""
        erased: list[int] = []
        self.decided.do(self._erase, number, erased, keys)
        if self.newest_lease is None:
            self.tables[number].compact(erased[0])
        return erased[0]

    def _erase(self, number: int, erased: list[int], keys: Tensor) -> None:
        newest = self.newest_lease
        self._limbo.add(number)  # where nothing waits, the next call finds that
        erased.append(self.tables[number].erase(keys, newest))

    def assign(self, number: int, keys: Tensor, weights: Tensor) -> None:
        """Set the weights of keys of a table. Call while writing."""
        self.decided.do(self.tables[number].assign, keys, weights)

    def clear(self, numbers: Sequence[int]) -> None:
        """Forget all rows of some tables, and every forward that waits for its backward. Call while writing."""
        self.decided.do(self._clear, numbers)

    def _clear(self, numbers: Sequence[int]) -> None:
        self._leases.clear()
        try:
            for number in numbers:
                self.tables[number].clear()
        finally:
            try:
                self._forget_plans()
            finally:
                # After the rows are gone: batches that are staged until then know them.
                for staging in tuple(self.staged.values()):
                    staging.release()

    def _forget_plans(self) -> None:
        self._plans.forget()

    def replace(self, contents: Mapping[int, TableContent]) -> None:
        """Replace the rows of tables; if there is no room for all, none changes. Call while writing. Where a storage
        fails on the way, a note of the error says which tables are empty, loaded and as they were.

        REQUIRES: the contents fit the tables' configs.
        """
        for number, content in contents.items():
            self.tables[number].require_room(len(content.keys))
        self._replace(contents)

    @abstractmethod
    def _replace(self, contents: Mapping[int, TableContent]) -> None:
        """The same for contents that each table has room for."""

    # ---- one batch

    @abstractmethod
    def check(self) -> None:
        """Raise what went wrong on a device and was not raised yet; waits for the device."""

    def lookup(self, request: Request) -> tuple[Tensor, Tensor]:
        """Returns the output, and a lease for the update. Where no backward may follow, the lease holds nothing."""
        request.check(self.name, self.device)
        return self._look_up(request)

    @abstractmethod
    def _look_up(self, request: Request) -> tuple[Tensor, Tensor]:
        """The same for a request that was checked."""

    def judge(self, change: Update) -> Judged:
        """Look for NaN and infinity in the gradients. Changes nothing, and raises what is wrong with their shapes,
        their forward or the optimizers' settings."""
        with self._updating():
            forward, grads = self._checked(change)
            for number in forward.plan.trained:
                self.tables[number].optimizer_hyper.values()  # raises for a setting that its optimizer refuses
            return self._judge(forward, change, grads)

    @abstractmethod
    def _judge(self, forward: Any, change: Update, grads: Sequence[Tensor]) -> Judged:
        """The same for a change that was checked."""

    def update(self, change: Update, skip: bool | Tensor | None = None) -> Tensor:
        """Apply a forward's output gradients; returns the gradient of the per-sample weights, or nothing.

        `skip` is the decision about gradients that are not finite where it was made for several groups: whether all
        rows stay as they are, as a bool, or as an int32 tensor of one number that is not 0 if so. None: this group
        decides.
        """
        with self._updating():
            forward, grads = self._checked(change)
            return self._update(forward, change, grads, skip)

    def _checked(self, change: Update) -> tuple[Any, list[Tensor]]:
        """The forward of a change, and its gradients as float32 with contiguous rows."""
        forward = self._leases.of(change.lease)
        if not forward.was_checked(change):
            batch = Batch(forward.plan.names, change.values, change.offsets, change.weights)
            batch.check(self.name, self.device)
        grads = forward.gradients_of(change.grads)
        self._require_gradients(grads, forward.gradient_shapes(grads))
        return forward, [_gradient(grad) for grad in grads]

    @abstractmethod
    def _update(self, forward: Any, change: Update, grads: Sequence[Tensor], skip: bool | Tensor | None) -> Tensor:
        """The same for a change that was checked."""

    def awaits(self, lease: Tensor) -> bool:
        """Whether a forward waits for its backward."""
        with self.writing():
            return self._leases.awaits(lease)

    def require_features(self, names: Sequence[str]) -> None:
        """Raise NotFoundError or InputError where a batch lacks a feature of the tables, or has one twice."""
        with self.reading():
            self._plan(names)

    def noting_births(self) -> AbstractContextManager[list[tuple[int, Tensor]]]:
        """Note the tables and keys to which lookups of this thread give rows in the body of `with`. Empty on a device,
        where only the device knows them."""
        return nullcontext([])

    def undo(self, lease: Tensor, births: Sequence[tuple[int, Tensor]]) -> None:
        """Have a forward be as if it had not come: its lease ends without a use of its rows, and births are erased."""
        with self.writing():
            self._leases.drop(lease)
            for number, keys in births:
                self.erase(number, keys)

    def stage(self, batch: Batch) -> Staging | None:
        """Begin to bring the rows of a batch to the top tier, ahead of its lookup; None where they cannot be below."""
        return None

    def _plan(self, names: Sequence[str]) -> Any:
        return self._plans.of(names, self._make_plan)

    @abstractmethod
    def _make_plan(self, names: tuple[str, ...]) -> Any: ...

    # ---- what it refuses

    def _require_output(self, columns: int, output: Pooled | Each) -> None:
        """Raise InputError where tables whose outputs have so many columns cannot answer: they pool and rows of each
        key are wanted, or the other way round."""
        if isinstance(output, Each):
            if columns:
                raise InputError(f"[{self.name}] its tables pool; call lookup.")
        elif not columns or output.columns != columns:
            raise InputError(
                f"[{self.name}] its outputs have {columns} columns; got {output.columns}. Where tables do not pool, "
                f"call lookup_each."
            )

    def _require_finite(self, batch: Batch) -> None:
        """Raise InputError where per-sample weights are NaN or infinite: so would be the rows that they pool, and all
        gradients. Weights of features that no table has are left alone. REQUIRES: weights are float32."""
        weights, offsets, bags = batch.weights, batch.offsets, batch.size
        if weights is None or (all_finite(weights) if weights.is_cpu else bool(torch.isfinite(weights).all())):
            return
        used = {name for table in self.tables for name in table.config.feature_names}
        is_bad = ~torch.isfinite(weights)
        for number, name in enumerate(batch.names):
            begin, end = int(offsets[number * bags]), int(offsets[(number + 1) * bags])
            if name in used and (found := is_bad[begin:end].nonzero()).numel():
                at = begin + int(found[0])
                raise InputError(
                    f"[{self.name}] per-sample weights must be finite; got {float(weights[at])} for value {at} of the "
                    f"batch, in {name!r}, and {len(found)} such in it. Mend the weights, or leave the sample out."
                )

    def _require_gradients(self, grads: Sequence[Tensor], wanted: Sequence[tuple[int, ...]]) -> None:
        """Raise InputError where the gradients of a forward do not fit its outputs."""
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


def _gradient(grad: Tensor) -> Tensor:
    grad = grad.detach().to(torch.float32)
    return grad if grad.stride(-1) == 1 else grad.contiguous()
