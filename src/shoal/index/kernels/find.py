"""Keys to slots in device memory; see buckets.py for the form of an index. One launch serves all tables."""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import (
    BUCKET_UNITS,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    HOLE,
    STAMP_BEHIND_SLOT,
    UNIT,
    probe,
    probe_entries,
)
from shoal.ops.library.items import append, feature_of_run
from shoal.ops.library.tables import AT, BUCKETS, TABLE_COLUMNS
from shoal.ops.library.uses import is_inserted, table_of


@triton.jit
def tally(offsets, tables_of, looked, n, batch, features, BLOCK: tl.constexpr):
    """Add the number of keys of this program's share of features to their tables'; offsets may make no sense."""
    first = tl.program_id(0) * BLOCK
    while first < features:
        feature = first + tl.arange(0, BLOCK)
        use = tl.load(tables_of + feature, mask=feature < features, other=-1)
        here = use >= 0
        begin = tl.load(offsets + feature.to(tl.int64) * batch, mask=here, other=0).to(tl.int64)
        end = tl.load(offsets + (feature.to(tl.int64) + 1) * batch, mask=here, other=0).to(tl.int64)
        keys = tl.minimum(tl.maximum(end - begin, 0), n)
        tl.atomic_add(looked + table_of(use), keys, mask=here, sem="relaxed")
        first += tl.num_programs(0) * BLOCK


@triton.jit
def check_offsets(offsets, bad_bags, n, batch, features, BLOCK: tl.constexpr):
    """Count the bags of this program's share whose offsets make no sense."""
    bags = features.to(tl.int64) * batch
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < bags:
        bag = first + tl.arange(0, BLOCK)
        begin = tl.load(offsets + bag, mask=bag < bags, other=0)
        end = tl.load(offsets + bag + 1, mask=bag < bags, other=0)
        bad = (begin < 0) | (end < begin) | (end > n)
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            tl.atomic_add(bad_bags, tl.sum(bad.to(tl.int32), axis=0), sem="relaxed")
        first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit(do_not_specialize=["n", "batch", "features", "stamp"])
def find(
    anchor, tables, values, offsets, tables_of, slots, features_of, tickets, lost, lost_of, lost_count, looked, missed,
    bad_bags, n, batch, features, stamp,
    INSERT: tl.constexpr, NAME: tl.constexpr, TALLY: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    STAMP: tl.constexpr, TICKET: tl.constexpr,
):  # fmt: skip
    """Slots of a batch, one run of n for each slot list. Where INSERT, items that were not found and may be are listed;
    `lost_of` gets what `tables_of` says of them. Where NAME, `features_of` gets the feature of each item, and offsets
    that make no sense count as bad bags. Where TALLY, tables count keys looked up and missed, and offsets that
    do not begin at 0 or end at n count as a bad bag. Where STAMP, keys that are found are stamped. Where TICKET, items
    get one that says whose they are (-1 - table), for those that no bag gives one.

    `tables_of[copy, feature]`: see ops/library/uses.py; -1 for none.
    """
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    live = at < n
    feature = feature_of_run(offsets, first, at, batch, features, BLOCK, STEPS)
    use = tl.load(tables_of + copy * features + feature, mask=live, other=-1)
    live = live & (use >= 0)
    table = table_of(use).to(tl.int64)
    base = tl.load(tables + table * TABLE_COLUMNS + AT, mask=live, other=0)
    buckets = tl.load(tables + table * TABLE_COLUMNS + BUCKETS, mask=live, other=0)
    key = tl.load(values + at, mask=live, other=0).to(tl.int64)
    bucket_at, _ends, entry, slot = probe_entries(anchor, base, buckets, key, live)
    if STAMP:
        stamps = anchor + bucket_at // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT + entry
        # Keys come many times, and all but the first would write what is there. A batch that is only on its way may
        # have been numbered before one that is at work.
        older = tl.load(stamps, mask=slot >= 0, other=stamp) < stamp
        tl.store(stamps, tl.zeros_like(slot) + stamp, mask=older)
    item = copy * n + at
    tl.store(slots + item, slot, mask=at < n)
    if TICKET:
        tl.store(tickets + item, -1 - table, mask=at < n)
    if NAME:
        tl.store(features_of + item, feature, mask=at < n)
    if TALLY:
        absent = live & (slot < 0)
        many = tl.sum(absent.to(tl.int32), axis=0)
        if many > 0:
            # One by one they would wait for each other, and most often they are of one table.
            one = tl.min(tl.where(absent, table_of(use), 0x7FFFFFFF), axis=0)
            alike = tl.sum((absent & (table_of(use) == one)).to(tl.int32), axis=0)
            tl.atomic_add(missed + one, alike.to(tl.int64), sem="relaxed")
            tl.atomic_add(missed + table, 1, mask=absent & (table_of(use) != one), sem="relaxed")
        tally(offsets, tables_of + copy * features, looked, n, batch, features, BLOCK)
        if (tl.program_id(0) == 0) & (copy == 0):
            wrong = (tl.load(offsets) != 0) | (tl.load(offsets + features.to(tl.int64) * batch) != n)
            tl.atomic_add(bad_bags, 1, mask=wrong, sem="relaxed")
        if NAME & (copy == 0):
            check_offsets(offsets, bad_bags, n, batch, features, BLOCK)
    if INSERT:
        missing = live & (slot < 0) & is_inserted(use)
        if tl.sum(missing.to(tl.int32), axis=0) > 0:
            place = append(lost_count, missing)
            tl.store(lost + place, item, mask=missing)
            tl.store(lost_of + place, use, mask=missing)


