"""That every kernel compiles for a GPU: the interpreter takes what the compiler does not."""

import os
import subprocess
import sys

import pytest
import torch

import shoal
from shoal import Table

# The types of what each call of a program brings.
WIDE = (
    "values", "offsets", "won_at", "won_above", "home_at", "seated_at", "tickets", "starts", "moved", "scores", "dealt",
    "dealt_keys", "piece_tickets", "steps", "order",
)  # fmt: skip
FLOATS = ("weights", "out", "shares", "grads", "item_shares", "inverse_scale", "dealt_shares", "sums", "sum_counts")
NUMBERS = ("n", "batch", "total", "stamp", "pinned_from", "held_from")


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="the compiler does not run under sanitizers")
def test_every_kernel_compiles_for_a_gpu():
    settings = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, __file__], env=settings, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[0]) > 25, run.stdout


def type_of(name):
    if name in NUMBERS or name.startswith("supply"):
        return "i32"
    return "*i64" if name in WIDE else "*fp32" if name in FLOATS else "*i32"


def compiled(launch, names):
    """The kernel of a launch, for an H100 or H200. `names`: of the variables."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from shoal.ops.launch import Variable

    tensors = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64"}
    kernel, signature, aligned = launch.kernel, {}, {}
    for place, (name, argument) in enumerate(zip(kernel.arg_names, launch.arguments, strict=False)):
        if isinstance(argument, Variable):
            signature[name] = type_of(names[argument.place])
        else:
            signature[name] = "i32" if isinstance(argument, int) else tensors[argument.dtype]
        if signature[name].startswith("*") and not getattr(argument, "first", 0):
            aligned[place,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=dict(launch.constants), attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))


def _located(rows):
    """What follows an index below that was built anew."""
    from shoal.ops.launch import Launch
    from shoal.ops.move.triton import locate

    arguments = (rows.anchor, rows.above.index.tables, rows.index.tables, rows.storage.homes, 0)
    return Launch(locate, (1,), arguments, {"SLAB_BITS": 15, "BLOCK": 32}, {"num_warps": 1})


def _restamped(rows):
    """What lets stamps begin anew."""
    from shoal.ops.find.triton import restamp
    from shoal.ops.launch import Launch

    firsts = torch.ones(3, dtype=torch.int32)
    return Launch(restamp, (1,), (rows.anchor, 0, 4, firsts, 3), {"BLOCK": 1024}, {})


def programs():
    """The launches of lookups and updates of several kinds, and the names of their variables."""
    from shoal.table.device.lookup import Lookups
    from shoal.table.device.plan import DevicePlan
    from shoal.table.device.rows import DeviceRows
    from shoal.table.device.update import Settings, Updates

    def made(*tables):
        rows = DeviceRows(list(tables), 0, torch.device("cpu"))
        plan = DevicePlan(rows.configs, rows.families, [table.name for table in tables], rows.device, rows.tiered)
        hypers = [table.optimizer.hyper() for table in tables]
        return rows, plan, Lookups(rows), Updates(rows, Settings(rows, hypers))

    def names(v):
        return {variable.place: name for name, variable in vars(v).items()}

    normal = shoal.Normal(0, 1)
    _rows, plan, lookups, updates = made(Table("a", 64), Table("b", 33, init=normal, dtype="bfloat16"))
    yield lookups._launches(plan, True, False, True, True, True, True), names(lookups._v)
    yield updates._launches(plan, True, False, True, True), names(updates._v)
    adam = shoal.Adam(clip=shoal.Clip(norm=1.0))
    _rows, plan, lookups, updates = made(
        Table("a", 128, pooling="none", optimizer=adam), Table("b", 5, pooling="none", optimizer=shoal.Ftrl())
    )
    yield lookups._launches(plan, True, False, True, False, False, True), names(lookups._v)
    yield updates._launches(plan, True, True, False, False), names(updates._v)
    tiers = [shoal.Hbm("1GiB"), shoal.Dram("4GiB")]
    rows, plan, lookups, _updates = made(
        Table("a", 128, optimizer=adam, tiers=tiers), Table("b", 5, dtype="bfloat16", init=normal, tiers=tiers)
    )
    yield lookups._launches(plan, True, True, True, False, False, True), names(lookups._v)
    yield lookups._launches(plan, False, False, True, False, False, True), names(lookups._v)
    yield lookups._launches(plan, False, False, False, False, False, False), names(lookups._v)
    yield [_located(rows), _restamped(rows)], {}
    # Rows of few words, many to a program.
    for dim in (1, 4, 16, 40):
        _rows, plan, lookups, _updates = made(Table("a", dim, tiers=tiers))
        yield lookups._launches(plan, True, True, True, False, False, True), names(lookups._v)


if __name__ == "__main__":
    from shoal.ops.launch import Launch

    seen = set()
    for launches, names in programs():
        for launch in launches:
            if isinstance(launch, Launch):
                key = (launch.kernel.__name__, str(launch.constants))
                if key not in seen:
                    seen.add(key)
                    compiled(launch, names)
    print(len(seen), "kernels")
