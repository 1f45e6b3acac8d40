"""The GPU cases. Time is the device's, between events around a run of steps, so a slow host makes it longer.

Work A is NVIDIA's public benchmark of dynamicemb: sequences, power law, all keys present. Work B is pooled sums. Ours
hashes int64 keys; FBGEMM indexes an array.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import shoal
from benchmarks.measure import OURS, Bench, Contender, Result
from benchmarks.registry import Limit, Registry
from shoal.index.arguments import Finding, FoundLists
from shoal.modules.lookup import Lookup, PooledLookup
from shoal.ops.arguments import variables
from shoal.ops.launch import Pieces, Program, Scratch
from shoal.ops.library.uses import use_of
from shoal.table import Batch as Keyed
from shoal.table import Each, Pooled, Request, Update, ops
from shoal.table.device.rows import DeviceRows, InsertCall

registry = Registry()
DEVICE = torch.device("cuda")
TABLES = 10
A_ROWS, A_KEYS, A_DIM = 1_677_721, 104_857, 128
B_ROWS, B_BATCH, B_BAG = 4_000_000, 8192, 20
WARMING = 5
BATCHES = 4
ALPHA = 1.05


def power_law(n: int, rows: int) -> Tensor:
    """Returns ids below `rows` with that power law; hot ids lie anywhere."""
    drawn = torch.rand(n, device=DEVICE, dtype=torch.float64)
    power = 1 - ALPHA
    ranks = (((rows**power - 1) * drawn + 1) ** (1 / power)).long() - 1
    return (ranks.clamp_(0, rows - 1) * 2654435761) % rows


def uniform(n: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (n,), device=DEVICE)


DRAWS: dict[str, Callable[[int, int], Tensor]] = {"uniform": uniform, "zipf": power_law}


def timed(bench: Bench, contenders: Sequence[Contender], steps: int = 20) -> Result:
    """Measures rounds in which every contender takes a turn of `steps` steps. Returns milliseconds a step."""
    rounds: dict[str, list[float]] = {one.name: [] for one in contenders}
    position = {one.name: 0 for one in contenders}

    def turn(one: Contender, count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            one.step(position[one.name])
            position[one.name] += 1
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    for one in contenders:
        bench.say(f"warming {one.name}")
        turn(one, WARMING)
    for number in range(bench.effort.rounds):
        shift = number % len(contenders)
        for one in [*contenders[shift:], *contenders[:shift]]:
            bench.say(f"round {number + 1} of {bench.effort.rounds}: {one.name}")
            rounds[one.name].append(turn(one, steps) / one.work)
    return Result("ms", rounds)


def host_time(step: Callable[[int], object], steps: int = 10) -> float:
    """Returns the milliseconds that the host takes for a step while the device still works on earlier ones."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(steps):
        step(number)
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / steps * 1e3


# -- Ours and FBGEMM in the same verbs --------------------------------------------------------------------------------


class Rows(torch.autograd.Function):
    """Calls the op of sequences, with its one flat output; a module cuts the output into features."""

    @staticmethod
    def forward(ctx, anchor, token, update_token, lookup, values, offsets, dim):
        keyed = Keyed(lookup.names, values, offsets, counts=lookup.counts)
        out, lease = ops.lookup(
            lookup.group, token, Request(keyed, Each(values.numel() * dim), lookup.dtype, True, True)
        )
        ctx.save_for_backward(lease, values, offsets)
        ctx.group, ctx.token = lookup.group, update_token
        return out

    @staticmethod
    def backward(ctx, grad):
        lease, values, offsets = ctx.saved_tensors
        ops.update(ctx.group, ctx.token, Update(lease, values, offsets, None, [grad], False))
        return (None,) * 7


