"""Keys to slots in device memory.

A table's index is a run of buckets of 128 bytes: 8 keys, 8 slots and 8 stamps. One access to memory brings a bucket,
and accesses are what a find costs, so there are no digests to look at first. A slot word that is negative is no slot,
so no key is reserved. A key lives in its home bucket or, where that was full, in one of the next; a find goes on until
a bucket has an EMPTY entry, which one that was ever full has not: its erased entries are HOLEs. One launch serves all
tables: their buckets are named by their distance from one anchor.
"""

import triton
import triton.language as tl

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
NO_SLOT = tl.constexpr(-1)
NOT_WON = tl.constexpr(-(1 << 62))
# Behind its home a key goes this far. Only keys that were made to collide need it all: at a load of 0.8 runs of full
# buckets as long as this are not to be expected in any memory (e^-47 for each bucket).
REACH = tl.constexpr(256)
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
def append(count, flags):
    """Places at the end of a list for the flagged lanes; its length grows by as many."""
    ones = flags.to(tl.int32)
    first = tl.atomic_add(count, tl.sum(ones, axis=0), sem="relaxed")
    return first + tl.cumsum(ones, axis=0) - 1


@triton.jit
def tally(offsets, tables_of, looked, n, batch, features, BLOCK: tl.constexpr):
    """Add the number of keys of this program's share of features to their tables'; offsets may make no sense."""
    first = tl.program_id(0) * BLOCK
    while first < features:
        feature = first + tl.arange(0, BLOCK)
        coded = tl.load(tables_of + feature, mask=feature < features, other=-1)
        here = coded >= 0
        begin = tl.load(offsets + feature.to(tl.int64) * batch, mask=here, other=0).to(tl.int64)
        end = tl.load(offsets + (feature.to(tl.int64) + 1) * batch, mask=here, other=0).to(tl.int64)
        keys = tl.minimum(tl.maximum(end - begin, 0), n)
        tl.atomic_add(looked + (coded >> 2), keys, mask=here, sem="relaxed")
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
    """Slots of a batch, one run of n for each copy. Where INSERT, items that were not found and may be are listed, and
    beside them in `lost_of` what `tables_of` says of them. Where NAME, `features_of` gets the feature of each item, and
    offsets that make no sense count as bad bags. Where TALLY, tables count keys looked up and missed, and offsets that
    do not begin at 0 or end at n count as a bad bag. Where STAMP, keys that are found are stamped. Where TICKET, items
    get one that says whose they are (-1 - table), for those that no bag gives one.

    `tables_of[copy, feature]`: four times the number of the table, plus 1 where keys are inserted, plus 2 where only
    others insert them, and are to be seen; -1 for none.
    """
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    live = at < n
    feature = feature_of_run(offsets, first, at, batch, features, BLOCK, STEPS)
    coded = tl.load(tables_of + copy * features + feature, mask=live, other=-1)
    live = live & (coded >= 0)
    table = (coded >> 2).to(tl.int64)
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
            one = tl.min(tl.where(absent, coded >> 2, 0x7FFFFFFF), axis=0)
            alike = tl.sum((absent & (coded >> 2 == one)).to(tl.int32), axis=0)
            tl.atomic_add(missed + one, alike.to(tl.int64), sem="relaxed")
            tl.atomic_add(missed + table, 1, mask=absent & (coded >> 2 != one), sem="relaxed")
        tally(offsets, tables_of + copy * features, looked, n, batch, features, BLOCK)
        if (tl.program_id(0) == 0) & (copy == 0):
            wrong = (tl.load(offsets) != 0) | (tl.load(offsets + features.to(tl.int64) * batch) != n)
            tl.atomic_add(bad_bags, 1, mask=wrong, sem="relaxed")
        if NAME & (copy == 0):
            check_offsets(offsets, bad_bags, n, batch, features, BLOCK)
    if INSERT:
        missing = live & (slot < 0) & ((coded & 3) != 0)
        if tl.sum(missing.to(tl.int32), axis=0) > 0:
            place = append(lost_count, missing)
            tl.store(lost + place, item, mask=missing)
            tl.store(lost_of + place, coded, mask=missing)


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
    # Keys too: what nobody wrote is nobody's to compare with.
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
def find_keys(anchor, at, buckets, keys, slots, n, BLOCK: tl.constexpr):
    """Slots of keys in one table."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    key = tl.load(keys + lane, mask=live, other=0)
    slot = probe(anchor, tl.zeros_like(key) + at, tl.zeros_like(key) + buckets, key, live)
    tl.store(slots + lane, slot, mask=live)
