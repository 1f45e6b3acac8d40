"""Storages by key do what tables expect of them; the check that says so finds those that do not."""

import pytest
import torch

from shoal.storage import MemoryStorage, SsdStorage, check_storage


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


@pytest.mark.parametrize("wrong", [Forgets, Mixes, Keeps, Narrow])
def test_what_does_not_conform_is_found(wrong):
    with pytest.raises(AssertionError):
        check_storage(wrong)
