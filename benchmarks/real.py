"""The cases with batches like those of production: see ragged.py."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import ragged, roof
from benchmarks.check import TOLERANCE, Mismatch
from benchmarks.cpu import ALONE, HALF
from benchmarks.measure import OURS, Bench, Contender, QuietGate, Result
from benchmarks.ours import threads
from benchmarks.peers import FBGEMM
from benchmarks.peers.tables import FbgemmHalves, FbgemmTables, ShoalTables, TorchTables
from benchmarks.registry import Limit, Limits, Registry

registry = Registry()

LR = 0.05
EPS = 1e-12
BOUND = "rows read once"


@dataclass(frozen=True)
class Tables:
    """Holds ours and the peers with the same rows, compared with each other."""

    of: ragged.Tables
    ours: ShoalTables
    peers: Sequence[Any]


@dataclass(frozen=True)
class Work:
    """The batches of a case, as each contender takes them, and the gradients for its backward."""

    batches: list[ragged.Batch]
    inputs: dict[str, list[Any]]
    gradients: dict[str, list[Sequence[Tensor]]]


def _tables(bench: Bench, optimizer: str, pooled: bool) -> Tables:
    of = ragged.tables(2 * bench.effort.live_rows)
    settings = (of, optimizer, LR, EPS)
    ours, peers = ShoalTables(*settings, pooled), [TorchTables(*settings, pooled)]
    if FBGEMM.is_installed and optimizer != "adam":  # its CPU build has none
        peers.insert(0, FbgemmTables(*settings, pooled))
        if pooled:
            peers.insert(1, FbgemmHalves(*settings))
    for table in range(len(of.rows)):
        values = of.values(table)
        for one in (ours, *peers):
            one.load(table, values)
    tables = Tables(of, ours, peers)
    _check(tables, _work_of(tables, 1.2, 64, 1), optimizer)
    return tables


def _work_of(tables: Tables, exponent: float, size: int, count: int) -> Work:
    batches = ragged.batches(tables.of, exponent, size, count)
    inputs = {one.name: [one.inputs(batch) for batch in batches] for one in (tables.ours, *tables.peers)}
    gradients: dict[str, list[Sequence[Tensor]]] = {name: [] for name in inputs}
    for number, batch in enumerate(batches):
        if tables.ours.pooled:
            whole = ragged.gradient(tables.of, size)
            parts = [one.contiguous() for one in whole.split(tables.of.dims, dim=1)]
        else:
            generator = torch.Generator().manual_seed(number)
            counts = [batch.bounds[n + 1] - batch.bounds[n] for n in range(len(tables.of.rows))]
            shapes = zip(counts, tables.of.dims, strict=True)
            whole = None
            parts = [torch.randn(count, dim, generator=generator) for count, dim in shapes]
        for one in (tables.ours, *tables.peers):
            gradients[one.name].append(_gradients(one, whole, parts))
    return Work(batches, inputs, gradients)


def _gradients(one: Any, whole: Tensor | None, parts: list[Tensor]) -> Sequence[Tensor]:
    if isinstance(one, TorchTables) or (whole is None and isinstance(one, ShoalTables)):
        return parts
    if whole is None:
        return [torch.cat([parts[n] for n in group]) for group in one.groups]
    return one.gradients(whole) if isinstance(one, FbgemmHalves) else [whole]


def _check(tables: Tables, work: Work, optimizer: str) -> None:
    """Raises Mismatch unless a step from equal rows leaves equal rows. Changes the rows of all contenders."""
    for one in (tables.ours, *tables.peers):
        one.step(work.inputs[one.name][0], work.gradients[one.name][0])
    same = [one for one in tables.peers if optimizer != "rowwise_adagrad" or one.name != "torch"]
    for table in range(len(tables.of.rows)):
        ids = work.batches[0].of_table(table).unique()
        wanted = tables.ours.rows(table, ids)
        for one in same:
            try:
                torch.testing.assert_close(one.rows(table, ids), wanted, **TOLERANCE)
            except AssertionError as error:
                raise Mismatch(f"rows of table {table} after a step, {OURS} and {one.name}: {error}") from None


def _kept(bench: Bench, optimizer: str, pooled: bool, exponent: float, size: int) -> tuple[Tables, Work]:
    kind = f"{'pooled' if pooled else 'sequences'} with {optimizer}"
    tables = bench.keep(f"forty tables, {kind}", lambda: _tables(bench, optimizer, pooled))
    size, count = min(size, bench.effort.ragged_bags), bench.effort.ragged_batches
    name = f"batches of {size}, zipf {exponent}, {kind}"
    return tables, bench.keep(name, lambda: _work_of(tables, exponent, size, count))


def _bound(work: Work, of: ragged.Tables, count: int) -> float:
    """Returns the milliseconds of reading the rows of a batch in place, each row as often as its id comes."""
    batch, seconds = work.batches[0], 0.0
    for dim in sorted({*of.dims}):
        names, rows = [], 0
        for table in (n for n in range(len(of.rows)) if of.dims[n] == dim):
            distinct, number = batch.of_table(table).unique(return_inverse=True)
            names.append(number + rows)
            rows += len(distinct)
        all_names = torch.cat(names)
        if len(all_names):
            rate = roof.read_rate(rows, dim, all_names, count)
            seconds += len(all_names) * dim * 4 / rate
    return seconds * 1e3


def _contenders(bench: Bench, tables: Tables, work: Work, call: str, on: int) -> list[Contender]:
    """Returns the contenders of a step or an eval lookup, all on so many threads."""

    def contender(one: Any, name: str, count: int) -> Contender:
        inputs, gradients = work.inputs[one.name], work.gradients[one.name]

        @contextmanager
        def around() -> Iterator[None]:
            with threads(count):
                if call == "lookup" and one is tables.ours:
                    with tables.ours.evaluating():
                        yield
                else:
                    yield

        def step(i: int) -> None:
            one.step(inputs[i % len(inputs)], gradients[i % len(inputs)])

        return Contender(name, (lambda i: one.lookup(inputs[i % len(inputs)])) if call == "lookup" else step, 1, around)

    made = [contender(tables.ours, OURS, on)]
    if on == 1:
        return made + [contender(one, one.name, 1) for one in tables.peers if one.name == "fbgemm"]
    made.append(contender(tables.ours, ALONE, 1))
    return made + [contender(one, one.name, on) for one in tables.peers]


def _run(
    bench: Bench, call: str, optimizer: str, exponent: float, size: int, *, pooled: bool = True, on: int = 2
) -> Result:
    tables, work = _kept(bench, optimizer, pooled, exponent, size)
    result = bench.alternate(_contenders(bench, tables, work, call, on), warm_steps=bench.effort.ragged_batches)
    if not roof.PLAIN_C.is_installed:
        return result
    bound = _bound(work, tables.of, on)
    return replace(result, rounds={**result.rounds, BOUND: [bound] * len(result.rounds[OURS])})


def _step_limits(optimizer: str, **_: object) -> Limits:
    if optimizer == "adam":
        return {ALONE: HALF}
    return {ALONE: HALF, "fbgemm": Limit(0.65, aim=0.5), "fbgemm x 2": Limit(1.0)}


@registry.case(
    "real step, {optimizer}, batch {size}, zipf {exponent}",
    compares="a training step of forty tables with ragged bags; torch with Adagrad where the others have a rowwise one",
    limits=_step_limits,
    stage="real {optimizer}",
    optimizer=("rowwise_adagrad",),
    size=ragged.SIZES,
    exponent=ragged.EXPONENTS,
)
@registry.case(
    "real step, {optimizer}, batch {size}, zipf {exponent}",
    compares="the same with another optimizer",
    limits=_step_limits,
    stage="real {optimizer}",
    optimizer=("sgd", "adam"),
    size=ragged.SIZES,
    exponent=(1.2,),
)
def step(bench: Bench, optimizer: str, size: int, exponent: float) -> Result:
    return _run(bench, "step", optimizer, exponent, size)


@registry.case(
    "real step on one thread, batch {size}, zipf {exponent}",
    compares="the same, all on one thread",
    limits={"fbgemm": Limit(1.0)},
    stage="real rowwise_adagrad",
    size=ragged.SIZES,
    exponent=ragged.EXPONENTS,
)
def step_on_one_thread(bench: Bench, size: int, exponent: float) -> Result:
    return _run(bench, "step", "rowwise_adagrad", exponent, size, on=1)


@registry.case(
    "real eval, batch {size}, zipf {exponent}",
    compares="a pooled lookup of forty tables with ragged bags, without gradient",
    limits={"fbgemm": Limit(0.7, aim=0.6)},
    stage="real rowwise_adagrad",
    size=ragged.SIZES,
    exponent=ragged.EXPONENTS,
)
def lookup(bench: Bench, size: int, exponent: float) -> Result:
    return _run(bench, "lookup", "rowwise_adagrad", exponent, size)


@registry.case(
    "real eval on one thread, batch {size}, zipf {exponent}",
    compares="the same, all on one thread",
    limits={"fbgemm": Limit(1.25)},
    stage="real rowwise_adagrad",
    size=ragged.SIZES,
    exponent=ragged.EXPONENTS,
)
def lookup_on_one_thread(bench: Bench, size: int, exponent: float) -> Result:
    return _run(bench, "lookup", "rowwise_adagrad", exponent, size, on=1)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs so many other processes that compute without end."""
    spin = "while True: pass"
    started = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


