"""The tables of collections, as a log sees them."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from shoal.config.trained import trained_otherwise
from shoal.errors import CheckpointError, ConfigError, DeviceError, InputError, StorageError
from shoal.log.commit import MOST_STEPS, TableCommit
from shoal.log.label import checked_metadata
from shoal.records import Layout, layout_of
from shoal.table import Group, collections_in
from shoal.table.changes import Mark
from shoal.table.lock import in_lock_order
from shoal.table.protocols import Bounded, Exportable, Fillable, Keyed, Tracked, Trained


class Loggable(Trained, Keyed, Exportable, Fillable, Bounded, Tracked, Protocol):
    """What logs and checkpoints need of a table."""


@dataclass(frozen=True)
class LoggedTable:
    """One table, and the group whose lock covers it."""

    group: Group
    number: int

    @property
    def table(self) -> Loggable:
        """The table as its group has it."""
        return self.group.tables[self.number]

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.config.name

    @cached_property
    def layout(self) -> Layout:
        """The layout of its rows."""
        return layout_of(self.table.config, self.group.seed)

    def memory(self, puts: int = 0, deletes: int = 0, replaces: bool = False) -> TableCommit:
        """Returns what a commit says of the table: what it remembers besides its rows, and how many rows change."""
        table = self.table
        if table.step > MOST_STEPS:
            raise InputError(
                f"[table {self.name!r}] its step is {table.step}; a log takes steps up to {MOST_STEPS}. Load it with "
                f"another one."
            )
        hyper = {
            name: tuple(map(float, value)) if isinstance(value, tuple) else float(value)
            for name, value in table.optimizer_hyper.items()
        }
        policies = deepcopy(checked_metadata(f"table {self.name!r}", table.policy_state, "what its policies remember"))
        return TableCommit(table.step, len(table), puts, deletes, replaces, hyper, self.optimizer, policies)

    @property
    def optimizer(self) -> str:
        """The name of the table's optimizer; "" where it has none."""
        optimizer = self.table.config.optimizer
        return "" if optimizer is None else type(optimizer).__name__

    def require_trained_alike(self, where: str, kind: str | None, layout: Layout, advice: str) -> None:
        """Raises CheckpointError where rows of a layout were trained by another optimizer than the table's, or have
        other state of the same one. kind: the optimizer's name, "" for none, None where it is not known. REQUIRES: the
        dims are the same."""
        config = self.table.config
        widths: dict[str, int | None] = {column.name: column.width for column in layout.columns}
        if otherwise := trained_otherwise(config.name, config.dim, config.optimizer, kind, widths):
            raise CheckpointError(f"[{where}] {otherwise} {advice}")

    def remember(self, memory: TableCommit) -> None:
        """Sets what the table remembers besides its rows. Settings that its optimizer does not have are left out."""
        self.table.step = memory.step
        self.table.policy_state = deepcopy(dict(memory.policies))
        self.group.settings_may_change = True
        for name, value in self.settings_of(memory).items():
            self.table.optimizer_hyper[name] = value

    def follow(self, log: str, commit: Mark) -> None:
        """Opens a cursor for a log with this newest commit. Rows that are put before the call are not tracked by it."""
        self.table.changes.follow(log, commit)
        self.table.follow_cursors()

    def equals(self, log: str, commit: Mark) -> None:
        """Has the table's cursor for a log begin here: the table equals that commit, and only later changes are new to
        it."""
        changes = self.table.changes
        self.follow(log, commit)
        self.table.seal()
        changes.look(log)
        changes.committed(log, commit)

    def settings_of(self, memory: TableCommit) -> dict[str, Any]:
        """Returns those of the settings that the table's optimizer has. Raises StorageError where the optimizer refuses
        them."""
        optimizer, hyper = self.table.config.optimizer, self.table.optimizer_hyper
        settings = {name: value for name, value in memory.hyper.items() if name in hyper}
        if optimizer is not None:
            try:
                replace(optimizer, **settings)
            except ConfigError as error:
                raise StorageError(
                    f"[table {self.name!r}] the log has no valid optimizer settings for it: {error}"
                ) from None
        return settings


class LoggedTables(Mapping[str, LoggedTable]):
    """The tables of one or several collections, by name."""

    def __init__(self, where: str, bags: Any) -> None:
        wanted = f"[{where}] wanted a collection, a module that holds some, or a list of them; got"
        try:
            collections = collections_in(bags)
        except TypeError as error:
            raise InputError(f"{wanted} {error}.") from None
        self._tables: dict[str, LoggedTable] = {}
        for collection in collections:
            for name, handle in collection.tables().items():
                if name in self._tables:
                    raise InputError(f"[{where}] wanted tables of different names; {name!r} is in two collections.")
                self._tables[name] = LoggedTable(*handle.place)
        if not self._tables:
            raise InputError(f"{wanted} {type(bags).__name__} without any.")
        for table in self._tables.values():
            if table.group.device.type == "meta":
                raise DeviceError(
                    f"[{where}] wanted tables that can have rows; got {table.name!r} on meta, which has none. Call "
                    f"to_empty(device='cpu') or to_empty(device='cuda') on the model first."
                )
        self._groups: list[Group] = in_lock_order(one.group for one in self._tables.values())

    def __getitem__(self, name: str) -> LoggedTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the shared lock of every group: no row changes, and lookups may go on."""
        with ExitStack() as locks:
            for group in self._groups:
                locks.enter_context(group.reading_all())
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the exclusive lock of every group: no other thread reads or changes rows."""
        with ExitStack() as locks:
            for group in self._groups:
                locks.enter_context(group.writing())
            yield

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt left some rows of a group half changed."""
        return any(group.is_interrupted for group in self._groups)

    def forget_forwards(self) -> None:
        """Drops what forwards keep for their backwards. REQUIRES: the exclusive lock is held."""
        for group in self._groups:
            group.forget_forwards()

    def clear(self, names: Collection[str]) -> None:
        """Removes all rows of some tables. REQUIRES: the exclusive lock is held."""
        for group in self._groups:
            numbers = [one.number for name, one in self._tables.items() if name in names and one.group is group]
            if numbers:
                group.clear(numbers)
