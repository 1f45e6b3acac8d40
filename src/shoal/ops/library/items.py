"""The items of a batch: whose feature they are, and lists of them."""

import triton
import triton.language as tl


@triton.jit
def feature_of(offsets, at, batch, features, STEPS: tl.constexpr):
    """The feature of each position: the last one that begins at or before it. STEPS halvings cover all features."""
    low = tl.zeros_like(at).to(tl.int32)
    high = low + features
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        reached = tl.load(offsets + middle.to(tl.int64) * batch) <= at
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def feature_of_run(offsets, first, at, batch, features, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The same for the BLOCK positions `at`, from `first` on: most often all are of one feature, which is searched
    among 32 at a time."""
    wide = tl.arange(0, 32)
    low = first * 0
    for round in tl.static_range((STEPS + 4) // 5 - 1, 0, -1):
        feature = low + (wide << (5 * round))
        begins = tl.load(offsets + feature.to(tl.int64) * batch, mask=feature < features, other=0x7FFFFFFF)
        low += tl.maximum(tl.sum((begins <= first).to(tl.int32), axis=0) - 1, 0) << (5 * round)
    feature = low + wide
    begins = tl.load(offsets + feature.to(tl.int64) * batch, mask=feature < features, other=0x7FFFFFFF)
    begun = tl.sum((begins <= first).to(tl.int32), axis=0)
    soon = tl.sum((begins < first + BLOCK).to(tl.int32), axis=0)
    if (soon > begun) | ((soon == 32) & (low + 32 < features)):
        result = feature_of(offsets, at, batch, features, STEPS)
    else:
        result = at * 0 + low + tl.maximum(begun - 1, 0)
    return result


@triton.jit
def append(count, flags):
    """Places at the end of a list for the flagged lanes; its length grows by as many."""
    ones = flags.to(tl.int32)
    first = tl.atomic_add(count, tl.sum(ones, axis=0), sem="relaxed")
    return first + tl.cumsum(ones, axis=0) - 1
