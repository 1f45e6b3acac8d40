"""The CPU cases. Two cores; tables of one million live rows; ours hashes int64 keys, the peers index an array."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from benchmarks import memory, work
from benchmarks.check import same_forward, same_rows, same_step
from benchmarks.effort import FULL
from benchmarks.measure import OURS, Bench, Contender, Result
from benchmarks.ours import OneTable, ShoalBags, threads
from benchmarks.peers import FBGEMM, PANDAS, Bags
from benchmarks.peers.fbgemm import FbgemmBags, FbgemmMap, FbgemmPair, FbgemmPrunedOp
from benchmarks.peers.pandas_index import PandasIndex
from benchmarks.peers.torch_bag import TorchBags
from benchmarks.registry import Limit, Limits, Registry
from benchmarks.roof import PLAIN_C, RoofBags, RoofMap
from shoal.index.host import HostIndex
from shoal.ops.hash_ids import hash_ids
from shoal.ops.hash_ids.reference import id_of

T = TypeVar("T")
registry = Registry()

DIMS = (64, 32, 128)
ALONE = "shoal, one thread"
HALF = Limit(0.6)  # of the time on one thread, for two
LR = 0.05
EPS = 1e-12  # small: torch's SparseAdam adds it before the bias correction, ours after


def other_dims(limits: Limits) -> Callable[..., Limits]:
    """Returns the limits for a dim: they are written for dim 64, and other dims get a tenth more."""
    return lambda dim, **_: {peer: limit if dim == 64 else limit.widened(1.1) for peer, limit in limits.items()}


def _step_limits(limits: Limits) -> Callable[..., Limits]:
    """Returns the limits of a step on two threads, also to one thread of ours and to two modules of FBGEMM."""
    widened = other_dims(limits)
    return lambda **values: {**widened(**values), ALONE: HALF, "fbgemm x 2": Limit(1.0)}


# -- Pooled lookups and training steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """Holds ours and the peers with the same rows, compared with each other, and the batches."""

    ours: ShoalBags
    peers: Sequence[Bags]
    batches: dict[str, list[work.Batch]]
    gradient: Tensor


def _field(bench: Bench, dim: int, optimizer: str) -> Field:
    rows = bench.effort.live_rows
    settings = (rows, dim, optimizer, LR, EPS)
    ours = ShoalBags(dim, optimizer, LR, EPS)
    peers: list[Any] = [TorchBags(*settings)]
    with_fbgemm = FBGEMM.is_installed and optimizer != "adam"  # its CPU build has none
    if with_fbgemm:
        peers.insert(0, FbgemmBags(*settings))
    for table in range(work.TABLES):
        values = work.rows(table, rows, dim)
        for bags in (ours, *peers):
            bags.load(table, values)
    if with_fbgemm:
        peers.insert(1, FbgemmPair(peers[0], *settings))
    bags, count = bench.effort.bags, bench.effort.batches
    batches = {name: work.batches(name, rows, bags, count) for name in work.DISTRIBUTIONS}
    gradient = work.gradient(dim, bags)
    same_forward(ours, peers, [of[0] for of in batches.values()])
    with ours.evaluating():
        same_forward(ours, peers, [of[1] for of in batches.values()])
    # The pair steps on a batch of its own, as it shares the single module's rows. Torch's Adagrad is another optimizer.
    single = {one.name: one for one in peers if optimizer != "rowwise_adagrad" or one.name != "torch"}
    pair = single.pop("fbgemm x 2", None)
    same_step(ours, list(single.values()), batches["uniform"][0], gradient)
    if pair is not None:
        same_step(ours, [pair], batches["uniform"][1], gradient)
    return Field(ours, peers, batches, gradient)


def _field_of(bench: Bench, dim: int, optimizer: str) -> Field:
    return bench.keep(f"tables of dim {dim} with {optimizer}", lambda: _field(bench, dim, optimizer))


def _keys_a_batch(bench: Bench) -> int:
    return work.TABLES * bench.effort.bags * work.BAG


def _over(batches: Sequence[T], step: Callable[[T], object]) -> Callable[[int], object]:
    """Returns a contender's step, which takes the batches in turn."""
    return lambda i: step(batches[i % len(batches)])


