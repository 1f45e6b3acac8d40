"""Entries and slots for the keys of a batch that the index does not have; see buckets.py for its form.

Inserts need no locks and no waiting. A key that was not found claims an entry by writing its own position in the batch
into the entry's slot word; a lane that meets a claim reads the claimant's key from the batch. So of equal keys one
wins and the others see it.
"""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import (
    BUCKET_UNITS,
    CLAIMED,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    HOLE,
    IDLE_WORD,
    NOT_WON,
    REACH,
    UNIT,
    home_of,
    next_bucket,
    probe,
    slots_now,
)
from shoal.ops.library.random import mix64
from shoal.ops.library.tables import AT, BUCKETS, TABLE_COLUMNS
from shoal.ops.library.uses import table_of, trains


@triton.jit
def lost_keys(values, tables, lost, lost_of, lane, live, n):
    """What a block of the list of missing items is about: (item, position, key, table, inserts, base, buckets)."""
    item = tl.load(lost + lane, mask=live, other=0)
    use = tl.load(lost_of + lane, mask=live, other=0)
    position = item % n
    table = table_of(use).to(tl.int64)
    base = tl.load(tables + table * TABLE_COLUMNS + AT, mask=live, other=0)
    buckets = tl.load(tables + table * TABLE_COLUMNS + BUCKETS, mask=live, other=0)
    key = tl.load(values + position, mask=live, other=0).to(tl.int64)
    return item, position, key, table, trains(use), base, buckets


@triton.jit
def claimed_by_equal(words, values, key):
    """Whether one of the slot words [g, ENTRIES] is a claim for the same key [g]."""
    held = words <= CLAIMED
    other = tl.load(values + (CLAIMED - words), mask=held, other=0).to(tl.int64)
    return tl.max((held & (other == key[:, None])).to(tl.int32), axis=1) > 0


@triton.jit
def take(anchor, at, which, words, position, tries, has_bucket, dummy):
    """Claim the entries `which` of the buckets at [g] bytes, where `tries`; returns who got one.

    `dummy`: a word that is none of the negative ones, for lanes without a bucket.
    """
    entry = tl.arange(0, ENTRIES)[None, :]
    given = tl.max(tl.where(entry == which[:, None], words, -(1 << 31)), axis=1)
    given = tl.where(tries, given, EMPTY)
    target = anchor + at // 4 + tl.where(tries, FIRST_SLOT + which, IDLE_WORD)
    before = tl.atomic_cas(tl.where(has_bucket, target, dummy), given, CLAIMED - position, sem="relaxed")
    return tries & (before == given)


@triton.jit
def claim_entries(anchor, values, key, position, base, buckets, going, dummy):
    """An entry for each of the keys that are `going`, claimed by one of its equals: (where its slot word is, or
    NOT_WON; which found none within reach).

    All try the free entries of a bucket in the same order and look again when they lose one, so a key meets its equals
    before it can claim another.
    """
    entry = tl.arange(0, ENTRIES)[None, :]
    bucket = home_of(mix64(key), buckets)
    passed = tl.zeros_like(position)
    taken = tl.full(base.shape, NOT_WON, tl.int64)
    refused = going & (buckets <= 0)
    going = going & (buckets > 0)
    has_bucket = going
    while tl.max(going.to(tl.int32), axis=0) > 0:
        at = (base + bucket * BUCKET_UNITS) * UNIT
        words = slots_now(anchor, at, going)
        twin = claimed_by_equal(words, values, key)
        free = (words == EMPTY) | (words == HOLE)
        which = tl.min(tl.where(free, entry, ENTRIES), axis=1)
        tries = going & (twin == 0) & (which < ENTRIES)
        got = take(anchor, at, which, words, position, tries, has_bucket, dummy)
        taken = tl.where(got, at // 4 + FIRST_SLOT + which, taken)
        full = going & (twin == 0) & (which == ENTRIES)
        bucket = tl.where(full, next_bucket(bucket, buckets), bucket)
        passed = passed + full.to(tl.int32)
        stuck = full & (passed > REACH)
        refused = refused | stuck
        going = going & (twin == 0) & (got == 0) & (stuck == 0)
    return taken, refused


@triton.jit(do_not_specialize=["n"])
def claim(anchor, tables, values, lost, lost_of, lost_count, won_at, refused, dummy, n, BLOCK: tl.constexpr):
    """An entry for every missing key, claimed by one of its items. At the places of these in the list `won_at` gets
    where the entry's slot word is, at the others NOT_WON. `refused` counts, by table, keys that found no entry within
    reach.
    """
    total = tl.load(lost_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        _item, position, key, table, inserts, base, buckets = lost_keys(values, tables, lost, lost_of, lane, live, n)
        taken, without = claim_entries(anchor, values, key, position, base, buckets, live & inserts, dummy)
        tl.atomic_add(refused + table, 1, mask=without, sem="relaxed")
        tl.store(won_at + lane, taken, mask=live)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["n"])
def find_lost(
    anchor, tables, values, slots, lost, lost_of, lost_count, n, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of the items that were missing, once their keys have entries: of those whose birth did not tell."""
    total = tl.load(lost_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        item = tl.load(lost + lane, mask=lane < total, other=0)
        lacks = (lane < total) & (tl.load(slots + item, mask=lane < total, other=0) < 0)
        if tl.max(lacks.to(tl.int32), axis=0) > 0:
            item, _position, key, _table, _inserts, base, buckets = lost_keys(
                values, tables, lost, lost_of, lane, lacks, n
            )
            tl.store(slots + item, probe(anchor, base, buckets, key, lacks), mask=lacks)
        first += tl.num_programs(0) * BLOCK