class Ours:
    """Runs a collection by its group's op with autograd, and as a module."""

    def __init__(
        self, tables: int, rows: int, dim: int, optimizer: Any, pooling: str, tiers: Sequence[Any] | None = None
    ) -> None:
        self.names = [f"t{n}" for n in range(tables)]
        configs = [shoal.Table(name, dim, pooling=pooling, optimizer=optimizer, tiers=tiers) for name in self.names]
        kind: Any = shoal.EmbeddingCollection if pooling == "none" else shoal.EmbeddingBagCollection
        self.bags = kind(configs, device="cuda")
        self.dim, self.pooled = dim, pooling != "none"
        group = self.bags._group
        for number in range(tables):
            for keys in torch.arange(rows, device=DEVICE).split(1 << 20):
                group._rows.upsert(number, keys)

    def forward(self, batch: "Batch") -> Any:
        lookup = Lookup(self.bags._group.name, self.names, self.bags.training, torch.float32, list(batch.counts))
        tokens = (self.bags._anchor, self.bags._token, self.bags._update_token)
        if self.pooled:
            columns = len(self.names) * self.dim
            return [PooledLookup.apply(*tokens, lookup, batch.values, batch.offsets, batch.weights, columns)]
        return [Rows.apply(*tokens, lookup, batch.values, batch.offsets, self.dim)]

    def step(self, batch: "Batch") -> None:
        torch.autograd.backward(self.forward(batch), [batch.whole if self.pooled else batch.whole.view(-1)])

    def module_step(self, batch: "Batch") -> None:
        features = shoal.KeyedJaggedTensor(
            self.names, batch.values, batch.weights, lengths=batch.lengths, offsets=batch.offsets
        )
        features._length_per_key = list(batch.counts)
        out = self.bags(features)
        outs = [out.values()] if self.pooled else [one.values() for one in out.values()]
        torch.autograd.backward(outs, batch.grads)

    def eval(self, batch: "Batch") -> None:
        self.bags.eval()
        with torch.no_grad():
            keyed = Keyed(self.names, batch.values, batch.offsets, batch.weights)
            output: Any = Pooled(len(self.names) * self.dim)
            if not self.pooled:
                keyed = Keyed(self.names, batch.values, batch.offsets, None, batch.counts)
                output = Each(batch.values.numel() * self.dim)
            request = Request(keyed, output, torch.float32, training=False, keep=False)
            ops.lookup(self.bags._group.name, self.bags._token, request)
        self.bags.train()


class Fbgemm:
    """Runs static tables of FBGEMM, which by default checks ids against the tables' bounds."""

    def __init__(self, tables: int, rows: int, dim: int, optimizer: str, pooling: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.checked, self.unchecked = BoundsCheckMode.WARNING, BoundsCheckMode.NONE
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * tables,
            optimizer=getattr(EmbOptimType, optimizer),
            learning_rate=0.01,
            pooling_mode=PoolingMode.NONE if pooling == "none" else PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.WARNING,
        )

    def step(self, batch: "Batch") -> None:
        self.module(batch.values, batch.offsets, batch.weights).backward(batch.whole)

    def unchecked_step(self, batch: "Batch") -> None:
        self.module.bounds_check_mode_int = self.unchecked.value
        self.step(batch)
        self.module.bounds_check_mode_int = self.checked.value

    def unchecked_eval(self, batch: "Batch") -> None:
        self.module.bounds_check_mode_int = self.unchecked.value
        self.eval(batch)
        self.module.bounds_check_mode_int = self.checked.value

    def eval(self, batch: "Batch") -> None:
        with torch.no_grad():
            self.module(batch.values, batch.offsets, batch.weights)


@dataclass(frozen=True)
class Batch:
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    counts: tuple[int, ...]
    whole: Tensor  # the gradient as FBGEMM takes it
    grads: list[Tensor]  # as ours
    weights: Tensor | None = None


def sequence_batches(tables: int, rows: int, keys: int, dim: int) -> list[Batch]:
    gradient = torch.randn(tables * keys, dim, device=DEVICE)
    offsets = torch.arange(tables * keys + 1, device=DEVICE)
    lengths = torch.ones(tables * keys, dtype=torch.int64, device=DEVICE)
    return [
        Batch(
            torch.cat([power_law(keys, rows) for _ in range(tables)]),
            lengths,
            offsets,
            (keys,) * tables,
            gradient,
            list(gradient.split(keys)),
        )
        for _ in range(BATCHES)
    ]


def pooled_batches(draw: str, dim: int) -> list[Batch]:
    gradient = torch.randn(B_BATCH, TABLES * dim, device=DEVICE)
    offsets = torch.arange(0, TABLES * B_BATCH * B_BAG + 1, B_BAG, device=DEVICE)
    lengths = torch.full((TABLES * B_BATCH,), B_BAG, device=DEVICE)
    counts = (B_BATCH * B_BAG,) * TABLES
    return [
        Batch(
            torch.cat([DRAWS[draw](B_BATCH * B_BAG, B_ROWS) for _ in range(TABLES)]),
            lengths,
            offsets,
            counts,
            gradient,
            [gradient],
        )
        for _ in range(BATCHES)
    ]


