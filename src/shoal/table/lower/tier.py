"""What a table has below its memory: a storage by key."""

import os
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Ssd, Table
from shoal.errors import CapacityError, ConfigError, ShoalError, StorageError
from shoal.metrics import Metrics
from shoal.storage import Answer, SsdStorage, Storage
from shoal.table.lower.handlers import is_of_a_handler
from shoal.table.lower.staged import NO_KEYS, NOTHING, Staged

# Of rows that are read at a time only to see whether they can be.
_TRY_BYTES = 8 << 20


_HOST = torch.device("cpu")


class _Named:
    """A call of a storage, in the body of `with`. No generator: what it holds would live as long as a traceback."""

    def __init__(self, below: "Below", call: str) -> None:
        self._below, self._call = below, call

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not is_of_a_handler(error):
            self._below._failed(self._call, error)


# All that are in use: a storage is one table's.
_living: "weakref.WeakSet[Below]" = weakref.WeakSet()
_registering = threading.Lock()


class Below:
    """The lowest tier of one table. The table's lock covers its methods, but for `read` and `unreadable`, which any
    thread may call, and `write`, which one may call meanwhile if it took `writing` before it let the lock go.

    device: where the keys of an error are put."""

    def __init__(self, config: Table, folder: str, device: torch.device = _HOST) -> None:
        self.row_bytes = config.format.packed_bytes
        self._device = device
        self._name = config.name
        tier = (config.tiers or (None,))[-1]
        self.capacity: int | None = None
        if isinstance(tier, Ssd):
            # Names may hold anything; a folder's must not.
            parts = [urllib.parse.quote(part, safe="").replace(".", "%2E") for part in (folder, config.name)]
            directory = reduce(truediv, filter(None, parts), _native.FilePath(Path(tier.path)))
            ssd = SsdStorage(directory, self.row_bytes, tier.bytes)
            self.capacity = ssd.capacity
            self.storage: Storage = ssd
        else:
            self.storage = _made(config, tier, self.row_bytes)
        with _registering:
            for other in tuple(_living):
                if other.storage is self.storage:  # each would overwrite the other's rows, and close it
                    raise ConfigError(
                        f"[Table {config.name!r}] tiers: wanted {tier!r} to make a storage for this table alone; got "
                        f"the {type(self.storage).__name__} that table {other._name!r} has. Have it make another each "
                        f"time it is called."
                    )
            _living.add(self)
        self._close = weakref.finalize(self, _close, self.storage, os.getpid())
        # Rows that were read ahead. `writing` is held while rows are written: an erase waits for it.
        self._staged: dict[int, Staged] = {}
        self.writing = threading.Lock()
        self.metrics = Metrics(
            self,
            name="Ssd" if self.is_disk else type(self.storage).__name__,
            budget_bytes=tier.bytes if isinstance(tier, Ssd) else None,
            capacity=self.capacity,
        )
        count = self.metrics.counter
        self._hits, self._misses, self._reads, self._writes = map(count, ("hits", "misses", "reads", "writes"))
        self._read_seconds, self._write_seconds = count("read_seconds"), count("write_seconds")
        self._read_bytes, self._written_bytes = count("read_bytes"), count("written_bytes")
        self._failures = count("failures")
        self.metrics.gauges(Below._measured)
        if self.is_disk:
            self.metrics.gauges(Below._measured_on_disk)

    def close(self) -> None:
        """Close the storage before its table goes. It is not used afterwards."""
        with _registering:
            _living.discard(self)
        self._close()

    def require_place(self, births: int, rows: Callable[[], int]) -> None:
        """Raise CapacityError where it has no place for so many rows more than the table's `rows`. Every row has a
        place here from its birth on, so that it can always leave memory."""
        if self.capacity is not None and births and (held := rows()) + births > self.capacity:
            raise CapacityError(
                f"[table {self._name!r}] its {held} rows and {births} new ones are more than the {self.capacity} that "
                f"its lowest tier takes. Raise Ssd(size=), of which rows fill half, or erase keys that are not needed."
            )

    def require_load(self, rows: int) -> None:
        """Raise CapacityError where it has no place for so many rows in all."""
        if self.capacity is not None and rows > self.capacity:
            raise CapacityError(
                f"[table {self._name!r}] {rows} rows are more than the {self.capacity} that its lowest tier takes. "
                f"Raise Ssd(size=), of which rows fill half. Nothing was loaded."
            )

    def read(self, keys: Tensor) -> Answer:
        """The rows of keys, all different."""
        if not len(keys):  # a storage may be far away
            return NOTHING._replace(rows=torch.empty(0, self.row_bytes, dtype=torch.uint8, device="cpu"))
        begin = time.perf_counter()
        with self._named("read"):
            given = self.storage.read(keys)
        rows, found = self._checked(given, len(keys))
        answer = Answer(rows, found, int(found.sum()))
        self._count(len(keys), answer.has, time.perf_counter() - begin)
        return answer

    @property
    def failures(self) -> int:
        """Calls of the storage that raised."""
        return int(self._failures.value)

    @property
    def is_disk(self) -> bool:
        """Whether it may be read together with others."""
        return isinstance(self.storage, SsdStorage)

    @staticmethod
    def read_together(belows: "Sequence[Below]", keys: Sequence[Tensor]) -> list[Answer]:
        """The same for several tables at a time. REQUIRES: all are disks."""
        begin = time.perf_counter()
        storages = [below.storage for below in belows if isinstance(below.storage, SsdStorage)]
        answers: list[Answer] = []
        for below, answer in zip(belows, SsdStorage.read_together(storages, keys), strict=True):
            if isinstance(answer, Exception):
                with below._named("read"):
                    raise answer
            answers.append(answer)
        seconds = (time.perf_counter() - begin) / len(belows)
        for below, some, answer in zip(belows, keys, answers, strict=True):
            below._count(len(some), answer.has, seconds)
        return answers

    def unreadable(self, keys: Tensor) -> Tensor:
        """Of keys, all different, those whose rows the storage has and cannot read now, in ascending order."""
        lost = [NO_KEYS]
        for some in keys.sort().values.split(max(_TRY_BYTES // self.row_bytes, 1)) if len(keys) else ():
            try:
                with self._named("read"):
                    self.storage.read(some)
            except StorageError as error:
                if error.keys is None:
                    raise
                lost.append(error.keys.cpu())
        return torch.cat(lost)

    def _count(self, asked: int, has: int, seconds: float) -> None:
        self._read_seconds.add(seconds)
        self._reads.add()
        self._hits.add(has)
        self._misses.add(asked - has)
        self._read_bytes.add(has * self.row_bytes)

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in place of those that the keys had. REQUIRES: `writing` is held."""
        begin = time.perf_counter()
        with self._named("write"):
            self.storage.write(keys, rows)
        self._write_seconds.add(time.perf_counter() - begin)
        self._writes.add()
        self._written_bytes.add(len(keys) * self.row_bytes)
        for staged in tuple(self._staged.values()):
            staged.settle(keys)

    def contains(self, keys: Tensor) -> Tensor:
        """Whether each key, which may come twice, has a row."""
        if isinstance(self.storage, SsdStorage):
            return self.storage.contains(keys)
        distinct, inverse = torch.unique(keys, return_inverse=True)
        return self.read(distinct).found[inverse]

    def erase(self, keys: Tensor) -> None:
        """Remove the rows of keys, all different."""
        with self.writing:
            try:
                with self._named("erase"):
                    self.storage.erase(keys)
            finally:
                self.spoil(keys)  # after it: a batch that was staged meanwhile may have read them

    def clear(self) -> None:
        """Remove every row."""
        with self.writing:
            try:
                with self._named("clear"):
                    self.storage.clear()
            finally:
                for staged in tuple(self._staged.values()):
                    staged.spoil_all()

    def spoil(self, keys: Tensor) -> None:
        """Rows of these keys that were read ahead are no longer what the storage has."""
        for staged in tuple(self._staged.values()):  # others come and go meanwhile
            staged.spoil(keys)

    def stage(self, keys: Tensor, ahead: bool) -> Staged:
        """Begin to know of these keys, all different, what is below; the answer comes by `Staged.set`. Where it is only
        `ahead` of a lookup, those that another batch is reading already are left out."""
        staged = Staged()
        self._ask(staged, keys, ahead)
        self._staged[id(staged)] = staged
        return staged

    def listen(self) -> Staged:
        """The same for keys that are not known yet: from here on it hears what is written and erased. Its owner sets
        `is_unread` to False before it reads."""
        staged = Staged()
        staged.is_unread = True
        self._staged[id(staged)] = staged
        return staged

    def ask(self, staged: Staged, keys: Tensor) -> None:
        """These are the keys, and only ahead of a lookup."""
        self._ask(staged, keys, ahead=True)

    @staticmethod
    def ask_together(asks: "Sequence[tuple[Below, Staged]]", missing: _native.MissingKeys) -> None:
        """The same for several tables, whose keys are those that a batch lacks."""
        coming = [below._coming(staged) for below, staged in asks]
        keys, counts = missing.without([[(some.data_ptr(), len(some)) for some in each] for each in coming])
        for (_below, staged), some in zip(asks, keys.split(counts), strict=True):
            staged.keys = staged.asked = some

    def _ask(self, staged: Staged, keys: Tensor, ahead: bool) -> None:
        staged.keys = _native.keys_without(keys, self._coming(staged) if ahead else [])
        staged.asked = keys

    def _coming(self, staged: Staged) -> list[Tensor]:
        """The keys that others are reading or have read, and not placed."""
        others = [one for one in tuple(self._staged.values()) if one is not staged]
        return [one.keys for one in others if one.comes]

    def unstage(self, staged: Staged) -> None:
        """Forget what was read ahead."""
        self._staged.pop(id(staged), None)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of rows that are read ahead and have no place in the table's memory yet."""
        return sum(staged.bytes for staged in tuple(self._staged.values()))

    def _measured(self) -> dict[str, int]:
        rows = len(self.storage)
        return {"rows": rows, "bytes": rows * self.row_bytes, "index_bytes": 0, "ahead_bytes": self.ahead_bytes}

    def _measured_on_disk(self) -> dict[str, int]:
        assert isinstance(self.storage, SsdStorage)
        disk = self.storage.stats()
        return {
            "bytes": disk.file_bytes,
            "index_bytes": disk.index_bytes,
            "read_bytes": disk.read_bytes,
            "written_bytes": disk.written_bytes + disk.collected_bytes,
        }

    def _named(self, call: str) -> "_Named":
        """Count calls that raise, and say whose storage it was."""
        return _Named(self, call)

    def _failed(self, call: str, error: Exception) -> None:
        self._failures.add()
        if isinstance(error, StorageError):
            error.table = self._name
            if isinstance(error.keys, Tensor):
                error.keys = error.keys.to(self._device)
        if not isinstance(error, ShoalError):  # ours say so themselves
            error.add_note(f"[table {self._name!r}] raised by its lowest tier: {type(self.storage).__name__}.{call}.")

    def _checked(self, answer: Any, n: int) -> tuple[Tensor, Tensor]:
        """What a storage returned, if it is rows and a mask."""
        try:
            rows, found = answer
            fits = rows.shape == (n, self.row_bytes) and rows.dtype == torch.uint8 and rows.device.type == "cpu"
            fits = fits and found.shape == (n,) and found.dtype == torch.bool and found.device.type == "cpu"
        except (TypeError, ValueError, AttributeError):
            fits = False
        if not fits:
            raise StorageError(
                f"[table {self._name!r}] {type(self.storage).__name__}.read must return uint8 [{n}, {self.row_bytes}] "
                f"and bool [{n}] on cpu; got {answer!r:.200}. Try shoal.storage.check_storage on it."
            )
        return rows.contiguous(), found


def _close(storage: Storage, process: int) -> None:
    """A table is gone that had it."""
    if os.getpid() == process:  # a forked child has no part in it
        try:
            storage.flush()
        finally:
            storage.close()


def _made(config: Table, make: Any, row_bytes: int) -> Storage:
    storage = make(row_bytes)
    if not isinstance(storage, Storage):
        raise ConfigError(
            f"[Table {config.name!r}] tiers: wanted {make!r} to make a shoal.Storage; got {type(storage).__name__}."
        )
    return storage