@registry.case(
    "eval forward, dim {dim}, {ids}",
    compares="pooled lookup without gradient",
    limits=other_dims({"fbgemm": Limit(0.95, aim=0.85), "torch": Limit(1.8)}),
    stage="rowwise_adagrad {dim}",
    dim=DIMS,
    ids=work.DISTRIBUTIONS,
)
def eval_forward(bench: Bench, dim: int, ids: str) -> Result:
    field = _field_of(bench, dim, "rowwise_adagrad")
    batches = field.batches[ids]
    contenders = [Contender(OURS, _over(batches, field.ours.lookup), around=field.ours.evaluating)]
    contenders += [Contender(peer.name, _over(batches, peer.lookup)) for peer in field.peers]
    if dim == 64 and PLAIN_C.is_installed:
        roof = bench.keep("plain C, dim 64", lambda: _roof(bench, dim))
        same_forward(roof, [_Hashed(roof)], batches[:1])
        contenders.append(Contender("plain C, known rows", _over(batches, roof.forward)))
        contenders.append(Contender("plain C, hash in front", _over(batches, roof.forward_hashed)))
    return bench.alternate(contenders)


class _Hashed:
    """Gives a check the roof's hashed forward as the forward of a peer."""

    name = "plain C, hash in front"

    def __init__(self, roof: RoofBags) -> None:
        self.forward = roof.forward_hashed


def _roof(bench: Bench, dim: int) -> RoofBags:
    rows = bench.effort.live_rows
    roof = RoofBags(rows, dim, bench.effort.bags)
    for table in range(work.TABLES):
        roof.load(table, work.rows(table, rows, dim))
    roof.add_hash([work.keys_of(torch.arange(rows), stream=table) for table in range(work.TABLES)])
    return roof


def _train(bench: Bench, dim: int, ids: str, optimizer: str) -> Result:
    field = _field_of(bench, dim, optimizer)
    contenders = [
        Contender(bags.name, _over(field.batches[ids], lambda batch, bags=bags: bags.step(batch, field.gradient)))
        for bags in (field.ours, *field.peers)
    ]
    contenders.insert(1, replace(contenders[0], name=ALONE, around=lambda: threads(1)))
    # Every row's optimizer state has its page: torch makes it when first touched.
    return bench.alternate(contenders, warm_steps=bench.effort.batches)


@registry.case(
    "train rowwise_adagrad, dim {dim}, {ids}",
    compares="forward, backward and update; torch with Adagrad, as it has no rowwise one",
    limits=_step_limits({"fbgemm": Limit(0.65, aim=0.5)}),
    stage="rowwise_adagrad {dim}",
    dim=DIMS,
    ids=work.DISTRIBUTIONS,
)
def train_rowwise_adagrad(bench: Bench, dim: int, ids: str) -> Result:
    return _train(bench, dim, ids, "rowwise_adagrad")


@registry.case(
    "train rowwise_adagrad on one thread, dim {dim}, {ids}",
    compares="the same, ours on one thread as FBGEMM is",
    limits=other_dims({"fbgemm": Limit(1.0)}),
    stage="rowwise_adagrad {dim}",
    dim=DIMS,
    ids=work.DISTRIBUTIONS,
)
def train_on_one_thread(bench: Bench, dim: int, ids: str) -> Result:
    field = _field_of(bench, dim, "rowwise_adagrad")
    batches = field.batches[ids]
    contenders = [
        Contender(bags.name, _over(batches, lambda batch, bags=bags: bags.step(batch, field.gradient)))
        for bags in (field.ours, *field.peers)
        if bags.name in (OURS, "fbgemm")
    ]
    contenders[0] = replace(contenders[0], around=lambda: threads(1))
    return bench.alternate(contenders)


@registry.case(
    "train sgd, dim {dim}, {ids}",
    compares="forward, backward and update",
    limits=_step_limits({"fbgemm": Limit(0.45, aim=0.35)}),
    stage="sgd {dim}",
    dim=DIMS,
    ids=work.DISTRIBUTIONS,
)
def train_sgd(bench: Bench, dim: int, ids: str) -> Result:
    return _train(bench, dim, ids, "sgd")


@registry.case(
    "train adam, dim {dim}, {ids}",
    compares="forward, backward and update; torch with SparseAdam",
    limits={"torch": Limit(0.2), ALONE: HALF},
    stage="adam {dim}",
    dim=(64,),
    ids=work.DISTRIBUTIONS,
)
def train_adam(bench: Bench, dim: int, ids: str) -> Result:
    return _train(bench, dim, ids, "adam")


# -- Births -----------------------------------------------------------------------------------------------------------

NEW_STEPS = 3  # a turn: each adds 164 k rows