def weighted(batch: Batch) -> Batch:
    """Returns the batch with a weight for each key; the weights require a gradient."""
    return replace(batch, weights=torch.rand(len(batch.values), device=DEVICE, requires_grad=True))


def contender(name: str, step: Callable[[Batch], None], batches: Sequence[Batch]) -> Contender:
    return Contender(name, lambda number: step(batches[number % len(batches)]))


def train(bench: Bench, ours: Ours, peer: Fbgemm, batches: Sequence[Batch]) -> Result:
    """Measures training steps of all contenders, and the host's time for ours."""
    result = timed(
        bench,
        [
            contender(OURS, ours.step, batches),
            contender("fbgemm", peer.step, batches),
            contender("fbgemm unchecked", peer.unchecked_step, batches),
            contender("shoal module", ours.module_step, batches),
        ],
    )
    host = [host_time(lambda n: ours.step(batches[n % BATCHES])) for _ in range(bench.effort.rounds)]
    return Result(result.unit, {**result.rounds, "shoal host": host})


def evaluate(bench: Bench, ours: Ours, peer: Fbgemm, batches: Sequence[Batch]) -> Result:
    """Measures lookups of all contenders."""
    return timed(
        bench,
        [
            contender(OURS, ours.eval, batches),
            contender("fbgemm", peer.eval, batches),
            contender("fbgemm unchecked", peer.unchecked_eval, batches),
        ],
    )


# -- Work A -----------------------------------------------------------------------------------------------------------

OPTIMIZERS = {"adam": (shoal.Adam(lr=0.01), "ADAM"), "sgd": (shoal.SGD(lr=0.01), "EXACT_SGD")}
A_LIMITS = {"adam": Limit(0.7, aim=0.55), "sgd": Limit(0.75, aim=0.6)}


def _a(bench: Bench, optimizer: str) -> tuple[Ours, Fbgemm, list[Batch]]:
    ours, theirs = OPTIMIZERS[optimizer]
    return bench.keep(
        f"A {optimizer}",
        lambda: (
            Ours(TABLES, A_ROWS, A_DIM, ours, "none"),
            Fbgemm(TABLES, A_ROWS, A_DIM, theirs, "none"),
            sequence_batches(TABLES, A_ROWS, A_KEYS, A_DIM),
        ),
    )


@registry.case(
    "A train {optimizer}",
    compares="a training step of sequences: the group op with autograd, and the module around it, to FBGEMM's tables",
    limits=lambda optimizer: {"fbgemm": A_LIMITS[optimizer]},
    stage="A {optimizer}",
    optimizer=("adam", "sgd"),
)
def a_train(bench: Bench, optimizer: str) -> Result:
    return train(bench, *_a(bench, optimizer))


@registry.case(
    "A eval",
    compares="a lookup of sequences to FBGEMM's",
    limits={"fbgemm": Limit(0.55, aim=0.4)},
    stage="A sgd",
)
def a_eval(bench: Bench) -> Result:
    return evaluate(bench, *_a(bench, "sgd"))


