"""Rows in device memory, as kernels address them: where weights and tails are, flags, rounding."""

import triton
import triton.language as tl

# A row's tail: state, score (float64, at an even word) and flags (int32), where it fits between the two. A row that
# changed has (1), differs from its home below (2) and from what a storage below all memory has of it (8).
CHANGED = tl.constexpr(1 | 2 | 8)
ERASED = tl.constexpr(4)


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
