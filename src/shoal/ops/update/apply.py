"""One step of an optimizer on rows in device memory: limits, the step itself, rounding, score and flags."""

import triton
import triton.language as tl

from shoal.ops.birth.triton import INIT_COLUMNS
from shoal.ops.library.random import mix64, philox
from shoal.ops.library.rows import CHANGED, ERASED, flags_at, score_at, tails_at, weights_at

# Columns of a table's settings (float64); the optimizer's own follow.
HYPER_COLUMNS = tl.constexpr(16)
LR = tl.constexpr(0)
WEIGHT_DECAY = tl.constexpr(1)
SHRINK = tl.constexpr(2)
CLIP_VALUE = tl.constexpr(3)
CLIP_NORM = tl.constexpr(4)
MAX_NORM = tl.constexpr(5)
SETTINGS = tl.constexpr(6)
# Columns of what an update counts, by table.
COUNT_COLUMNS = tl.constexpr(2)
DROPPED = tl.constexpr(0)
OVERFLOWED = tl.constexpr(1)
# The largest sum of squares of a row's gradient: beyond it, optimizers would keep infinity.
MOST_SQUARES = tl.constexpr(1e30)


@triton.jit
def factor_to(norm, row):
    """The factor that brings each row down to an L2 norm; 1 where it is not above it. Its squares may overflow."""
    largest = tl.max(tl.abs(row), axis=1)
    safe = tl.where(largest > 0.0, largest, 1.0)
    scaled = row / safe[:, None]
    length = tl.sqrt(tl.sum(scaled * scaled, axis=1))
    above = safe * length > norm  # it may be infinite: the factor is not made from it
    return tl.where(above, norm / safe / tl.where(above, length, 1.0), 1.0)


@triton.jit
def stochastic_bf16(x, word):
    bits = x.to(tl.uint32, bitcast=True)
    truncated = bits & 0xFFFF0000
    raised = (bits + (word & 0xFFFF)) & 0xFFFF0000
    kept = tl.where((raised & 0x7F800000) == 0x7F800000, truncated, raised)
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def stochastic_f16(x, word):
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 16) & 0x8000
    body = bits & 0x7FFFFFFF
    scaled = body.to(tl.float32, bitcast=True) * 16777216.0
    tiny = body < 0x38800000
    whole = tl.where(tiny, scaled, 0.0).to(tl.int32)
    up = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 < scaled - whole.to(tl.float32)
    small = whole.to(tl.uint32) + up.to(tl.uint32)
    raised = tl.minimum((body + (word & 0x1FFF)) >> 13, 0x477FE000 >> 13)
    made = tl.where(tiny, small, raised - (112 << 10))
    rounded = (sign | made).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where(body >= 0x7F800000, x.to(tl.float16), rounded)


@triton.jit
def load_rows(
    anchor, slabs, slot, do, weight_stride, tail_stride,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """What `apply_rows` wants of rows [g]: (where weights and tails are, weights [g, d], flags, scores)."""
    element = tl.arange(0, D)
    tail_at = tails_at(slabs, slot, do, tail_stride, SLAB_BITS)
    row_at = weights_at(slabs, slot, do, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
    weights = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True) + row_at[:, None] + element[None, :]
    scored = anchor.to(tl.pointer_type(tl.float64), bitcast=True) + tail_at * 2 + score_at(STATE) // 2
    w = tl.load(weights, mask=do[:, None] & (element < DIM)[None, :], other=0.0).to(tl.float32)
    flags = tl.load(anchor + tail_at * 4 + flags_at(STATE), mask=do, other=0)
    return row_at, tail_at, w, flags, tl.load(scored, mask=do, other=0.0)


@triton.jit
def apply_rows(
    anchor, hyper, inits, steps, scores, counts, row_at, tail_at, w, flags, scored, table, key, gradient, do,
    STEP: tl.constexpr, PLAIN: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """One optimizer step on each row that was loaded, where `do`: [g] tables and keys, [g, d] gradients.

    PLAIN: no table of the family clips, decays or bounds its rows.
    """
    element = tl.arange(0, D)
    inside = (element < DIM)[None, :]
    weights = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True) + row_at[:, None] + element[None, :]
    settings = hyper + table * HYPER_COLUMNS
    erased = do & ((flags & ERASED) != 0)
    going = do & (erased == 0)
    finite = tl.abs(gradient) < float("inf")  # x - x would be fused with the product that made x, and not be zero
    if PLAIN == 0:
        finite = tl.where(do[:, None] & inside, finite, True)
        top = tl.load(settings + CLIP_VALUE, mask=do, other=0.0).to(tl.float32)[:, None]
        gradient = tl.where(top > 0.0, tl.minimum(tl.maximum(gradient, -top), top), gradient)
        norm = tl.load(settings + CLIP_NORM, mask=do, other=0.0).to(tl.float32)
        factor = tl.where(norm > 0.0, factor_to(norm, gradient), 1.0)[:, None]
        gradient = tl.where(factor < 1.0, gradient * factor, gradient)
        decay = tl.load(settings + WEIGHT_DECAY, mask=do, other=0.0).to(tl.float32)[:, None]
        gradient = tl.where(decay > 0.0, gradient + decay * w, gradient)
        # A limit would make a number of what is none.
        bad = tl.max(tl.where(finite, 0, 1), axis=1) > 0
        squares = tl.where(bad, float("inf"), tl.sum(gradient * gradient, axis=1))
    else:
        squares = tl.sum(gradient * gradient, axis=1)
    fits = squares <= MOST_SQUARES
    overflowed = going & (fits == 0)
    going = going & fits
    tl.atomic_add(counts + table * COUNT_COLUMNS + DROPPED, 1, mask=erased, sem="relaxed")
    tl.atomic_add(counts + table * COUNT_COLUMNS + OVERFLOWED, 1, mask=overflowed, sem="relaxed")
    step = tl.load(steps + table, mask=do, other=0)
    if PLAIN == 0:
        w = w * tl.load(settings + SHRINK, mask=do, other=1.0).to(tl.float32)[:, None]
    state = anchor.to(tl.pointer_type(tl.float32), bitcast=True) + tail_at * 4
    w = STEP(w, gradient, squares, state, settings, settings + SETTINGS, step + 1, element, inside, going, DIM)
    if PLAIN == 0:
        bound = tl.load(settings + MAX_NORM, mask=do, other=0.0).to(tl.float32)
        shorter = tl.where(bound > 0.0, factor_to(bound, w), 1.0)[:, None]
        w = tl.where(shorter < 1.0, w * shorter, w)
    if WEIGHT_BYTES == 2:
        stream = tl.load(inits + table * INIT_COLUMNS + 2, mask=do, other=0).to(tl.uint64) ^ mix64(step >> 32)
        word = philox(stream[:, None], key[:, None], element[None, :], (step & 0xFFFFFFFF)[:, None])
        if tl.bfloat16 == WEIGHTS:
            tl.store(weights, stochastic_bf16(w, word), mask=going[:, None] & inside)
        else:
            tl.store(weights, stochastic_f16(w, word), mask=going[:, None] & inside)
    else:
        tl.store(weights, w, mask=going[:, None] & inside)
    score = tl.load(scores + table, mask=going, other=0).to(tl.float64)
    scores_at = anchor.to(tl.pointer_type(tl.float64), bitcast=True) + tail_at * 2 + score_at(STATE) // 2
    tl.store(scores_at, score, mask=going & (scored < score))
    tl.store(anchor + tail_at * 4 + flags_at(STATE), flags | CHANGED, mask=going)
