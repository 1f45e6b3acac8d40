"""What calls of a backward's programs bring, by name."""

from typing import NamedTuple

from shoal.ops.arguments import F32, I32, I64, Event, Floats, Host, Int, Ints, SomeF32, SomeI64


class UpdateSpace(NamedTuple):
    """Scratch memory of an update."""

    sorted: I32
    order: I64
    counts: I32  # rows of one item, pieces of others, and by family rows of several pieces
    dealt: I64
    dealt_shares: F32
    dealt_keys: I64
    pieces: I32
    piece_slots: I32
    piece_tickets: I64
    sums: F32
    sum_counts: F32
    long_rows: I32


class UpdateCall(NamedTuple):
    """What a call of an update brings to its program."""

    tickets: I64
    item_shares: SomeF32
    values: Ints
    grads: Floats
    moved: SomeI64
    scores: I64
    inverse_scale: F32
    skip: I32
    space: UpdateSpace
    total: Int
    n: Int
    deal_blocks: Int
    long_walkers: Int
    single_blocks: tuple[Int, ...]  # by family
    update_blocks: tuple[Int, ...]  # by family
    ledger_copy: Host
    ledger_event: Event


class ItemCall(NamedTuple):
    """A call of a kernel that looks at items one by one; what it does not take is any tensor."""

    slots: I32
    values: Ints
    offsets: Ints
    steps: I64
    out: Floats
    grads: Floats
    n: Int
    batch: Int
    blocks: Int
