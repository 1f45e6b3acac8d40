"""Births in device memory: the bits of docs/formats.md. Launch with enable_fp_fusion=False."""

import triton
import triton.language as tl

from shoal.ops.find.triton import FAMILY, HOLE, MOST_ROWS, NO_SLOT, NOT_WON, STAMP_BEHIND_SLOT
from shoal.ops.find.triton import TABLE_COLUMNS as COLUMNS
from shoal.ops.insert.triton import entry_keys, lost_keys

ZEROS = tl.constexpr(0)
CONSTANT = tl.constexpr(1)
UNIFORM = tl.constexpr(2)
NORMAL = tl.constexpr(3)
# Columns of a table's initialiser: kind, stream of births, stream of rounding.
INIT_COLUMNS = tl.constexpr(3)

# A row's tail: state, score (float64, at an even word) and flags (int32), where it fits between the two. A row that
# changed has (1), differs from its home below (2) and from what a storage below all memory has of it (8).
CHANGED = tl.constexpr(1 | 2 | 8)
ERASED = tl.constexpr(4)


@triton.jit
def philox(stream, key, element, word3):
    """The random word of each element: [n, 1] streams, keys and words, [1, d] elements."""
    k0 = (stream & 0xFFFFFFFF).to(tl.uint32)
    k1 = (stream >> 32).to(tl.uint32)
    wide = key.to(tl.uint64)
    zero = (element * 0).to(tl.uint32)
    c0 = (wide & 0xFFFFFFFF).to(tl.uint32) | zero
    c1 = (wide >> 32).to(tl.uint32) | zero
    c2 = (element // 4).to(tl.uint32) | (c0 & 0)
    c3 = word3.to(tl.uint32) | (c0 & 0)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = ((k0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    lane = element % 4
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def unit_normal(word, table, mask):
    tail = (word & 0x7FFFFFFF).to(tl.int32)
    # The exponent of a float64, which holds 31 bits exactly, is the position of the highest bit.
    exponent = (tl.maximum(tail, 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    octave = tl.maximum(exponent - 6, 0).to(tl.int32)
    knot = tl.where(tail < 64, tail, 64 * octave + (tail >> octave))
    rest = tl.where(tail < 64, 0, tail & ((tl.full(tail.shape, 1, tl.int32) << octave) - 1))
    along = rest.to(tl.float32) * ((127 - octave) << 23).to(tl.float32, bitcast=True)
    low = tl.load(table + knot, mask=mask, other=0.0)
    high = tl.load(table + knot + 1, mask=mask & (tail >= 64), other=0.0)
    z = tl.where(tail < 64, low, low + along * (high - low))
    return tl.where(word >> 31 == 1, -z, z)


@triton.jit
def first_row(kind, stream, scales, table, key, element, mask, normal, HAS_NORMAL: tl.constexpr):
    """What keys are born with: [n] kinds, streams, tables and keys, [d] elements, to [n, d] float32."""
    a = tl.load(scales + table * 2)[:, None]
    b = tl.load(scales + table * 2 + 1)[:, None]
    word = philox(stream[:, None], key[:, None], element[None, :], (key * 0)[:, None])
    drawn = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    if HAS_NORMAL:
        drawn = tl.where(kind[:, None] == NORMAL, unit_normal(word, normal, mask), drawn)
    row = a + drawn * b
    row = tl.where(kind[:, None] == CONSTANT, a, row)
    return tl.where(kind[:, None] == ZEROS, 0.0, row)


@triton.jit
def nearest(x, TYPE: tl.constexpr):
    """float32 to a type of weights or outputs, to the nearest, ties to even; NaN stays NaN."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def score_at(STATE: tl.constexpr):
    """The word of the tail where the score begins, behind so many floats of state."""
    return (STATE + 1) // 2 * 2


@triton.jit
def flags_at(STATE: tl.constexpr):
    """The word of the tail where the flags are."""
    return STATE if STATE % 2 == 1 else STATE + 2


@triton.jit
def weights_at(slabs, slot, has, stride, SLAB_BITS: tl.constexpr):
    """Where the weights of slots begin, in units of 16 bytes from the anchor; multiplied, it is seen to be aligned."""
    slab = (slot >> SLAB_BITS).to(tl.int64)
    inside = (slot & ((1 << SLAB_BITS) - 1)).to(tl.int64)
    return tl.load(slabs + slab * 2, mask=has, other=0) + inside * stride


@triton.jit
def tails_at(slabs, slot, has, stride, SLAB_BITS: tl.constexpr):
    """Where the tails of slots begin, in units of 16 bytes from the anchor."""
    slab = (slot >> SLAB_BITS).to(tl.int64)
    inside = (slot & ((1 << SLAB_BITS) - 1)).to(tl.int64)
    return tl.load(slabs + slab * 2 + 1, mask=has, other=0) + inside * stride


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


@triton.jit
def bear(
    anchor, slabs, inits, scales, first_state, normal, steps, table, key, slot, has, weight_stride, tail_stride,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, HAS_NORMAL: tl.constexpr, SLAB_BITS: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First rows of keys at their slots, where `has`: weights, state, score and flags."""
    element = tl.arange(0, D)
    word = tl.arange(0, S)
    kind = tl.load(inits + table * INIT_COLUMNS, mask=has, other=0)
    stream = tl.load(inits + table * INIT_COLUMNS + 1, mask=has, other=0).to(tl.uint64)
    wanted = has[:, None] & (element < DIM)[None, :]
    row = first_row(kind, stream, scales, table, key, element, wanted, normal, HAS_NORMAL)
    weights = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True)
    row_at = weights_at(slabs, slot, has, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
    tl.store(weights + row_at[:, None] + element[None, :], nearest(row, WEIGHTS), mask=wanted)

    tail_at = tails_at(slabs, slot, has, tail_stride, SLAB_BITS)
    floats = anchor.to(tl.pointer_type(tl.float32), bitcast=True)
    scores = anchor.to(tl.pointer_type(tl.float64), bitcast=True)
    step = tl.load(steps + table, mask=has, other=0).to(tl.float64)
    tl.store(scores + tail_at * 2 + score_at(STATE) // 2, step, mask=has)
    tl.store(anchor + tail_at * 4 + flags_at(STATE), CHANGED, mask=has)
    begins = tl.load(first_state + word, mask=word < STATE, other=0.0)
    tl.store(
        floats + (tail_at * 4)[:, None] + word[None, :],
        tl.broadcast_to(begins[None, :], (BLOCK, S)),
        mask=has[:, None] & (word < STATE)[None, :],
    )


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
