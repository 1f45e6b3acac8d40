"""What the kernels of updates take."""

from typing import NamedTuple

from shoal.ops.arguments import F32, F64, I32, I64, Floats, Int, Ints, SomeF32, SomeI64


class Dealt(NamedTuple):
    """What `deal` makes of the sorted items, one for each: the ticket, the share of the bag's gradient, the key."""

    dealt: I64
    dealt_shares: F32
    dealt_keys: I64


class Listed(NamedTuple):
    """The pieces of rows: rows of one item from the front, others from the end. `piece_count`: how many of both."""

    pieces: I32
    piece_slots: I32
    piece_tickets: I64
    piece_count: I32


class Deal(NamedTuple):
    """Arguments of `deal`."""

    sorted_slots: I32
    order: I64
    tickets: I64
    parts: I64
    moved: SomeI64
    item_shares: SomeF32
    values: Ints
    dealt: Dealt
    steps: I64
    steps_now: I64
    trained: I64
    skip: I32
    skipped: I64
    listed: Listed
    total: Int
    n: Int
    tables: Int


class Applied(NamedTuple):
    """What an optimizer's step reads and counts, apart from the rows."""

    hyper: F64
    inits: I64
    steps: I64
    scores: I64
    counts: I32


class UpdateSingle(NamedTuple):
    """Arguments of `update_single`."""

    anchor: I32
    slabs: I64
    families: I32
    applied: Applied
    dealt_shares: F32
    dealt_keys: I64
    grads: Floats
    listed: Listed
    told: I32
    inverse_scale: F32
    skip: I32
    family: Int
    weight_stride: Int
    tail_stride: Int


class Long(NamedTuple):
    """The sums of pieces, how many items are in each, and the list of rows of several pieces."""

    sums: F32
    sum_counts: F32
    long_rows: I32
    long_count: I32


class Update(NamedTuple):
    """Arguments of `update`."""

    anchor: I32
    slabs: I64
    families: I32
    applied: Applied
    sorted_slots: I32
    dealt: Dealt
    grads: Floats
    listed: Listed
    long: Long
    inverse_scale: F32
    skip: I32
    total: Int
    family: Int
    weight_stride: Int
    tail_stride: Int


class UpdateLong(NamedTuple):
    """Arguments of `update_long`."""

    anchor: I32
    slabs: I64
    applied: Applied
    sorted_slots: I32
    dealt: I64
    dealt_keys: I64
    long: Long
    skip: I32
    total: Int
    weight_stride: Int
    tail_stride: Int


class Touch(NamedTuple):
    """Arguments of `touch`."""

    anchor: I32
    slabs: I64
    tables: I64
    tables_of: I32
    offsets: Ints
    slots: I32
    steps: I64
    n: Int
    batch: Int
    features: Int
    family: Int
    tail_stride: Int


class Aim(NamedTuple):
    """Arguments of `aim`."""

    slots: I32
    tables_of: I32
    offsets: Ints
    targets: I32
    n: Int
    batch: Int
    features: Int


class WeightGradients(NamedTuple):
    """Arguments of `weight_gradients`."""

    anchor: I32
    slabs: I64
    parts: I64
    inits: I64
    scales: F32
    normal: F32
    values: Ints
    offsets: Ints
    slots: I32
    grads: Floats
    out: F32
    n: Int
    batch: Int
    weight_stride: Int
    grad_stride: Int
