"""The buckets of an index in device memory.

A table's index is a run of buckets of 128 bytes: 8 keys, 8 slots and 8 stamps. One access to memory brings a bucket,
and accesses are what a find costs, so there are no digests to look at first. A slot word that is negative is no slot,
so no key is reserved. A key lives in its home bucket or, where that was full, in one of the next; a find goes on until
a bucket has an EMPTY entry, which one that was ever full has not: its erased entries are HOLEs. One launch serves all
tables: their buckets are named by their distance from one anchor.
"""

import triton
import triton.language as tl

from shoal.ops.library.random import mix64
from shoal.ops.library.tables import NO_SLOT

UNIT = tl.constexpr(64)  # bytes; places are counted in it, which tells the compiler that loads may be wide
BUCKET_UNITS = tl.constexpr(2)
ENTRIES = tl.constexpr(8)
# Where the slots and stamps of a bucket begin, in words of 32 bits; its keys come first.
FIRST_SLOT = tl.constexpr(16)
STAMP_BEHIND_SLOT = tl.constexpr(8)
# Slot words that are none: never used, used once, and CLAIMED - position while the key of that position is being
# inserted.
EMPTY = tl.constexpr(-1)
HOLE = tl.constexpr(-2)
CLAIMED = tl.constexpr(-3)
# The word of a bucket that a lane asks for which must do as the others: a stamp, so it is none of these.
IDLE_WORD = tl.constexpr(24)
NOT_WON = tl.constexpr(-(1 << 62))
# Behind its home a key goes this far. Only keys that were made to collide need it all: at a load of 0.8 runs of full
# buckets as long as this are not to be expected in any memory (e^-47 for each bucket).
REACH = tl.constexpr(256)


@triton.jit
def home_of(hash, buckets):
    """The upper half of the hash, scaled to the number of buckets."""
    return (((hash >> 32) * buckets.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def next_bucket(bucket, buckets):
    return tl.where(bucket + 1 >= buckets, 0, bucket + 1)


@triton.jit
def keys_at(anchor, at, asks):
    """The keys [g, ENTRIES] of the buckets at [g] bytes from the anchor."""
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.load(keys + (at // 8)[:, None] + tl.arange(0, ENTRIES)[None, :], mask=asks[:, None], other=0)


@triton.jit
def slots_at(anchor, at, asks):
    """Their slots."""
    slots = anchor + (at // 4)[:, None] + FIRST_SLOT + tl.arange(0, ENTRIES)[None, :]
    return tl.load(slots, mask=asks[:, None], other=EMPTY)


@triton.jit
def slots_now(anchor, at, asks):
    """Their slots as they are now: others are claiming, so not from the first-level cache."""
    slots = anchor + (at // 4)[:, None] + FIRST_SLOT + tl.arange(0, ENTRIES)[None, :]
    return tl.load(slots, mask=asks[:, None], other=EMPTY, volatile=True)


@triton.jit
def has_empty(words):
    """Whether no key went on behind the buckets with these slots."""
    return tl.max((words == EMPTY).to(tl.int32), axis=1) > 0


@triton.jit
def probe_entries(anchor, base, buckets, key, live):
    """Where each live key is, in the buckets at `base` units from the anchor: (bytes from the anchor to the last bucket
    looked at, whether that has an EMPTY entry, the key's entry there, its slot); the slot is NO_SLOT where there is
    none."""
    bucket = home_of(mix64(key), buckets)
    last = tl.zeros_like(key)
    ends = key != key
    found_entry = tl.zeros_like(key).to(tl.int32)
    found = tl.full(key.shape, NO_SLOT, tl.int32)
    going = live & (buckets > 0)
    passed = 0
    while (tl.max(going.to(tl.int32), axis=0) > 0) & (passed <= REACH):
        at = (base + bucket * BUCKET_UNITS) * UNIT
        words = slots_at(anchor, at, going)
        hit = (keys_at(anchor, at, going) == key[:, None]) & (words >= 0)
        slot = tl.max(tl.where(hit, words, NO_SLOT), axis=1)
        entry = tl.max(tl.where(hit, tl.arange(0, ENTRIES)[None, :], 0), axis=1)
        empty = has_empty(words)
        last = tl.where(going, at, last)
        ends = tl.where(going, empty, ends)
        found = tl.where(going, slot, found)
        found_entry = tl.where(going, entry, found_entry)
        going = going & (slot < 0) & (empty == 0)
        bucket = next_bucket(bucket, buckets)
        passed += 1
    return last, ends, found_entry, found


@triton.jit
def probe(anchor, base, buckets, key, live):
    """The slot of each live key in the buckets at `base` units from the anchor; NO_SLOT where there is none."""
    return probe_entries(anchor, base, buckets, key, live)[3]


@triton.jit
def entry_number(at, base):
    """Which entries have their slot words at `at`: their numbers in the buckets from `base` units on."""
    inside = at * 4 - base * UNIT
    bucket = inside // (BUCKET_UNITS * UNIT)
    return bucket * ENTRIES + (inside - bucket * BUCKET_UNITS * UNIT) // 4 - FIRST_SLOT


@triton.jit
def entry_keys(anchor, at, base):
    """Where their keys are."""
    number = entry_number(at, base)
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    return keys + (base + number // ENTRIES * BUCKET_UNITS) * (UNIT // 8) + number % ENTRIES
