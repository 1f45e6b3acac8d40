"""Checks that a storage does what every storage by key must do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.storage.keyed import Storage

_EXTREMES = (0, -1, 2**63 - 1, -(2**63))
# Keys of a large batch that are not in memory. Storages may limit the keys of one call (SQLite: 32,766 variables).
_MANY = 40_000


def check_storage(make: Callable[[int], Storage], rows: int = 2000) -> None:
    """Raise AssertionError if a storage does not do what tables expect of it.

    make: returns an empty storage for rows of so many bytes. It is closed at the end.
    rows: about how many rows are written. The storage must have room for as many, and for 40,000 of one byte each.
    """
    for row_bytes in (1, 100, 5000):
        storage = make(row_bytes)
        try:
            _check(_Watched(storage), row_bytes, min(rows, 10_000_000 // row_bytes))
        finally:
            storage.close()


class _Watched(Storage):
    """The same storage. Checks that calls change neither their arguments nor what earlier reads returned."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._answer = threading.local()  # the last answer of each thread, and a copy of it

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Read, and keep the answer until this thread's next call."""
        with self._watching("read", keys):
            answer = self._storage.read(keys)
        self._answer.held = [(tensor, tensor.clone()) for tensor in answer]
        return answer

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Write."""
        with self._watching("write", keys, rows):
            self._storage.write(keys, rows)

    def erase(self, keys: Tensor) -> int:
        """Erase."""
        with self._watching("erase", keys):
            return self._storage.erase(keys)

    def keys(self) -> Tensor:
        """Every key."""
        return self._storage.keys()

    def __len__(self) -> int:
        return len(self._storage)

    def clear(self) -> None:
        """Clear."""
        self._storage.clear()

    def flush(self) -> None:
        """Flush."""
        self._storage.flush()

    @contextmanager
    def _watching(self, call: str, *arguments: Tensor) -> Iterator[None]:
        before = [argument.clone() for argument in arguments]
        yield
        for one, two in zip(arguments, before, strict=True):
            assert torch.equal(one, two), f"{call} changed its arguments, which are the caller's"
        for one, two in getattr(self._answer, "held", ()):
            assert torch.equal(one, two), (
                f"{call} changed what the read before it returned, which is the caller's: return new tensors"
            )


def _check(storage: Storage, row_bytes: int, rows: int) -> None:
    _finds_nothing_at_first(storage, row_bytes)
    _takes_any_key(storage, row_bytes)
    _keeps_what_was_written_last(storage, row_bytes, rows)
    _clears_everything(storage, row_bytes, min(rows, 500))
    if row_bytes == 1:
        _takes_many_keys_in_a_call(storage, row_bytes)
    _serves_several_threads(storage, row_bytes)


def _content(keys: Tensor, version: int, row_bytes: int) -> Tensor:
    """Returns rows whose bytes follow from key and version."""
    seeds = (keys * 31 + version * 7) % 251
    return ((seeds[:, None] + torch.arange(row_bytes, device="cpu")) % 251).to(torch.uint8)


def _nothing(n: int, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Returns what a read of n keys without rows returns."""
    return torch.zeros(n, row_bytes, dtype=torch.uint8, device="cpu"), torch.zeros(n, dtype=torch.bool, device="cpu")


def _expect(storage: Storage, keys: Tensor, wanted: Tensor, has: Tensor, where: str) -> None:
    rows, found = storage.read(keys)
    assert rows.shape == wanted.shape and rows.dtype == torch.uint8, (
        f"{where}: read returns uint8 {tuple(wanted.shape)}; got {rows.dtype} {tuple(rows.shape)}"
    )
    assert found.shape == (len(keys),) and found.dtype == torch.bool, (
        f"{where}: read returns bool [{len(keys)}] for what was found; got {found.dtype} {tuple(found.shape)}"
    )
    wrong = keys[found != has].tolist()
    assert not wrong, f"{where}: {len(wrong)} keys are there that should not be, or not there: {wrong[:5]} ..."
    wrong = keys[has][(rows[has] != wanted[has]).any(dim=1)].tolist()
    assert not wrong, f"{where}: {len(wrong)} rows are not what was written: of keys {wrong[:5]} ..."


def _finds_nothing_at_first(storage: Storage, row_bytes: int) -> None:
    assert len(storage) == 0 and len(storage.keys()) == 0, "a new storage has no keys"
    keys = torch.tensor(_EXTREMES, device="cpu")
    _expect(storage, keys, *_nothing(4, row_bytes), "when new")
    assert storage.erase(keys) == 0, "erase counts what was there"
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    storage.write(none, torch.empty(0, row_bytes, dtype=torch.uint8, device="cpu"))
    _expect(storage, none, *_nothing(0, row_bytes), "no keys")