@registry.case(
    "real eval beside {busy} busy processes, batch {size}, zipf 1.2",
    compares="the lookup while other processes want the cores",
    limits={"fbgemm": Limit(1.1)},
    stage="real rowwise_adagrad",
    busy=(2,),
    size=ragged.SIZES,
)
def lookup_beside_others(bench: Bench, busy: int, size: int) -> Result:
    crowded = Bench(bench.effort, QuietGate(most_foreign=float("inf")))
    crowded.say, crowded._kept = bench.say, bench._kept
    tables, work = _kept(bench, "rowwise_adagrad", True, 1.2, size)
    contenders = [one for one in _contenders(bench, tables, work, "lookup", 2) if one.name != "torch"]
    with busy_processes(busy):
        return crowded.alternate(contenders, warm_steps=bench.effort.ragged_batches)


@registry.case(
    "real sequences, {call}, batch {size}, zipf 1.2",
    compares="every id's row by itself; FBGEMM in one module a dim",
    limits=lambda call, **_: {"fbgemm": Limit(0.65 if call == "step" else 0.7)},
    stage="real sequences",
    call=("step", "lookup"),
    size=ragged.SIZES,
)
def sequences(bench: Bench, call: str, size: int) -> Result:
    return _run(bench, call, "rowwise_adagrad", 1.2, size, pooled=False)
