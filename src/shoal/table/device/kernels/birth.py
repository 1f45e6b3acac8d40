"""Slots and first rows for the keys that a batch inserts. Launch with enable_fp_fusion=False."""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import HOLE, NOT_WON, STAMP_BEHIND_SLOT, entry_keys
from shoal.index.kernels.insert import lost_keys
from shoal.ops.birth.triton import bear
from shoal.ops.library.tables import FAMILY, MOST_ROWS, NO_SLOT
from shoal.ops.library.tables import TABLE_COLUMNS as COLUMNS


@triton.jit
def take_room(tables, counts, refused, table, wants):
    """Which of the lanes have room in their table. The table's count grows by as many."""
    fits = table < 0
    rest = wants
    while tl.max(rest.to(tl.int32), axis=0) > 0:
        one = tl.min(tl.where(rest, table, 0x7FFFFFFF), axis=0)
        these = rest & (table == one)
        ones = these.to(tl.int32)
        many = tl.sum(ones, axis=0)
        before = tl.atomic_add(counts + one, many, sem="relaxed")
        most = tl.load(tables + one * COLUMNS + MOST_ROWS)
        inside = these & (before + tl.cumsum(ones, axis=0) <= most)
        lacking = many - tl.sum(inside.to(tl.int32), axis=0)
        if lacking > 0:
            tl.atomic_add(counts + one, -lacking, sem="relaxed")
            tl.atomic_add(refused + one, lacking, sem="relaxed")
        fits = fits | inside
        rest = rest & (these == 0)
    return fits


@triton.jit(do_not_specialize=["supply", "n", "family", "weight_stride", "tail_stride", "stamp"])
def birth(
    anchor, slabs, tables, inits, scales, first_state, normal, values, slots, lost, lost_of, lost_count, won_at,
    free, supply, taken, counts, refused, steps, n, family, weight_stride, tail_stride, stamp,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, HAS_NORMAL: tl.constexpr, SLAB_BITS: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Slots and first rows for the claimed entries of one family of tables; an entry without room is given up.

    `free[taken:supply]` are the family's free slots. Where not ROWS, others write the rows.
    """
    total = tl.load(lost_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        at = tl.load(won_at + lane, mask=lane < total, other=NOT_WON)
        live = at != NOT_WON
        item, _position, key, table, _inserts, base, _buckets = lost_keys(values, tables, lost, lost_of, lane, live, n)
        mine = live & (tl.load(tables + table * COLUMNS + FAMILY, mask=live, other=-1) == family)
        fits = take_room(tables, counts, refused, table, mine)
        ones = fits.to(tl.int32)
        place = tl.atomic_add(taken, tl.sum(ones, axis=0), sem="relaxed") + tl.cumsum(ones, axis=0) - 1
        has = fits & (place < supply)
        tl.atomic_add(counts + table, -1, mask=fits & (has == 0), sem="relaxed")
        tl.atomic_add(refused + table, 1, mask=fits & (has == 0), sem="relaxed")
        slot = tl.load(free + place, mask=has, other=HOLE)
        tl.store(slots + item, tl.where(has, slot, NO_SLOT), mask=mine)

        # An entry that is given up may have sent others on.
        tl.store(anchor + at, slot, mask=mine)
        tl.store(anchor + at + STAMP_BEHIND_SLOT, tl.zeros_like(slot) + stamp, mask=has)
        tl.store(entry_keys(anchor, at, base), key, mask=has)

        if ROWS:
            bear(
                anchor, slabs, inits, scales, first_state, normal, steps, table, key, slot, has, weight_stride,
                tail_stride, WEIGHTS, WEIGHT_BYTES, HAS_NORMAL, SLAB_BITS, DIM, D, STATE, S, BLOCK,
            )  # fmt: skip
        first += tl.num_programs(0) * BLOCK
