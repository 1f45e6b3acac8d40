"""Which keys give up their slots above, and the holes that they leave in the index.

`choose` finds how many slots are lacking and which stamp is old, `take_victims` takes the entries of keys with older
stamps away. Once the rows have moved, `go_back` lets keys return to where they are looked for first, and `clean` makes
entries EMPTY again where no key went on.
"""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import (
    BUCKET_UNITS,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    HOLE,
    IDLE_WORD,
    REACH,
    STAMP_BEHIND_SLOT,
    UNIT,
    has_empty,
    home_of,
    keys_at,
    next_bucket,
    slots_at,
    slots_now,
)
from shoal.index.kernels.tiers import (
    ASKED,
    FOUND,
    NEEDED,
    OLD,
    POPPED,
    PUSHED,
    RING_AT,
    RING_SIZE,
    SHARE,
    TIER_COLUMNS,
    WANTED,
    free_slots,
)
from shoal.ops.library.random import mix64
from shoal.ops.library.tables import AT, BUCKETS, NO_SLOT, TABLE_COLUMNS

ALL = tl.constexpr(1 << 16)
# Keys go back each time that one in so many of the slots was given up.
PARTS = tl.constexpr(32)


@triton.jit(do_not_specialize=["pinned_from"])
def choose(anchor, tables, tiers, numbers, asked_count, pinned_from, SAMPLE: tl.constexpr):
    """How many slots each table lacks, and a stamp below which there are as many keys and some more, as far as SAMPLE
    buckets tell. A program for each of the tables `numbers`, of one warp: no thread loads what another has stored."""
    number = tl.load(numbers + tl.program_id(0))
    tier = tiers + number * TIER_COLUMNS
    size = tl.load(tier + RING_SIZE)
    if (tl.load(asked_count) > 0) & (size > 0):
        free = free_slots(tier)
        pushed = free + tl.load(tier + POPPED)
        wanted = tl.minimum(tl.maximum(tl.load(tier + NEEDED) - free, 0), size)
        low = pinned_from * 0
        high = pinned_from
        share = wanted * 0 + ALL
        if wanted > 0:
            base = tl.load(tables + number * TABLE_COLUMNS + AT)
            buckets = tl.load(tables + number * TABLE_COLUMNS + BUCKETS)
            looked = tl.minimum(buckets, SAMPLE)
            sampled = tl.arange(0, SAMPLE).to(tl.int64)
            inside = sampled < looked
            at = (base + sampled * buckets // looked * BUCKET_UNITS) * UNIT
            words = slots_at(anchor, at, inside)
            stamps = (anchor + at // 4 + FIRST_SLOT + STAMP_BEHIND_SLOT)[:, None] + tl.arange(0, ENTRIES)[None, :]
            stamp = tl.load(stamps, mask=inside[:, None], other=0)
            # A quarter more where it is a sample: a few that it does not tell of must not be lacking.
            enough = tl.where(looked < buckets, wanted * looked * 5 // (buckets * 4) + 4, wanted)
            while low < high:
                middle = low + (high - low) // 2  # their sum may be more than 31 bits
                older = ((words >= 0) & (stamp < middle)).to(tl.int32)
                reached = tl.sum(tl.sum(older, axis=1), axis=0) >= enough
                high = tl.where(reached, middle, high)
                low = tl.where(reached, low, middle + 1)
            # Many keys may have one stamp. If those went that come first, the others would crowd where they are.
            older = tl.sum(tl.sum(((words >= 0) & (stamp < high - 1)).to(tl.int32), axis=1), axis=0).to(tl.int64)
            alike = tl.sum(tl.sum(((words >= 0) & (stamp == high - 1)).to(tl.int32), axis=1), axis=0).to(tl.int64)
            part = tl.maximum(enough - older, 0) * ALL // tl.maximum(alike, 1) + 1
            share = tl.where(looked < buckets, tl.minimum(part, ALL), share)
        tl.store(tier + PUSHED, pushed)
        tl.store(tier + NEEDED, 0)
        tl.store(tier + WANTED, wanted)
        tl.store(tier + OLD, high.to(tl.int64))
        tl.store(tier + SHARE, share)
        tl.store(tier + FOUND, 0)
        tl.store(tier + ASKED, 0)


@triton.jit
def take_victims(anchor, tables, tiers, numbers, asked_count, BLOCK: tl.constexpr):
    """Take entries with old stamps away, and put their slots into the ring. Programs of the second axis are the tables
    `numbers`."""
    number = tl.load(numbers + tl.program_id(1))
    tier = tiers + number * TIER_COLUMNS
    wanted = tl.load(tier + WANTED)
    if (tl.load(asked_count) > 0) & (wanted > 0):
        base = tl.load(tables + number * TABLE_COLUMNS + AT)
        buckets = tl.load(tables + number * TABLE_COLUMNS + BUCKETS)
        entries = buckets * ENTRIES
        old, share = tl.load(tier + OLD), tl.load(tier + SHARE)
        pushed, size, ring = tl.load(tier + PUSHED), tl.load(tier + RING_SIZE), tl.load(tier + RING_AT)
        # Each time another part of the buckets is the last, where enough were found already.
        turn = pushed * 7919 % tl.maximum(buckets, 1) * ENTRIES
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < entries:
            lane = first + tl.arange(0, BLOCK)
            turned = (lane + turn) % entries
            at = (base + turned // ENTRIES * BUCKET_UNITS) * UNIT
            word = anchor + at // 4 + FIRST_SLOT + turned % ENTRIES
            slot = tl.load(word, mask=lane < entries, other=EMPTY)
            stamp = tl.load(word + STAMP_BEHIND_SLOT, mask=slot >= 0, other=0)
            drawn = (mix64(turned + pushed) & (ALL - 1)).to(tl.int64) < share
            goes = (slot >= 0) & ((stamp < old - 1) | ((stamp == old - 1) & drawn))
            many = tl.sum(goes.to(tl.int64), axis=0)
            if many > 0:
                ticket = tl.atomic_add(tier + FOUND, many, sem="relaxed") + tl.cumsum(goes.to(tl.int32), axis=0) - 1
                goes = goes & (ticket < wanted)
                tl.store(anchor + ring + (pushed + ticket) % size, slot, mask=goes)
                tl.store(word, tl.zeros_like(slot) + HOLE, mask=goes)
            first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def go_back(anchor, tables, tiers, numbers, asked_count, dummy, BLOCK: tl.constexpr):
    """Let keys that had to go on behind their home go back to HOLEs that came there since: for one that is used all the
    time the buckets before it would keep their HOLEs for ever. Once a part of the keys is gone since the last time.

    Each time they go from every other bucket to those between: so no lane looks at an entry that another is writing.
    Programs of the second axis are the tables `numbers`.
    """
    number = tl.load(numbers + tl.program_id(1))
    tier = tiers + number * TIER_COLUMNS
    found = tl.minimum(tl.load(tier + FOUND), tl.load(tier + WANTED))
    pushed, size = tl.load(tier + PUSHED), tl.maximum(tl.load(tier + RING_SIZE), 1)
    turn = (pushed + found) * PARTS // size
    if (tl.load(asked_count) > 0) & (turn != pushed * PARTS // size):
        base = tl.load(tables + number * TABLE_COLUMNS + AT)
        buckets = tl.load(tables + number * TABLE_COLUMNS + BUCKETS)
        keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
        entry = tl.arange(0, ENTRIES)[None, :]
        odd = (mix64(turn) & 1).to(tl.int64)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while 2 * first + 1 < buckets:
            before = 2 * (first + tl.arange(0, BLOCK)) + odd
            inside = before + 1 < buckets
            before_at = (base + before * BUCKET_UNITS) * UNIT
            words = slots_at(anchor, before_at, inside)
            # No key went on from a bucket with an EMPTY entry.
            going = inside & (has_empty(words) == 0)
            if tl.max(going.to(tl.int32), axis=0) > 0:
                at = before_at + BUCKET_UNITS * UNIT
                held, theirs = slots_at(anchor, at, going), keys_at(anchor, at, going)
                # Keys that went on from the last bucket to the first stay.
                far = (before + 1)[:, None] - home_of(mix64(theirs), buckets)
                # Those from near have no other bucket to go to than the one before.
                free = tl.max((words == HOLE).to(tl.int32), axis=1) > 0
                wait = (held >= 0) & (far > 0) & (free[:, None] | (far > 2))
                passed = tl.zeros_like(before)
                going = going & (tl.max(wait.to(tl.int32), axis=1) > 0)
                while tl.max(going.to(tl.int32), axis=0) > 0:
                    which = tl.min(tl.where(wait, entry, ENTRIES), axis=1)
                    mine = entry == which[:, None]
                    slot = tl.max(tl.where(mine, held, NO_SLOT), axis=1)
                    key = tl.sum(tl.where(mine, theirs, 0), axis=1)
                    distance = tl.max(tl.where(mine, far, 0), axis=1)
                    to = before + 1 - distance + (distance - 1) % 2 + passed
                    looks = going & (to <= before)
                    to_at = (base + to * BUCKET_UNITS) * UNIT
                    now = slots_now(anchor, to_at, looks)
                    hole = tl.min(tl.where(now == HOLE, entry, ENTRIES), axis=1)
                    tries = looks & (hole < ENTRIES)
                    idle = tl.where(inside, anchor + before_at // 4 + IDLE_WORD, dummy)
                    word = anchor + to_at // 4 + FIRST_SLOT + hole
                    wanted = tl.full(slot.shape, HOLE, tl.int32)
                    got = tl.atomic_cas(tl.where(tries, word, idle), wanted, slot, sem="relaxed") == HOLE
                    got = got & tries
                    left = anchor + at // 4 + FIRST_SLOT + which
                    stamp = tl.load(left + STAMP_BEHIND_SLOT, mask=got, other=0)
                    tl.store(word + STAMP_BEHIND_SLOT, stamp, mask=got)
                    tl.store(keys + to_at // 8 + hole, key, mask=got)
                    tl.store(left, tl.zeros_like(slot) + HOLE, mask=got)
                    done = got | (going & (looks == 0))
                    passed = tl.where(done, 0, passed + 2 * (looks & (hole == ENTRIES)).to(tl.int64))
                    wait = wait & ((mine & done[:, None]) == 0)
                    going = going & (tl.max(wait.to(tl.int32), axis=1) > 0)
            first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def clean(anchor, tables, tiers, numbers, asked_count, BLOCK: tl.constexpr):
    """Make HOLEs EMPTY in buckets that no key went on behind, so that finds end there: as many keys as come go, and
    without this every bucket would have been full once. Programs of the second axis are the tables
    `numbers`."""
    number = tl.load(numbers + tl.program_id(1))
    tier = tiers + number * TIER_COLUMNS
    if (tl.load(asked_count) > 0) & (tl.load(tier + FOUND) > 0):
        base = tl.load(tables + number * TABLE_COLUMNS + AT)
        buckets = tl.load(tables + number * TABLE_COLUMNS + BUCKETS)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < buckets:
            bucket = first + tl.arange(0, BLOCK)
            at = (base + bucket * BUCKET_UNITS) * UNIT
            words = slots_at(anchor, at, bucket < buckets)
            holes = tl.max((words == HOLE).to(tl.int32), axis=1) > 0
            # Keys further on that went past it: they are further from home than from here.
            passed = holes & (bucket < 0)
            other = bucket
            distance = 0
            going = holes & (has_empty(words) == 0)
            while (tl.max(going.to(tl.int32), axis=0) > 0) & (distance < REACH):
                distance += 1
                other = next_bucket(other, buckets)
                there = (base + other * BUCKET_UNITS) * UNIT
                held = slots_at(anchor, there, going)
                home = home_of(mix64(keys_at(anchor, there, going)), buckets)
                far = other[:, None] - home
                far = tl.where(far < 0, far + buckets, far)
                past = tl.max(((held >= 0) & (far >= distance)).to(tl.int32), axis=1) > 0
                passed = passed | (going & past)
                going = going & (past == 0) & (has_empty(held) == 0) & (other != bucket)
            # Lanes that are still going looked as far as any key goes.
            places = (anchor + at // 4 + FIRST_SLOT)[:, None] + tl.arange(0, ENTRIES)[None, :]
            empties = (holes & (passed == 0))[:, None] & (words == HOLE)
            tl.store(places, tl.zeros_like(words) + EMPTY, mask=empties)
            first += tl.num_programs(0).to(tl.int64) * BLOCK
