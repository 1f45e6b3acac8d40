"""Words of rows in device memory, by slot."""

import triton
import triton.language as tl


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
