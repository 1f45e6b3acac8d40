"""Keys to slots in device memory.

A table's index is a run of buckets of 544 bytes: 31 digests of one byte and a mark, then 31 entries of 16 bytes, each a
key, its slot and a stamp, so that a find reads two sectors of memory. An entry is in use where its digest is not
0, so no key is reserved. A key lives in its home bucket or, where that was full, in one of the next few; the mark says
that a bucket was full once, and that a find goes on behind it. One launch serves all tables: their buckets are named by
their distance from one anchor.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(32)  # bytes; places are counted in it, which tells the compiler that loads may be wide
BUCKET_UNITS = tl.constexpr(17)
ENTRIES = tl.constexpr(31)
WORDS = tl.constexpr(8)  # of digests, the mark being the last one's last byte
NO_ENTRY = tl.constexpr(32)
# Where the first entry's key and slot are, and how far it is to the next one's, in their own sizes.
FIRST_KEY = tl.constexpr(4)
NEXT_KEY = tl.constexpr(2)
FIRST_SLOT = tl.constexpr(10)
NEXT_SLOT = tl.constexpr(4)
STAMP_BEHIND_SLOT = tl.constexpr(1)
EMPTY = tl.constexpr(-1)
# The word of a bucket that a lane asks for which must do as the others: the mark in it is 0 or 1, so it is never EMPTY.
IDLE_WORD = tl.constexpr(7)
NO_SLOT = tl.constexpr(-1)
NOT_WON = tl.constexpr(-(1 << 62))
# Behind its home a key goes this far. Only keys that were made to collide need it all: at a load of 0.8 the longest run
# of full buckets among 8 million was 17, and runs that are two longer are a fifth as many.
REACH = tl.constexpr(64)
# Columns of the tables' descriptors.
TABLE_COLUMNS = tl.constexpr(4)
AT = tl.constexpr(0)
BUCKETS = tl.constexpr(1)
MOST_ROWS = tl.constexpr(2)
FAMILY = tl.constexpr(3)


@triton.jit
def mix64(key):
    x = key.to(tl.uint64)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def home_of(hash, buckets):
    """The upper half of the hash, scaled to the number of buckets."""
    return (((hash >> 32) * buckets.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def digest_of(hash):
    low = (hash & 0xFF).to(tl.int32)
    return tl.where(low == 0, 1, low).to(tl.uint8)


@triton.jit
def next_bucket(bucket, buckets):
    return tl.where(bucket + 1 >= buckets, 0, bucket + 1)


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
def digests_at(anchor, at, asks):
    """The digests and the mark of the buckets at [g] bytes from the anchor, as [g, WORDS] words."""
    words = anchor.to(tl.pointer_type(tl.uint32), bitcast=True)
    return tl.load(words + (at // 4)[:, None] + tl.arange(0, WORDS)[None, :], mask=asks[:, None], other=0)


@triton.jit
def is_marked(seen):
    """Whether the buckets were full once."""
    word = tl.arange(0, WORDS)[None, :]
    return tl.max(tl.where(word == WORDS - 1, (seen >> 24).to(tl.int32), 0), axis=1) > 0


@triton.jit
def entries_with(seen, digest):
    """Flags of the entries that have a digest, the upper bit of their byte. A few may be wrong, behind a right one."""
    other = seen ^ (digest.to(tl.uint32) * 0x01010101)[:, None]
    flags = (other - 0x01010101) & (other ^ 0xFFFFFFFF) & 0x80808080
    return tl.where(tl.arange(0, WORDS)[None, :] == WORDS - 1, flags & 0x00808080, flags)


@triton.jit
def lowest_entry(flags):
    """The first flagged entry of each bucket, or NO_ENTRY."""
    byte = tl.where((flags & 0x80) != 0, 0, tl.where((flags & 0x8000) != 0, 1, tl.where((flags & 0x800000) != 0, 2, 3)))
    return tl.min(tl.where(flags != 0, 4 * tl.arange(0, WORDS)[None, :] + byte, NO_ENTRY), axis=1)


@triton.jit
def without(flags, entry):
    """The flags but for those of an entry and the ones before it."""
    below = tl.minimum(tl.maximum(entry[:, None] + 1 - 4 * tl.arange(0, WORDS)[None, :], 0), 4)
    shift = (8 * tl.minimum(below, 3)).to(tl.uint32)
    return tl.where(below >= 4, flags & 0, (flags >> shift) << shift)


@triton.jit
def probe_entries(anchor, base, buckets, key, live):
    """Where each live key is, in the buckets at `base` units from the anchor: (bytes from the anchor to its bucket, its
    entry, its slot); entry and slot are NO_ENTRY and NO_SLOT where it is not."""
    hash = mix64(key)
    digest = digest_of(hash)
    bucket = home_of(hash, buckets)
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    found_at = tl.zeros_like(key)
    found_entry = tl.full(key.shape, NO_ENTRY, tl.int32)
    found = tl.full(key.shape, NO_SLOT, tl.int32)
    going = live & (buckets > 0)
    passed = 0
    while (tl.max(going.to(tl.int32), axis=0) > 0) & (passed <= REACH):
        at = (base + bucket * BUCKET_UNITS) * UNIT
        seen = digests_at(anchor, at, going)
        flags = entries_with(seen, digest)
        entry = lowest_entry(flags)
        here = tl.full(key.shape, NO_SLOT, tl.int32)
        asks = going & (entry < NO_ENTRY)
        while tl.max(asks.to(tl.int32), axis=0) > 0:
            stored = tl.load(keys + at // 8 + FIRST_KEY + NEXT_KEY * entry, mask=asks, other=0)
            slot = tl.load(anchor + at // 4 + FIRST_SLOT + NEXT_SLOT * entry, mask=asks, other=NO_SLOT)
            # An entry whose digest was taken for the key's may be an empty one.
            hit = asks & (stored == key) & (slot >= 0)
            here = tl.where(hit, slot, here)
            found_at = tl.where(hit, at, found_at)
            found_entry = tl.where(hit, entry, found_entry)
            asks = asks & (hit == 0)
            flags = without(flags, entry)
            entry = tl.where(asks, lowest_entry(flags), entry)
            asks = asks & (entry < NO_ENTRY)
        found = tl.where(going, here, found)
        going = going & (here < 0) & is_marked(seen)
        bucket = next_bucket(bucket, buckets)
        passed += 1
    return found_at, found_entry, found


@triton.jit
def probe(anchor, base, buckets, key, live):
    """The slot of each live key in the buckets at `base` units from the anchor; NO_SLOT where there is none."""
    return probe_entries(anchor, base, buckets, key, live)[2]


@triton.jit
def append(count, flags):
    """Places at the end of a list for the flagged lanes; its length grows by as many."""
    ones = flags.to(tl.int32)
    first = tl.atomic_add(count, tl.sum(ones, axis=0), sem="relaxed")
    return first + tl.cumsum(ones, axis=0) - 1


@triton.jit
def tally(offsets, tables_of, looked, n, batch, features, FEATURES: tl.constexpr):
    """Add every feature's number of keys to its table's; offsets may make no sense."""
    first = 0
    while first < features:
        feature = first + tl.arange(0, FEATURES)
        coded = tl.load(tables_of + feature, mask=feature < features, other=-1)
        here = coded >= 0
        begin = tl.load(offsets + feature.to(tl.int64) * batch, mask=here, other=0).to(tl.int64)
        end = tl.load(offsets + (feature.to(tl.int64) + 1) * batch, mask=here, other=0).to(tl.int64)
        keys = tl.minimum(tl.maximum(end - begin, 0), n)
        tl.atomic_add(looked + (coded >> 2), keys, mask=here, sem="relaxed")
        first += FEATURES


@triton.jit(do_not_specialize=["n", "batch", "features", "stamp"])
def find(
    anchor, tables, values, offsets, tables_of, slots, features_of, tickets, lost, lost_count, looked, missed, bad_bags,
    n, batch, features, stamp,
    INSERT: tl.constexpr, NAME: tl.constexpr, TALLY: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, STAMP: tl.constexpr, TICKET: tl.constexpr,
):  # fmt: skip
    """Slots of a batch, one run of n for each copy. Where INSERT, items that were not found and may be are listed;
    where NAME, `features_of` gets the feature of each item; where TALLY, tables count keys looked up and missed, and
    offsets that do not begin at 0 or end at n count as bad bags; where STAMP, keys that are found are stamped; where
    TICKET, items get one that says whose they are (-1 - table), for those that no bag gives one.

    `tables_of[copy, feature]`: four times the number of the table, plus 1 where keys are inserted, plus 2 where only
    others insert them, and are to be seen; -1 for none.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    live = at < n
    feature = feature_of(offsets, at, batch, features, STEPS)
    coded = tl.load(tables_of + copy * features + feature, mask=live, other=-1)
    live = live & (coded >= 0)
    table = (coded >> 2).to(tl.int64)
    base = tl.load(tables + table * TABLE_COLUMNS + AT, mask=live, other=0)
    buckets = tl.load(tables + table * TABLE_COLUMNS + BUCKETS, mask=live, other=0)
    key = tl.load(values + at, mask=live, other=0).to(tl.int64)
    bucket_at, entry, slot = probe_entries(anchor, base, buckets, key, live)
    if STAMP:
        stamps = anchor + bucket_at // 4 + FIRST_SLOT + NEXT_SLOT * entry + STAMP_BEHIND_SLOT
        tl.store(stamps, tl.zeros_like(slot) + stamp, mask=slot >= 0)
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
            one = tl.min(tl.where(absent, coded >> 2, 0x7FFFFFFF), axis=0)
            alike = tl.sum((absent & (coded >> 2 == one)).to(tl.int32), axis=0)
            tl.atomic_add(missed + one, alike.to(tl.int64), sem="relaxed")
            tl.atomic_add(missed + table, 1, mask=absent & (coded >> 2 != one), sem="relaxed")
        if tl.program_id(0) == 0:
            tally(offsets, tables_of + copy * features, looked, n, batch, features, FEATURES)
            if copy == 0:
                wrong = (tl.load(offsets) != 0) | (tl.load(offsets + features.to(tl.int64) * batch) != n)
                tl.atomic_add(bad_bags, 1, mask=wrong, sem="relaxed")
    if INSERT:
        missing = live & (slot < 0) & ((coded & 3) != 0)
        if tl.sum(missing.to(tl.int32), axis=0) > 0:
            tl.store(lost + append(lost_count, missing), item, mask=missing)