@triton.jit
def find_keys(anchor, at, buckets, keys, slots, n, BLOCK: tl.constexpr):
    """Slots of keys in one table."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    slot = probe(anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live)
    tl.store(slots + lane, slot, mask=live)


@triton.jit
def stamp_keys(anchor, at, buckets, keys, stamps, stamp, n, READ: tl.constexpr, BLOCK: tl.constexpr):
    """Stamp the keys of one table that it has, unless they have a later stamp. Where READ, `stamps` gets what they
    have instead."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    bucket_at, _ends, entry, slot = probe_entries(
        anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live
    )
    word = anchor + bucket_at // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT + entry
    last = tl.load(word, mask=slot >= 0, other=stamp)
    if READ:
        tl.store(stamps + lane, last, mask=slot >= 0)
    else:
        tl.store(word, tl.zeros_like(slot) + stamp, mask=last < stamp)


@triton.jit(do_not_specialize=["buckets", "many"])
def restamp(anchor, at, buckets, firsts, many, BLOCK: tl.constexpr):
    """Each stamp of one table becomes how many of `firsts`, so many stamps in order, are not later."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bucket_at = (at + lane // ENTRIES * BUCKET_UNITS) * UNIT
    word = anchor + bucket_at // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT + lane % ENTRIES
    live = lane // ENTRIES < buckets
    stamp = tl.load(word, mask=live, other=0)
    anew = tl.zeros_like(stamp)
    one = 0
    while one < many:
        anew += (stamp >= tl.load(firsts + one)).to(tl.int32)
        one += 1
    tl.store(word, anew, mask=live)


@triton.jit
def erase(anchor, at, buckets, keys, slots, n, BLOCK: tl.constexpr):
    """Take keys, each given once, out of one table; `slots` gets the slots they had, or NO_SLOT."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    bucket_at, ends, entry, slot = probe_entries(
        anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live
    )
    # Where no key went on, none needs to in future.
    tl.store(anchor + bucket_at // 4 + FIRST_SLOT + entry, tl.where(ends, EMPTY, HOLE), mask=slot >= 0)
    tl.store(slots + lane, slot, mask=live)
