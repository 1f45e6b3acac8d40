"""What the kernels take that give birth to rows and move them between tiers: they need the index and the storage."""

from typing import NamedTuple

from shoal.index.arguments import Lost, Seated
from shoal.ops.arguments import F32, I32, I64, Int, Ints


class FirstRows(NamedTuple):
    """What first rows are made from."""

    inits: I64
    scales: F32
    first_state: F32
    normal: F32


class Birth(NamedTuple):
    """Arguments of `birth`."""

    anchor: I32
    slabs: I64
    tables: I64
    first_rows: FirstRows
    values: Ints
    slots: I32
    lost: Lost
    won_at: I64
    free: I32
    supply: Int
    taken: I32
    counts: I32
    refused: I32
    steps: I64
    n: Int
    family: Int
    weight_stride: Int
    tail_stride: Int
    stamp: Int


class Bear(NamedTuple):
    """Arguments of `bear`."""

    anchor: I32
    slabs: I64
    homes: I64
    tables: I64
    tiers: I64
    first_rows: FirstRows
    steps: I64
    values: Ints
    slots: I32
    lost: Lost
    won_at: I64
    n: Int
    family: Int
    weight_stride: Int
    tail_stride: Int


class StepAside(NamedTuple):
    """Arguments of `step_aside`."""

    anchor: I32
    slabs: I64
    homes: I64
    tables: I64
    tiers: I64
    seated: Seated
    family: Int


class Rehome(NamedTuple):
    """Arguments of `rehome`."""

    rows: StepAside
    pinned_from: Int


class Exchange(NamedTuple):
    """Arguments of `exchange`."""

    anchor: I32
    slabs: I64
    homes: I64
    tables: I64
    seated: Seated
    family: Int


class Flush(NamedTuple):
    """Arguments of `flush`."""

    anchor: I32
    slabs: I64
    homes: I64
    tables: I64
    tiers: I64
    numbers: I64
    asked_count: I32
    family: Int
