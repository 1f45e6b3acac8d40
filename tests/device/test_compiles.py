"""That every kernel compiles for a GPU: the interpreter takes what the compiler does not."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

import shoal
from shoal import Table
from shoal.ops.arguments import I32, I64, Int


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="the compiler does not run under sanitizers")
def test_every_kernel_compiles_for_a_gpu():
    settings = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, __file__], env=settings, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[0]) > 25, run.stdout


class Locate(NamedTuple):
    anchor: I32
    tables: I64
    below: I64
    homes: I64
    number: Int


class Restamp(NamedTuple):
    anchor: I32
    at: Int
    buckets: Int
    firsts: I32
    many: Int


def compiled(launch):
    """The kernel of a launch, for an H100 or H200, with the types that its record declares."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, aligned = {}, {}
    for place, (name, kind, argument) in enumerate(launch.named()):
        signature[name] = kind.usual
        assert not isinstance(argument, torch.Tensor) or kind.takes(argument.dtype), name
        if kind.usual.startswith("*") and not getattr(argument, "first", 0):
            aligned[place,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(launch.kernel, signature, constexprs=dict(launch.constants), attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))


def _located(rows):
    """What follows an index below that was built anew."""
    from shoal.ops.launch import Launch
    from shoal.table.device.kernels.move import locate

    arguments = Locate(rows.anchor, rows.above.index.tables, rows.index.tables, rows.storage.homes, 0)
    return Launch(locate, (1,), arguments, {"SLAB_BITS": 15, "BLOCK": 32}, {"num_warps": 1})


def _restamped(rows):
    """What lets stamps begin anew."""
    from shoal.index.kernels.find import restamp
    from shoal.ops.launch import Launch

    firsts = torch.ones(3, dtype=torch.int32)
    return Launch(restamp, (1,), Restamp(rows.anchor, 0, 4, firsts, 3), {"BLOCK": 1024}, {})


def programs():
    """The launches of lookups and updates of several kinds."""
    from shoal.table.device.lookup import Lookups
    from shoal.table.device.plan import DevicePlan
    from shoal.table.device.rows import DeviceRows
    from shoal.table.device.settings import Settings
    from shoal.table.device.update import Updates

    def made(*tables):
        rows = DeviceRows(list(tables), 0, torch.device("cpu"))
        plan = DevicePlan(rows.configs, rows.families, [table.name for table in tables], rows.device, rows.tiered)
        hypers = [table.optimizer.hyper() for table in tables]
        return rows, plan, Lookups(rows), Updates(rows, Settings(rows, hypers))

    normal = shoal.Normal(0, 1)
    _rows, plan, lookups, updates = made(Table("a", 64), Table("b", 33, init=normal, dtype="bfloat16"))
    yield lookups._launches(plan, True, False, True, True, True, True)
    yield updates._launches(plan, True, False, True, True)
    adam = shoal.Adam(clip=shoal.Clip(norm=1.0))
    _rows, plan, lookups, updates = made(
        Table("a", 128, pooling="none", optimizer=adam), Table("b", 5, pooling="none", optimizer=shoal.Ftrl())
    )
    yield lookups._launches(plan, True, False, True, False, False, True)
    yield updates._launches(plan, True, True, False, False)
    tiers = [shoal.Hbm("1GiB"), shoal.Dram("4GiB")]
    rows, plan, lookups, _updates = made(
        Table("a", 128, optimizer=adam, tiers=tiers), Table("b", 5, dtype="bfloat16", init=normal, tiers=tiers)
    )
    yield lookups._launches(plan, True, True, True, False, False, True)
    yield lookups._launches(plan, False, False, True, False, False, True)
    yield lookups._launches(plan, False, False, False, False, False, False)
    yield [_located(rows), _restamped(rows)]
    # Rows of few words, many to a program.
    for dim in (1, 4, 16, 40):
        _rows, plan, lookups, _updates = made(Table("a", dim, tiers=tiers))
        yield lookups._launches(plan, True, True, True, False, False, True)


if __name__ == "__main__":
    from shoal.ops.launch import Launch

    seen = set()
    for launches in programs():
        for launch in launches:
            if isinstance(launch, Launch):
                key = (launch.kernel.__name__, str(launch.constants))
                if key not in seen:
                    seen.add(key)
                    compiled(launch)
    print(len(seen), "kernels")