@triton.jit
def rehash(anchor, old_at, old_buckets, new_at, new_buckets, refused, BLOCK: tl.constexpr):
    """The entries of one table's buckets into empty ones, each key once: no claims, only free entries to win."""
    entry = tl.arange(0, BLOCK)
    at = (old_at + tl.program_id(0).to(tl.int64) * BUCKET_UNITS) * UNIT
    digests = anchor.to(tl.pointer_type(tl.uint8), bitcast=True)
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    going = entry < ENTRIES
    seen = tl.load(digests + at + entry, mask=going, other=0)
    going = going & (seen != 0)
    key = tl.load(keys + at // 8 + FIRST_KEY + NEXT_KEY * entry, mask=going, other=0)
    slot = tl.load(anchor + at // 4 + FIRST_SLOT + NEXT_SLOT * entry, mask=going, other=0)
    stamp = tl.load(anchor + at // 4 + FIRST_SLOT + NEXT_SLOT * entry + STAMP_BEHIND_SLOT, mask=going, other=0)
    hash = mix64(key)
    new = tl.zeros_like(key) + new_buckets
    bucket = home_of(hash, new)
    which = tl.zeros_like(entry)
    passed = tl.zeros_like(entry)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        to = (new_at + bucket * BUCKET_UNITS) * UNIT
        # A lane that does not try asks for the word behind the last slot, which is never EMPTY.
        words = anchor + to // 4 + FIRST_SLOT
        target = words + NEXT_SLOT * tl.where(going, which, ENTRIES)
        before = tl.atomic_cas(target, tl.full(entry.shape, EMPTY, tl.int32), slot, sem="relaxed")
        got = going & (before == EMPTY)
        tl.store(digests + to + which, seen, mask=got)
        tl.store(keys + to // 8 + FIRST_KEY + NEXT_KEY * which, key, mask=got)
        tl.store(words + NEXT_SLOT * which + STAMP_BEHIND_SLOT, stamp, mask=got)
        which = which + 1
        full = going & (got == 0) & (which == ENTRIES)
        tl.store(digests + to + ENTRIES, full.to(tl.uint8), mask=full)
        bucket = tl.where(full, next_bucket(bucket, new), bucket)
        which = tl.where(full, 0, which)
        passed = passed + full.to(tl.int32)
        stuck = full & (passed > REACH)
        tl.atomic_add(refused + tl.zeros_like(entry), 1, mask=stuck, sem="relaxed")
        going = going & (got == 0) & (stuck == 0)


@triton.jit
def erase(anchor, at, buckets, keys, slots, n, BLOCK: tl.constexpr):
    """Take keys, each given once, out of one table; `slots` gets the slots they had, or NO_SLOT."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    bucket_at, entry, slot = probe_entries(anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live)
    hit = slot >= 0
    tl.store(anchor + bucket_at // 4 + FIRST_SLOT + NEXT_SLOT * entry, EMPTY, mask=hit)
    tl.store(anchor.to(tl.pointer_type(tl.uint8), bitcast=True) + bucket_at + entry, 0, mask=hit)
    tl.store(slots + lane, slot, mask=live)


@triton.jit
def find_keys(anchor, at, buckets, keys, slots, n, BLOCK: tl.constexpr):
    """Slots of keys in one table."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    slot = probe(anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live)
    tl.store(slots + lane, slot, mask=live)
