"""First rows of keys: the bits of docs/formats.md. Launch with enable_fp_fusion=False."""

import triton
import triton.language as tl

from shoal.ops.library.random import philox
from shoal.ops.library.rows import CHANGED, flags_at, nearest, score_at, tails_at, weights_at

ZEROS = tl.constexpr(0)
CONSTANT = tl.constexpr(1)
UNIFORM = tl.constexpr(2)
NORMAL = tl.constexpr(3)
# Columns of a table's initialiser: kind, stream of births, stream of rounding.
INIT_COLUMNS = tl.constexpr(3)


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


@triton.jit
def first_rows(
    inits, scales, normal, table, keys, out, n, dim, HAS_NORMAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows that keys of one table are born with, float32."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    tables = table + lane * 0
    kind = tl.load(inits + tables * INIT_COLUMNS)
    stream = tl.load(inits + tables * INIT_COLUMNS + 1).to(tl.uint64)
    element = tl.arange(0, D)
    wanted = live[:, None] & (element < dim)[None, :]
    row = first_row(kind, stream, scales, tables, key, element, wanted, normal, HAS_NORMAL)
    tl.store(out + lane[:, None] * dim + element[None, :], row, mask=wanted)
