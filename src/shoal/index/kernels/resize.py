"""The buckets of tables that grow, or are built anew: their keys go to other buckets."""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import (
    BUCKET_UNITS,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    IDLE_WORD,
    REACH,
    STAMP_BEHIND_SLOT,
    UNIT,
    home_of,
    next_bucket,
    slots_now,
)
from shoal.ops.library.items import feature_of
from shoal.ops.library.random import mix64

# Rows of what moves: where each table's buckets are and will be, in units from the anchor, and how many of all tables
# come before its own, of either.
MOVED_FROM = tl.constexpr(0)
MOVED_TO = tl.constexpr(1)
BEFORE_OLD = tl.constexpr(2)
BEFORE_NEW = tl.constexpr(3)


@triton.jit
def _moved_entries(moves, before, tables, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The entries of this program, whose row of counts is `before`: (whether there is one, its table, its bucket there,
    its number in the bucket)."""
    lane = tl.arange(0, BLOCK)
    bucket = tl.program_id(0).to(tl.int64) * (BLOCK // ENTRIES) + lane // ENTRIES
    begins = moves + before * (tables + 1)
    live = bucket < tl.load(begins + tables)
    table = feature_of(begins, bucket, 1, tables, STEPS)
    return live, table, bucket - tl.load(begins + table), lane % ENTRIES


@triton.jit(do_not_specialize=["tables"])
def clear(anchor, moves, tables, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Make the new buckets of all tables empty."""
    live, table, bucket, entry = _moved_entries(moves, BEFORE_NEW, tables, BLOCK, STEPS)
    at = (tl.load(moves + MOVED_TO * (tables + 1) + table) + bucket * BUCKET_UNITS) * UNIT
    word = anchor + at // 4 + entry
    # Keys too: words that were never written must not be compared.
    tl.store(word, tl.zeros_like(entry), mask=live)
    tl.store(word + ENTRIES, tl.zeros_like(entry), mask=live)
    tl.store(word + FIRST_SLOT, tl.zeros_like(entry) + EMPTY, mask=live)
    tl.store(word + FIRST_SLOT + STAMP_BEHIND_SLOT, tl.zeros_like(entry), mask=live)


@triton.jit(do_not_specialize=["tables"])
def rehash(anchor, moves, refused, tables, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The entries of tables' buckets into empty ones, each key once: no claims, only free entries to win."""
    columns = tables + 1
    lane = tl.arange(0, BLOCK)
    live, table, within, entry = _moved_entries(moves, BEFORE_OLD, tables, BLOCK, STEPS)
    at = (tl.load(moves + MOVED_FROM * columns + table) + within * BUCKET_UNITS) * UNIT
    new_at = tl.load(moves + MOVED_TO * columns + table)
    begins = moves + BEFORE_NEW * columns + table
    new = tl.load(begins + 1) - tl.load(begins)
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    slot = tl.load(anchor + at // 4 + FIRST_SLOT + entry, mask=live, other=EMPTY)
    going = slot >= 0
    key = tl.load(keys + at // 8 + entry, mask=going, other=0)
    stamp = tl.load(anchor + at // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT + entry, mask=going, other=0)
    bucket = home_of(mix64(key), new)
    passed = tl.zeros_like(lane)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        to = (new_at + bucket * BUCKET_UNITS) * UNIT
        words = slots_now(anchor, to, going)
        which = tl.min(tl.where(words == EMPTY, tl.arange(0, ENTRIES)[None, :], ENTRIES), axis=1)
        tries = going & (which < ENTRIES)
        target = anchor + to // 4 + tl.where(tries, FIRST_SLOT + which, IDLE_WORD)
        before = tl.atomic_cas(target, tl.full(lane.shape, EMPTY, tl.int32), slot, sem="relaxed")
        got = tries & (before == EMPTY)
        tl.store(keys + to // 8 + which, key, mask=got)
        tl.store(anchor + to // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT + which, stamp, mask=got)
        full = going & (which == ENTRIES)
        bucket = tl.where(full, next_bucket(bucket, new), bucket)
        passed = passed + full.to(tl.int32)
        stuck = full & (passed > REACH)
        tl.atomic_add(refused + tl.zeros_like(lane), 1, mask=stuck, sem="relaxed")
        going = going & (got == 0) & (stuck == 0)