def _takes_any_key(storage: Storage, row_bytes: int) -> None:
    keys = torch.tensor(_EXTREMES, device="cpu")
    storage.write(keys, _content(keys, 1, row_bytes))
    has = torch.ones(4, dtype=torch.bool, device="cpu")
    _expect(storage, keys.flip(0), _content(keys.flip(0), 1, row_bytes), has, "extreme keys")
    assert sorted(storage.keys().tolist()) == sorted(_EXTREMES), "keys returns every key once"
    assert storage.erase(keys) == 4 and len(storage) == 0, "erase counts what was there"


def _keeps_what_was_written_last(storage: Storage, row_bytes: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    versions = torch.full((rows,), -1, device="cpu")
    everything = torch.arange(rows, device="cpu")
    for version in range(12):
        some = torch.randperm(rows, generator=generator, device="cpu")[: rows // 3]
        if version % 4 == 3:
            erased = storage.erase(some)
            assert erased == int((versions[some] >= 0).sum()), "erase counts what was there"
            versions[some] = -1
        else:
            storage.write(some, _content(some, version, row_bytes))
            versions[some] = version
        wanted = torch.zeros(rows, row_bytes, dtype=torch.uint8, device="cpu")
        for past in range(version + 1):
            at = versions == past
            wanted[at] = _content(everything[at], past, row_bytes)
        _expect(storage, everything, wanted, versions >= 0, f"after {version + 1} calls")
        assert len(storage) == int((versions >= 0).sum()), "len is the number of keys"
    storage.flush()
    assert sorted(storage.keys().tolist()) == everything[versions >= 0].tolist(), "keys returns every key once"
    storage.erase(everything)


def _clears_everything(storage: Storage, row_bytes: int, rows: int) -> None:
    keys, none = torch.arange(rows, device="cpu"), torch.zeros(rows, dtype=torch.bool, device="cpu")
    for version in range(2):  # a cleared storage is filled again, as by a load
        storage.write(keys, _content(keys, version, row_bytes))
        _expect(storage, keys, _content(keys, version, row_bytes), ~none, "after a clear" if version else "when full")
        storage.clear()
        assert len(storage) == 0 and len(storage.keys()) == 0, "clear removes every row"
        _expect(storage, keys, _content(keys, version, row_bytes), none, "when cleared")


def _takes_many_keys_in_a_call(storage: Storage, row_bytes: int) -> None:
    keys = torch.arange(_MANY, device="cpu") * 7
    storage.write(keys, _content(keys, 0, row_bytes))
    has = torch.ones(_MANY, dtype=torch.bool, device="cpu")
    _expect(storage, keys, _content(keys, 0, row_bytes), has, f"{_MANY} keys in a call")
    assert storage.erase(keys) == _MANY and len(storage) == 0, "erase counts what was there"


def _serves_several_threads(storage: Storage, row_bytes: int) -> None:
    failed: list[BaseException] = []
    is_over = threading.Event()
    all_of_them = torch.ones(50, dtype=torch.bool, device="cpu")

    def keys_of(number: int) -> Tensor:
        return torch.arange(50, device="cpu") + 50 * number

    def change(number: int) -> None:
        keys = keys_of(number)
        for version in range(10):
            storage.write(keys, _content(keys, version, row_bytes))
            _expect(storage, keys, _content(keys, version, row_bytes), all_of_them, "among other threads")
            assert storage.erase(keys) == 50, "erase counts what was there, among other threads"
            _expect(storage, keys, _content(keys, version, row_bytes), ~all_of_them, "erased among other threads")
        storage.write(keys, _content(keys, 10, row_bytes))

    def read(number: int) -> None:
        """Read without a pause, so that an erase happens during a read."""
        keys = keys_of(number)
        while not is_over.is_set():
            found = storage.read(keys)[1]
            assert bool(found.all()), "rows are gone while other threads erase others"
        _expect(storage, keys, _content(keys, 0, row_bytes), all_of_them, "read among other threads")

    def work(part: Callable[[int], None], number: int) -> None:
        try:
            part(number)
        except BaseException as error:
            failed.append(error)

    storage.write(keys_of(3), _content(keys_of(3), 0, row_bytes))
    changers = [threading.Thread(target=work, args=(change, number)) for number in range(3)]
    reader = threading.Thread(target=work, args=(read, 3))
    for thread in (reader, *changers):
        thread.start()
    for thread in changers:
        thread.join()
    is_over.set()
    reader.join()
    if failed:
        raise failed[0]
    assert len(storage) == 200, "threads that change different keys do not disturb each other"
