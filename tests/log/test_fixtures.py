"""Logs that earlier versions of the format wrote must be read for ever.

Each folder of tests/log/fixtures was written by `python tests/log/test_fixtures.py NAME` when its format was made; it
is never written again. `expected.safetensors` has the rows of its newest version, of version 2, and the dense weights.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.batches import train_step
from support.logged import FEATURES, assert_rows, made
from support.tiered import skewed_kjt

import shoal
from shoal.records import tensors

FIXTURES = Path(__file__).parent / "fixtures"


def expected(version):
    found, _ = tensors.decode(bytearray((FIXTURES / version / "expected.safetensors").read_bytes()), version)
    return found


def part(found, name):
    return {key.removeprefix(f"{name}:"): value for key, value in found.items() if key.startswith(f"{name}:")}


@pytest.mark.parametrize("version", sorted(path.name for path in FIXTURES.iterdir()))
def test_logs_of_every_format_are_read(tmp_path, version):
    shutil.copytree(FIXTURES / version / "log", tmp_path / "log")
    wanted = expected(version)
    bags, dense = made(), torch.nn.Linear(2, 3)
    commit = shoal.recover(tmp_path / "log", bags, dense=dense)
    assert (commit.version, commit.step, commit.metadata) == (5, 50, {"of": ["a", 1, None]})
    assert_rows(bags, part(wanted, "newest"))
    assert torch.equal(dense.weight, wanted["dense.weight"])
    shoal.load(tmp_path / "log", bags, version=2)
    assert_rows(bags, part(wanted, "second"))
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.verify().is_sound
        assert log.commit(bags) == 6


def write(folder):
    """Make the fixture."""
    bags, dense = made(), torch.nn.Linear(2, 3)
    rows = {}
    with shoal.ChangeLog(folder / "log", segment=12000) as log:
        for version in range(1, 6):
            generator = torch.Generator().manual_seed(version)
            train_step(bags, skewed_kjt(FEATURES, generator, bags=3, keys=9), seed=version)
            if version == 4:
                bags.table("a").erase(bags.table("a").keys()[:2])
            told = {"of": ["a", 1, None]}
            log.commit(bags, step=10 * version, dense=dense if version in (1, 5) else None, metadata=told)
            if version in (2, 5):
                name = "second" if version == 2 else "newest"
                rows |= {f"{name}:{key}": value.clone() for key, value in bags.state_dict().items()}
            if version == 3:
                log.compact()
    header, pieces = tensors.encode(rows | {"dense.weight": dense.weight.detach()}, {})
    (folder / "expected.safetensors").write_bytes(header + b"".join(pieces))
    for name in ("LOCK", "MANIFEST.lock", "COMPACT"):
        (folder / "log" / name).unlink(missing_ok=True)


if __name__ == "__main__":
    write(FIXTURES / sys.argv[1])
