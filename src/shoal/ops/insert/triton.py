"""Entries and slots for the keys of a batch that the index does not have; see ops/find/triton.py for its form.

Inserts need no locks and no waiting. A key that was not found claims an entry by writing its own position in the batch
into the entry's slot word; whoever meets a claim reads the claimant's key from the batch. So of equal keys one wins and
the others see it.

A stamp is the number of the last batch that used a key, where somebody asks for it. It orders keys by last use, and it
pins: a key whose stamp is not below that of the oldest batch at work is in use. When no slot is free, a missing key
takes entry and slot of the key in its bucket that was used longest ago.
"""

import triton
import triton.language as tl

from shoal.ops.find.triton import (
    AT,
    BUCKET_UNITS,
    BUCKETS,
    EMPTY,
    ENTRIES,
    FIRST_KEY,
    FIRST_SLOT,
    IDLE_WORD,
    NEXT_KEY,
    NEXT_SLOT,
    NO_ENTRY,
    NOT_WON,
    REACH,
    STAMP_BEHIND_SLOT,
    TABLE_COLUMNS,
    UNIT,
    digests_at,
    entries_with,
    feature_of,
    home_of,
    lowest_entry,
    mix64,
    next_bucket,
    probe,
    without,
)


@triton.jit
def lost_keys(values, offsets, tables, tables_of, lost, lane, live, n, batch, features, STEPS: tl.constexpr):
    """What a block of the list of missing items is about: (item, position, key, table, inserts, base, buckets)."""
    item = tl.load(lost + lane, mask=live, other=0)
    position = item % n
    feature = feature_of(offsets, position, batch, features, STEPS)
    coded = tl.load(tables_of + (item // n) * features + feature, mask=live, other=0)
    table = (coded >> 2).to(tl.int64)
    base = tl.load(tables + table * TABLE_COLUMNS + AT, mask=live, other=0)
    buckets = tl.load(tables + table * TABLE_COLUMNS + BUCKETS, mask=live, other=0)
    key = tl.load(values + position, mask=live, other=0).to(tl.int64)
    return item, position, key, table, (coded & 1) == 1, base, buckets


@triton.jit(do_not_specialize=["n", "batch", "features"])
def claim(
    anchor, tables, values, offsets, tables_of, lost, lost_count, won_at, refused, dummy, n, batch, features,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An entry for every missing key, claimed by one of its items: beside these in the list, `won_at` gets where the
    entry's slot word is; beside the others, NOT_WON.

    All try the empty entries of a bucket in the same order, so a key meets its equals before it can claim another.
    `refused` counts, by table, keys that found no entry within reach. `dummy`: a word that is never EMPTY, for lanes
    without a key.
    """
    total = tl.load(lost_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        _item, position, key, table, inserts, base, buckets = lost_keys(
            values, offsets, tables, tables_of, lost, lane, live, n, batch, features, STEPS
        )
        bucket = home_of(mix64(key), buckets)
        passed = tl.zeros_like(position)
        taken = tl.full(base.shape, NOT_WON, tl.int64)
        going = live & inserts & (buckets > 0)
        has_bucket = going
        while tl.max(going.to(tl.int32), axis=0) > 0:
            at = (base + bucket * BUCKET_UNITS) * UNIT
            flags = entries_with(digests_at(anchor, at, going), tl.zeros_like(position))
            entry = lowest_entry(flags)
            tries = going & (entry < NO_ENTRY)
            done = position < 0
            while tl.max(tries.to(tl.int32), axis=0) > 0:
                word = anchor + at // 4 + tl.where(tries, FIRST_SLOT + NEXT_SLOT * entry, IDLE_WORD)
                word = tl.where(has_bucket, word, dummy)
                before = tl.atomic_cas(
                    word, tl.full(position.shape, EMPTY, tl.int32), EMPTY - 1 - position, sem="relaxed"
                )
                got = tries & (before == EMPTY)
                held = tries & (before < EMPTY)
                twin = held & (tl.load(values + (EMPTY - 1 - before), mask=held, other=0).to(tl.int64) == key)
                taken = tl.where(got, at // 4 + FIRST_SLOT + NEXT_SLOT * entry, taken)
                done = done | got | twin
                flags = without(flags, entry)
                entry = lowest_entry(flags)
                tries = tries & (done == 0) & (entry < NO_ENTRY)
            full = going & (done == 0)
            tl.store(anchor.to(tl.pointer_type(tl.uint8), bitcast=True) + at + ENTRIES, full.to(tl.uint8), mask=full)
            bucket = tl.where(full, next_bucket(bucket, buckets), bucket)
            passed = passed + full.to(tl.int32)
            stuck = full & (passed > REACH)
            tl.atomic_add(refused + table, 1, mask=stuck, sem="relaxed")
            going = full & (stuck == 0)
        tl.store(won_at + lane, taken, mask=live)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["n", "batch", "features", "pinned_from"])
def evict(
    anchor, tables, values, offsets, tables_of, lost, lost_count, won_at, won_slots, victims, refused, dummy,
    n, batch, features, pinned_from, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry and slot for every missing key: those of the key in its bucket with the lowest stamp, if that is below
    `pinned_from`; else from the next bucket. Beside the items that won one, `won_at` has its place, `won_slots` the
    slot, and `victims` the key that gave it up.

    All try the victims of a bucket in the same order, so a key meets its equals before it can take a second one.
    """
    total = tl.load(lost_count)
    entry = tl.arange(0, 32)[None, :]
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        _item, position, key, table, inserts, base, buckets = lost_keys(
            values, offsets, tables, tables_of, lost, lane, live, n, batch, features, STEPS
        )
        bucket = home_of(mix64(key), buckets)
        passed = tl.zeros_like(position)
        taken = tl.full(base.shape, NOT_WON, tl.int64)
        slot = tl.zeros_like(position)
        victim = tl.zeros_like(key)
        going = live & inserts & (buckets > 0)
        has_bucket = going
        while tl.max(going.to(tl.int32), axis=0) > 0:
            at = (base + bucket * BUCKET_UNITS) * UNIT
            words = (anchor + at // 4 + FIRST_SLOT)[:, None] + NEXT_SLOT * entry
            asks = going[:, None] & (entry < ENTRIES)
            # Not from the first-level cache: others are claiming.
            word = tl.load(words, mask=asks, other=EMPTY, volatile=True)
            stamp = tl.load(words + STAMP_BEHIND_SLOT, mask=asks, other=0)
            held = word < EMPTY
            other = tl.load(values + (EMPTY - 1 - word), mask=held, other=0).to(tl.int64)
            twin = tl.max((held & (other == key[:, None])).to(tl.int32), axis=1) > 0
            may_go = (word >= 0) & (stamp < pinned_from)
            rank = tl.min(tl.where(may_go, (stamp.to(tl.int64) << 5) + entry, 1 << 40), axis=1)
            tries = going & (twin == 0) & (rank < 1 << 40)
            which = (rank & 31).to(tl.int32)
            given = tl.max(tl.where((entry == which[:, None]) & may_go, word, EMPTY), axis=1)
            target = anchor + at // 4 + tl.where(tries, FIRST_SLOT + NEXT_SLOT * which, IDLE_WORD)
            target = tl.where(has_bucket, target, dummy)
            before = tl.atomic_cas(target, tl.where(tries, given, EMPTY), EMPTY - 1 - position, sem="relaxed")
            got = tries & (before == given)
            taken = tl.where(got, at // 4 + FIRST_SLOT + NEXT_SLOT * which, taken)
            slot = tl.where(got, given, slot)
            victim = tl.where(got, tl.load(keys + at // 8 + FIRST_KEY + NEXT_KEY * which, mask=got, other=0), victim)
            full = going & (twin == 0) & (rank >= 1 << 40)
            tl.store(anchor.to(tl.pointer_type(tl.uint8), bitcast=True) + at + ENTRIES, full.to(tl.uint8), mask=full)
            bucket = tl.where(full, next_bucket(bucket, buckets), bucket)
            passed = passed + full.to(tl.int32)
            stuck = full & (passed > REACH)
            tl.atomic_add(refused + table, 1, mask=stuck, sem="relaxed")
            going = going & (twin == 0) & (got == 0) & (stuck == 0)
        tl.store(won_at + lane, taken, mask=live)
        tl.store(won_slots + lane, slot, mask=live)
        tl.store(victims + lane, victim, mask=live)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["n", "batch", "features"])
def find_lost(
    anchor, tables, values, offsets, tables_of, slots, lost, lost_count, n, batch, features,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
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
                values, offsets, tables, tables_of, lost, lane, lacks, n, batch, features, STEPS
            )
            tl.store(slots + item, probe(anchor, base, buckets, key, lacks), mask=lacks)
        first += tl.num_programs(0) * BLOCK