@registry.case(
    "A train adam, 10 % of the keys new",
    compares="a training step that brings new keys to one that does not",
    limits={"all keys present": Limit(1.3)},
    stage="A adam",
)
def a_births(bench: Bench) -> Result:
    ours, _peer, batches = _a(bench, "adam")
    steps = 5
    with_new = []
    for number in range(WARMING + steps * bench.effort.rounds):
        values = batches[number % BATCHES].values.clone()
        first = A_ROWS + number * A_KEYS
        values[::10] = torch.arange(first, first + len(values[::10]), device=DEVICE)
        with_new.append(replace(batches[number % BATCHES], values=values))
    rows = ours.bags._group._rows
    rows.make_room(rows.room.births([len(with_new) * A_KEYS // 10 + TABLES] * TABLES))
    contenders = [
        Contender(OURS, lambda number: ours.step(with_new[number])),
        contender("all keys present", ours.step, batches),
    ]
    return timed(bench, contenders, steps=steps)


MANY, MANY_ROWS = 1000, A_ROWS * TABLES // 1000 + 1


def spread(batch: Batch) -> Batch:
    """Puts the same rows into MANY tables: the keys of each table go to a hundred others, by their last two digits."""
    share = MANY // TABLES
    table = torch.arange(TABLES, device=DEVICE).repeat_interleave(A_KEYS) * share + batch.values % share
    order = torch.argsort(table, stable=True)
    lengths = torch.bincount(table, minlength=MANY)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    counts = tuple(lengths.tolist())
    return Batch((batch.values // share)[order], lengths, offsets, counts, batch.whole, list(batch.whole.split(counts)))


@registry.case(
    "A train adam, 1,000 tables, {keys}",
    compares="the work in a thousand tables to ten: the same rows; or as many keys drawn anew, which are more rows",
    limits={"10 tables": Limit(1.2)},
    stage="A adam",
    keys=("the same rows", "keys of its own"),
)
def a_many_tables(bench: Bench, keys: str) -> Result:
    ten, _peer, batches = _a(bench, "adam")
    many = bench.keep("A adam, 1,000 tables", lambda: Ours(MANY, MANY_ROWS, A_DIM, OPTIMIZERS["adam"][0], "none"))
    if keys == "the same rows":
        others = [spread(batch) for batch in batches]
    else:
        others = sequence_batches(MANY, MANY_ROWS, A_KEYS * TABLES // MANY, A_DIM)
    return timed(bench, [contender(OURS, many.step, others), contender("10 tables", ten.step, batches)])


# -- Work B -----------------------------------------------------------------------------------------------------------


def _b(bench: Bench, dim: int) -> tuple[Ours, Fbgemm]:
    return bench.keep(
        f"B {dim}",
        lambda: (
            Ours(TABLES, B_ROWS, dim, shoal.RowwiseAdagrad(lr=0.01), "sum"),
            Fbgemm(TABLES, B_ROWS, dim, "EXACT_ROWWISE_ADAGRAD", "sum"),
        ),
    )


@registry.case(
    "B train rowwise_adagrad, dim {dim}, {draw}",
    compares="a training step of pooled sums to FBGEMM's",
    limits=lambda dim, draw: {"fbgemm": Limit(0.8 if (dim, draw) == (64, "uniform") else 0.9)},
    stage="B {dim}",
    dim=(64, 32, 128),
    draw=("uniform", "zipf"),
)
def b_train(bench: Bench, dim: int, draw: str) -> Result:
    return train(bench, *_b(bench, dim), pooled_batches(draw, dim))


@registry.case(
    "B eval, dim {dim}, {draw}",
    compares="a lookup of pooled sums to FBGEMM's",
    limits=lambda dim, draw: {"fbgemm": Limit(1.9, aim=1.5)} if (dim, draw) == (64, "uniform") else {},
    stage="B {dim}",
    dim=(64,),
    draw=("uniform", "zipf"),
)
def b_eval(bench: Bench, dim: int, draw: str) -> Result:
    return evaluate(bench, *_b(bench, dim), pooled_batches(draw, dim))


@registry.case(
    "B train rowwise_adagrad, dim {dim}, {draw}, weights",
    compares="a training step of weighted sums, with the weights' gradient, to FBGEMM's",
    limits={"fbgemm": Limit(1.0)},
    stage="B {dim}",
    dim=(64,),
    draw=("uniform", "zipf"),
)
def b_weighted_train(bench: Bench, dim: int, draw: str) -> Result:
    return train(bench, *_b(bench, dim), [weighted(batch) for batch in pooled_batches(draw, dim)])


@registry.case(
    "B eval, dim {dim}, {draw}, weights",
    compares="a lookup of weighted sums to FBGEMM's",
    limits={"fbgemm": Limit(1.0)},
    stage="B {dim}",
    dim=(64,),
    draw=("uniform", "zipf"),
)
def b_weighted_eval(bench: Bench, dim: int, draw: str) -> Result:
    return evaluate(bench, *_b(bench, dim), [weighted(batch) for batch in pooled_batches(draw, dim)])


HOT = 100_000


@registry.case(
    "B train rowwise_adagrad, dim 64, one key {times} times",
    compares="a training step in which a table's first keys are one to one of uniform keys",
    limits={"uniform": Limit(1.2)},
    stage="B 64",
    times=(HOT,),
)
def b_hot(bench: Bench, times: int) -> Result:
    ours, _peer = _b(bench, 64)
    batches = pooled_batches("uniform", 64)
    hot = []
    for batch in batches:
        values = batch.values.clone()
        values[:times] = 7
        hot.append(replace(batch, values=values))
    return timed(bench, [contender(OURS, ours.step, hot), contender("uniform", ours.step, batches)])


# -- The index --------------------------------------------------------------------------------------------------------

SLOTS, FULL, FOUND_KEYS, NEW_KEYS = 64_000_000, 0.8, 1_600_000, 1_000_000


def _one_table(keys: int) -> DeviceRows:
    """Returns an index of SLOTS entries over rows of one float, with so many keys in it."""
    rows = DeviceRows([shoal.Table("t", 1, optimizer=shoal.SGD())], 0, DEVICE)
    rows.index.reserve({0: int(SLOTS * FULL)})
    rows.storage.grow(0, int(SLOTS * FULL))
    for some in torch.arange(keys, device=DEVICE).split(1 << 22):
        rows.insert(0, some)
    return rows


def _finding(rows: DeviceRows, insert: bool) -> Callable[[Tensor], None]:
    """Returns a call of the index, for keys of the only table. No row is written."""
    v = variables(InsertCall, 1)
    tables_of = torch.tensor([[use_of(0, trains=True)]], dtype=torch.int32, device=DEVICE)
    program = Program(rows.find(v.free, Finding(v.batch, v.lists), tables_of, (1, 1), insert, rows=False))
    scratch = Scratch(torch.device(DEVICE))
    offsets: dict[int, Tensor] = {}

    def find(keys: Tensor) -> None:
        n = len(keys)
        if n not in offsets:
            offsets[n] = torch.tensor([0, n], device=DEVICE)
        slots = torch.empty(n, dtype=torch.int32, device=DEVICE)
        lists = scratch.take(Pieces(rows.found_lengths(n, insert))).as_(FoundLists)
        program.run(InsertCall(rows.free_slots(), rows.batch(keys, offsets[n], slots, 1, 1), lists, tables_of))

    return find


def _rate(result: Result, keys: int, least: float) -> Result:
    rates = [keys / (ms * 1e6) for ms in result.rounds[OURS]]
    return Result("G keys/s", {OURS: rates, "least": [least] * len(rates)}, higher_is_better=True)


@registry.case(
    "find alone, 64M slots at a load of 0.8",
    compares="keys found a second",
    limits={"least": Limit(1.0)},
    stage="index",
)
def find_alone(bench: Bench) -> Result:
    rows = bench.keep("index", lambda: _one_table(int(SLOTS * FULL)))
    batches = [uniform(FOUND_KEYS, int(SLOTS * FULL)) for _ in range(BATCHES)]
    find = _finding(rows, insert=False)
    found = timed(bench, [Contender(OURS, lambda n: find(batches[n % BATCHES]))], steps=50)
    return _rate(found, FOUND_KEYS, 12.0)


def _inserting(bench: Bench, find: Callable[[Tensor], None], batches: Iterator[Tensor], least: float) -> Result:
    """Measures finds of new keys, whose batches are made before the clock runs."""
    steps = 3
    made = list(itertools.islice(batches, WARMING + steps * bench.effort.rounds))
    result = timed(bench, [Contender(OURS, lambda number: find(made[number]))], steps=steps)
    return _rate(result, NEW_KEYS, least)


@registry.case(
    "find or insert, half of 1M keys new",
    compares="keys a second of the index, without rows, at a load of 0.5 and more",
    limits={"least": Limit(1.0)},
    stage="half an index",
)
def find_or_insert(bench: Bench) -> Result:
    known, half = SLOTS // 2, NEW_KEYS // 2
    rows = bench.keep("half an index", lambda: _one_table(known))
    old = torch.randperm(known, device=DEVICE)[:half]
    batches = (torch.cat([torch.arange(half, device=DEVICE) + known + n * half, old]) for n in itertools.count())
    return _inserting(bench, _finding(rows, insert=True), batches, 3.0)
