"""Storages by key do what tables expect of them; the check that says so finds those that do not."""

import threading

import pytest
import torch

from shoal.storage import MemoryStorage, SsdStorage, check_storage

pytestmark = pytest.mark.threads


def test_memory_conforms():
    check_storage(MemoryStorage)


@pytest.mark.parametrize("io", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_ssd_conforms(tmp_path, io, direct):
    check_storage(lambda row_bytes: SsdStorage(str(tmp_path / "rows"), row_bytes, 64 << 20, io, direct))
    assert not (tmp_path / "rows").exists()


class Forgets(MemoryStorage):
    def write(self, keys, rows):
        super().write(keys[1:], rows[1:])


class Mixes(MemoryStorage):
    def read(self, keys):
        rows, found = super().read(keys)
        return rows.flip(0), found


class Keeps(MemoryStorage):
    def erase(self, keys):
        return int(self.read(keys)[1].sum())


class Narrow(MemoryStorage):
    def read(self, keys):
        rows, found = super().read(keys)
        return rows, found.to(torch.uint8)


class ClearsNothing(MemoryStorage):
    def clear(self):
        pass


class ClearsHalf(MemoryStorage):
    def clear(self):
        self.erase(self.keys()[::2])


@pytest.mark.parametrize("wrong", [Forgets, Mixes, Keeps, Narrow, ClearsNothing, ClearsHalf])
def test_what_does_not_conform_is_found(wrong):
    with pytest.raises(AssertionError):
        check_storage(wrong)


class ClearFails(MemoryStorage):
    def clear(self):
        raise NotImplementedError("to clear")


class FewAtATime(MemoryStorage):
    def _require_few(self, keys):
        if len(keys) > 5000:
            raise NotImplementedError("more than 5000 keys")


class ReadsFew(FewAtATime):
    def read(self, keys):
        self._require_few(keys)
        return super().read(keys)


class WritesFew(FewAtATime):
    def write(self, keys, rows):
        self._require_few(keys)
        super().write(keys, rows)


class ErasesFew(FewAtATime):
    def erase(self, keys):
        self._require_few(keys)
        return super().erase(keys)


class ErasesAlone(MemoryStorage):
    def __init__(self, row_bytes):
        super().__init__(row_bytes)
        self._reading = set()

    def read(self, keys):
        self._reading.add(threading.get_ident())
        try:
            return super().read(keys)
        finally:
            self._reading.discard(threading.get_ident())

    def erase(self, keys):
        if self._reading:
            raise NotImplementedError("to erase during a read")
        return super().erase(keys)


@pytest.mark.parametrize("wrong", [ClearFails, ReadsFew, WritesFew, ErasesFew, ErasesAlone])
def test_what_a_storage_refuses_to_do_is_found(wrong):
    with pytest.raises(NotImplementedError):
        check_storage(wrong)


class Reuses(MemoryStorage):
    """Answers in memory of its own, a piece for each thread."""

    def __init__(self, row_bytes):
        super().__init__(row_bytes)
        self._local = threading.local()

    def read(self, keys):
        rows, found = super().read(keys)
        if not hasattr(self._local, "rows"):
            self._local.rows = torch.empty(1 << 14, rows.shape[1], dtype=torch.uint8)
        self._local.rows[: len(keys)] = rows
        return self._local.rows[: len(keys)], found


class Sorts(MemoryStorage):
    def read(self, keys):
        answer = super().read(keys)
        keys.copy_(keys.sort().values)
        return answer


class Scribbles(MemoryStorage):
    def write(self, keys, rows):
        super().write(keys, rows)
        rows.zero_()


class Negates(MemoryStorage):
    def erase(self, keys):
        count = super().erase(keys)
        keys.neg_()
        return count


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Reuses, "read changed what the read before it returned"),
        (Sorts, "read changed its arguments"),
        (Scribbles, "write changed its arguments"),
        (Negates, "erase changed its arguments"),
    ],
)
def test_what_is_the_callers_is_left_alone(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_storage(wrong)


def test_another_default_device_does_not_matter():
    with torch.device("meta"):
        check_storage(MemoryStorage)