@registry.case(
    "first step, every key new, {tables} tables",
    compares="a step that gives birth to every row it reads, and a step that finds them all",
    limits={"all keys known": Limit(3.0)},
    stage="births {tables}",
    tables=("empty", "full"),
)
def every_key_new(bench: Bench, tables: str) -> Result:
    """In empty tables each turn begins with a new collection; in full ones new keys come to the live rows."""
    dim, size = 64, bench.effort.bags
    gradient = work.gradient(dim, size)
    known: list[work.Batch] = []
    full: ShoalBags | None = None
    if tables == "full":
        full = ShoalBags(dim, "rowwise_adagrad", LR, EPS)
        for table in range(work.TABLES):
            full.load(table, work.rows(table, bench.effort.live_rows, dim))
        known = work.batches("uniform", bench.effort.live_rows, size, bench.effort.batches)
    fresh = iter(range(1 << 30))
    rounds: dict[str, list[float]] = {OURS: [], "all keys known": []}
    before = bench.gate.redone, bench.gate.disturbed

    def turn() -> tuple[float, float]:
        bags = full or ShoalBags(dim, "rowwise_adagrad", LR, EPS)
        count = NEW_STEPS if full else 1
        unseen = [work.new_keys(next(fresh), size) for _ in range(count)]
        again = known or unseen
        born, hit = [], []
        for batch in unseen:
            start = time.perf_counter()
            bags.step(batch, gradient)
            born.append(time.perf_counter() - start)
        while sum(hit) < bench.effort.turn_seconds:
            batch = again[len(hit) % len(again)]
            start = time.perf_counter()
            bags.step(batch, gradient)
            hit.append(time.perf_counter() - start)
        return sum(born) / len(born), sum(hit) / len(hit)

    turn()  # untimed: a process does some work only once
    for number in range(bench.effort.rounds):
        bench.say(f"round {number + 1} of {bench.effort.rounds}")
        born, hit = bench.gate.run(turn)
        rounds[OURS].append(born * 1e3)
        rounds["all keys known"].append(hit * 1e3)
    return Result("ms", rounds, redone=bench.gate.redone - before[0], disturbed=bench.gate.disturbed - before[1])


# -- Find -------------------------------------------------------------------------------------------------------------


@registry.case(
    "find, uniform hits, two threads",
    compares="the row of each of 164 k keys, among ten million",
    limits={FbgemmMap.name: Limit(1.4), RoofMap.name: Limit(0.7)},
)
def find(bench: Bench) -> Result:
    count, asked_keys = bench.effort.find_keys, _keys_a_batch(bench)
    ids = torch.arange(count)
    keys = work.keys_of(ids)
    natural = keys & (2**63 - 1)  # FBGEMM's op takes no negative keys
    small = (ids * 2654435761 % 2**31).int()  # and its map takes int32 only
    asked = [work.draw("uniform", count, (asked_keys,), seed) for seed in range(bench.effort.batches)]

    one_table = OneTable(count, dim=1)
    group, number = one_table.bags.table("t").place
    index: HostIndex = group.tables[number].index
    slots = index.find(keys)  # a table gives its keys slots in an order of its own
    if len(slots.unique()) != count or int(slots.min()) < 0:
        raise AssertionError("a key of the table has no slot of its own")
    queries = [keys[one] for one in asked]
    contenders = [Contender(OURS, _over(queries, index.find), asked_keys)]
    same_rows("shoal find", index.find(queries[0]), slots[asked[0]])

    for peer, own in ((FbgemmMap, small), (FbgemmPrunedOp, natural)) if FBGEMM.is_installed else ():
        made = peer(own)
        halves = [list(own[one].chunk(2)) for one in asked]
        same_rows(f"{peer.name} find", torch.cat(made.find(halves[0])), asked[0])
        contenders.append(Contender(peer.name, _over(halves, made.find), asked_keys))

    if PLAIN_C.is_installed:
        roof = RoofMap(keys)
        out = torch.empty(asked_keys, dtype=torch.int64)
        same_rows("plain C find", roof.find(queries[0], out), asked[0])
        contenders.append(Contender(roof.name, _over(queries, lambda some: roof.find(some, out)), asked_keys))

    if PANDAS.is_installed:
        pandas = PandasIndex(keys)
        same_rows("pandas find", pandas.find(queries[0]), asked[0])
        contenders.append(Contender(pandas.name, _over(queries, pandas.find), asked_keys))
    return bench.alternate(contenders, unit="M keys/s", scale=1e6, rate=True)


# -- Ids of strings ---------------------------------------------------------------------------------------------------


@registry.case(
    "ids of strings, two threads",
    compares="hash_ids of an Arrow column of strings of some 20 bytes; a list of the same strings; Python's own hash",
    limits={},
)
def ids_of_strings(bench: Bench) -> Result:
    texts = [f"user-{key}" for key in work.keys_of(torch.arange(bench.effort.live_rows)).tolist()]
    column = pa.array(texts)
    if hash_ids(column)[:1000].tolist() != [id_of(text) for text in texts[:1000]]:
        raise AssertionError("hash_ids and its reference differ")

    def by_python(_: int) -> object:
        return [hash(text.encode()) for text in texts]

    contenders = [
        Contender(OURS, lambda _: hash_ids(column), len(texts)),
        Contender("a list", lambda _: hash_ids(texts), len(texts)),
        Contender("Python's hash", by_python, len(texts)),
    ]
    return bench.alternate(contenders, unit="M strings/s", scale=1e6, rate=True)


