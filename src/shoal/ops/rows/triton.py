"""Words of rows in device memory by slot, and first rows by key."""

import triton
import triton.language as tl

from shoal.ops.birth.triton import INIT_COLUMNS, first_row


@triton.jit
def move(
    anchor, slabs, slots, buffer, n, words, column, first_word, stride,
    READ: tl.constexpr, SLAB_BITS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Words [first_word, first_word + words) of the weights (column 0) or tails (1) of slots, to or from a buffer.

    Slots of -1 are left alone.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + lane, mask=lane < n, other=-1)
    has = slot >= 0
    slab = (slot >> SLAB_BITS).to(tl.int64)
    inside = (slot & ((1 << SLAB_BITS) - 1)).to(tl.int64)
    at = (tl.load(slabs + slab * 2 + column, mask=has, other=0) + inside * stride) * 4 + first_word
    word = tl.arange(0, W)
    mask = has[:, None] & (word < words)[None, :]
    there = anchor + at[:, None] + word[None, :]
    here = buffer + lane[:, None] * words + word[None, :]
    if READ:
        tl.store(here, tl.load(there, mask=mask, other=0), mask=mask)
    else:
        tl.store(there, tl.load(here, mask=mask, other=0), mask=mask)


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