# -- What grows with the rows -----------------------------------------------------------------------------------------

GROWN_LIMITS = {"a tenth of the rows": Limit(1.6)}


def _grown(bench: Bench) -> list[OneTable]:
    """The large table and the small one, both of dim 8."""
    small, large = bench.effort.growth_rows
    return bench.keep("two tables of dim 8", lambda: [OneTable(large), OneTable(small)])


def _queries(bench: Bench) -> list[list[Tensor]]:
    small, large = bench.effort.growth_rows
    shape = (_keys_a_batch(bench),)
    return [
        [work.keys_of(work.draw("uniform", rows, shape, seed)) for seed in range(bench.effort.batches)]
        for rows in (large, small)
    ]


@registry.case(
    "cost growth of find, dim 8",
    compares="time per key at 100M rows and at 10M",
    limits=GROWN_LIMITS,
    stage="growth",
)
def find_growth(bench: Bench) -> Result:
    tables = _grown(bench)
    contenders = []
    for name, one, queries in zip((OURS, *GROWN_LIMITS), tables, _queries(bench), strict=True):
        contains = one.bags.table("t").contains
        same_rows(f"keys of {name}", contains(queries[0]), torch.ones_like(queries[0], dtype=torch.bool))
        contenders.append(Contender(name, _over(queries, contains), len(queries[0])))
    return bench.alternate(contenders, unit="ns/key", scale=1e9)


@registry.case(
    "cost growth of a step, dim 8",
    compares="time per key at 100M rows and at 10M",
    limits=GROWN_LIMITS,
    stage="growth",
)
def step_growth(bench: Bench) -> Result:
    keys_a_batch = _keys_a_batch(bench)
    bags = keys_a_batch // work.BAG
    lengths = torch.full((bags,), work.BAG)
    gradient = torch.randn(bags, 8)
    return bench.alternate(
        [
            Contender(name, _over(queries, lambda keys, one=one: one.step(keys, lengths, gradient)), keys_a_batch)
            for name, one, queries in zip((OURS, *GROWN_LIMITS), _grown(bench), _queries(bench), strict=True)
        ],
        unit="ns/key",
        scale=1e9,
    )


# -- Memory -----------------------------------------------------------------------------------------------------------

MEMORY_DIMS = (8, 32, 64, 128)


def _memory(bench: Bench, dim: int) -> dict[str, Any]:
    sizes = bench.effort.memory
    asked = ["grow", "--dim", str(dim), "--rows", *map(str, sizes.rows), "--judged-from", str(sizes.judged_from)]
    return bench.keep(f"memory of dim {dim}", lambda: memory.probe(*asked))


@registry.case(
    "memory, dim {dim}, {rows:,} rows",
    compares="resident bytes a row, and 1.1 x row bytes + 40",
    limits={"allowed": Limit(1.0)},
    stage="memory {dim}",
    dim=MEMORY_DIMS,
    rows=FULL.memory.rows,
)
def bytes_per_row(bench: Bench, dim: int, rows: int) -> Result:
    taken = _memory(bench, dim)
    grown_to = bench.effort.memory.rows[FULL.memory.rows.index(rows)]
    allowed = 1.1 * taken["row_bytes"] + 40
    return Result("bytes/row", {OURS: [taken["bytes_per_row"][str(grown_to)]], "allowed": [allowed]})


@registry.case(
    "memory growth, dim {dim}",
    compares="the most that one step of 2048 new keys added, at its peak, to what the table took (from 100 k rows on)",
    limits={"allowed": Limit(1.0)},
    stage="memory {dim}",
    dim=MEMORY_DIMS,
)
def largest_jump(bench: Bench, dim: int) -> Result:
    return Result("%", {OURS: [100 * _memory(bench, dim)["largest_jump"]], "allowed": [12.5]})


@registry.case(
    "memory after erase of 75 % of the rows, dim 64",
    compares="resident bytes, and a quarter of what the full table took",
    limits={"alive": Limit(1.5)},
)
def after_erase(bench: Bench) -> Result:
    taken: dict[str, Any] = memory.probe("erase", "--dim", "64", "--rows", str(bench.effort.memory.erase_rows))
    mib = 1 << 20
    return Result(
        "MiB",
        {
            OURS: [taken["after_batches"] / mib],
            "alive": [taken["full"] / 4 / mib],
            "before any batch": [taken["at_once"] / mib],
            "before the erase": [taken["full"] / mib],
        },
    )
