"""Keys of a table between its tiers: device memory above pinned host memory. Their rows follow: see ops/move.

The tier below has every row of the table, and an index of all keys, both in pinned memory, which kernels reach over the
bus. The tier above has copies of some rows and an index of their keys in device memory; a slot there knows its *home*,
the slot below that its key has, and the key's entry in the index there. A slot is a slot, wherever it is, so a row that
is not above is used in place.

A training batch asks above, then below for what is not there (`find_below`); new keys are born below without their
rows. Then rows come up: `choose` finds how many slots are lacking and which stamp is old, `take_victims` takes the
entries of keys with older stamps away, `claim_above` and `seat` give the wanted keys entries and slots, `settle` tells
all items their slots. Once the rows have moved, `go_back` lets keys return to where they are looked for first, and
`clean` makes entries EMPTY again where no key went on.
"""

import triton
import triton.language as tl

from shoal.ops.find.triton import (
    AT,
    BUCKET_UNITS,
    BUCKETS,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    HOLE,
    IDLE_WORD,
    NO_SLOT,
    NOT_WON,
    REACH,
    STAMP_BEHIND_SLOT,
    TABLE_COLUMNS,
    UNIT,
    append,
    has_empty,
    home_of,
    keys_at,
    mix64,
    next_bucket,
    probe,
    probe_entries,
    slots_at,
    slots_now,
)
from shoal.ops.insert.triton import claim_entries, entry_keys, lost_keys

# Columns of a table's tier above.
TIER_COLUMNS = tl.constexpr(16)
TIERED = tl.constexpr(0)  # whether there is one
# Free slots: a ring of so many words, at so many from the anchor. PUSHED entered it before this batch and POPPED left.
RING_AT = tl.constexpr(1)
RING_SIZE = tl.constexpr(2)
PUSHED = tl.constexpr(3)
POPPED = tl.constexpr(4)
# Of the batch: items that are not above; slots to be taken from other keys, what stamps those have less than, and how
# many were found (of which no more than wanted are taken); items that asked for a slot.
NEEDED = tl.constexpr(5)
WANTED = tl.constexpr(6)
OLD = tl.constexpr(7)
FOUND = tl.constexpr(8)
ASKED = tl.constexpr(9)
# Of the keys with the youngest stamp that is old, so many in 2^16 go.
SHARE = tl.constexpr(13)
ALL = tl.constexpr(1 << 16)
# Keys go back each time that one in so many of the slots was given up.
PARTS = tl.constexpr(32)
# The last batch that used a row in place.
IN_PLACE = tl.constexpr(10)
# Rows that came up, and rows that were written down.
PROMOTED = tl.constexpr(11)
DEMOTED = tl.constexpr(12)


@triton.jit
def count_by_table(counts, table, which, STRIDE: tl.constexpr):
    """Add the flagged lanes to their tables' counts, those of one table at once."""
    rest = which
    while tl.max(rest.to(tl.int32), axis=0) > 0:
        one = tl.min(tl.where(rest, table, 0x7FFFFFFF), axis=0)
        these = rest & (table == one)
        tl.atomic_add(counts + one * STRIDE, tl.sum(these.to(tl.int64), axis=0), sem="relaxed")
        rest = rest & (these == 0)


@triton.jit
def free_slots(tier):
    """How many slots the ring holds by now."""
    found = tl.minimum(tl.load(tier + FOUND), tl.load(tier + WANTED))
    return tl.load(tier + PUSHED) + found - tl.load(tier + POPPED)


@triton.jit(do_not_specialize=["n"])
def find_below(
    anchor, tables, tiers, values, slots, asked, asked_of, asked_count, home_at, lost, lost_of, lost_count, missed, n,
    INSERT: tl.constexpr, PLACE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots below of the listed items, which are not above; `home_at` gets where the slot word is, or NOT_WON.

    Where INSERT, items without a row are listed, of tables with one tier too. Where PLACE, tables count what they need
    above. Where neither PLACE nor KEEP, nobody asks for `home_at`.
    """
    total = tl.load(asked_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        item, _position, key, table, _inserts, base, buckets = lost_keys(values, tables, asked, asked_of, lane, live, n)
        tiered = live & (tl.load(tiers + table * TIER_COLUMNS + TIERED, mask=live, other=0) != 0)
        bucket_at, _ends, entry, slot = probe_entries(anchor, base, buckets, key, tiered)
        tl.store(slots + item, slot, mask=tiered)
        missing = live & (slot < 0)
        count_by_table(missed, table, missing & tiered, 1)
        if PLACE or KEEP:
            place = tl.where(slot >= 0, bucket_at // 4 + FIRST_SLOT + entry, NOT_WON)
            tl.store(home_at + lane, place, mask=live)
        if PLACE:
            count_by_table(tiers + NEEDED, table, tiered, TIER_COLUMNS)
        if INSERT:
            to = append(lost_count, missing)
            tl.store(lost + to, item, mask=missing)
            tl.store(lost_of + to, tl.load(asked_of + lane, mask=missing, other=0), mask=missing)
        first += tl.num_programs(0) * BLOCK


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

    Each time they go from every other bucket to those between: so nobody looks at an entry that another one is writing.
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
            # Nobody went on behind a bucket with an EMPTY entry.
            going = inside & (has_empty(words) == 0)
            if tl.max(going.to(tl.int32), axis=0) > 0:
                at = before_at + BUCKET_UNITS * UNIT
                held, theirs = slots_at(anchor, at, going), keys_at(anchor, at, going)
                # Those that went on behind the last bucket stay.
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
            # Keys behind it that went past it: they are further from home than from here.
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
            # Whoever is still going looked as far as any key goes.
            places = (anchor + at // 4 + FIRST_SLOT)[:, None] + tl.arange(0, ENTRIES)[None, :]
            empties = (holes & (passed == 0))[:, None] & (words == HOLE)
            tl.store(places, tl.zeros_like(words) + EMPTY, mask=empties)
            first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def has_room(tiers, table, wants):
    """Which of the lanes have a free slot in their table's ring."""
    fits = table < 0
    rest = wants
    while tl.max(rest.to(tl.int32), axis=0) > 0:
        one = tl.min(tl.where(rest, table, 0x7FFFFFFF), axis=0)
        tier = tiers + one * TIER_COLUMNS
        these = rest & (table == one)
        ones = these.to(tl.int32)
        before = tl.atomic_add(tier + ASKED, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        fits = fits | (these & (before + tl.cumsum(ones, axis=0) <= free_slots(tier)))
        rest = rest & (these == 0)
    return fits


@triton.jit(do_not_specialize=["n", "held_from"])
def claim_above(
    anchor, tables, tiers, values, slots, asked, asked_of, asked_count, home_at, won_at, dummy, n, held_from,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """An entry above for the keys of listed items that have a row, claimed by one of their items as in `claim`.

    Only as many ask as there are slots, so no entry is given up. A row that a batch at work uses in place stays there:
    that one's update must find it. It is stamped with `held_from` or more, as others may be that are on their way;
    these are used in place too, then.
    """
    total = tl.load(asked_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        item, position, key, table, _inserts, base, buckets = lost_keys(values, tables, asked, asked_of, lane, live, n)
        tier = tiers + table * TIER_COLUMNS
        home = tl.load(slots + item, mask=live, other=NO_SLOT)
        wants = live & (home >= 0) & (tl.load(tier + RING_SIZE, mask=live, other=0) > 0)
        used = wants & (tl.load(tier + IN_PLACE, mask=wants, other=0) >= held_from)
        if tl.max(used.to(tl.int32), axis=0) > 0:
            at = tl.load(home_at + lane, mask=used, other=NOT_WON)
            used = used & (at != NOT_WON)
            last = tl.load(anchor + at + STAMP_BEHIND_SLOT, mask=used, other=0)
            wants = wants & ((used == 0) | (last < held_from))
        wants = has_room(tiers, table, wants)
        taken, _refused = claim_entries(anchor, values, key, position, base, buckets, wants, dummy)
        tl.store(won_at + lane, taken, mask=live)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["n", "stamp"])
def seat(
    anchor, tables, tiers, values, slots, asked, asked_of, asked_count, home_at, won_at, seated, seated_from, seated_of,
    seated_at, seated_count, n, stamp,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots above for the claimed entries. `seated` gets a list of them, `seated_from` the slots below, `seated_of`
    twice their tables, plus 1 where the batch will change the row, and `seated_at` where the slot words below are,
    NOT_WON for keys that are born now."""
    total = tl.load(asked_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        at = tl.load(won_at + lane, mask=lane < total, other=NOT_WON)
        has = at != NOT_WON
        item, position, key, table, trains, base, _buckets = lost_keys(values, tables, asked, asked_of, lane, has, n)
        home = tl.load(slots + item, mask=has, other=NO_SLOT)
        slot = tl.zeros_like(position)
        rest = has
        while tl.max(rest.to(tl.int32), axis=0) > 0:
            one = tl.min(tl.where(rest, table, 0x7FFFFFFF), axis=0)
            tier = tiers + one * TIER_COLUMNS
            these = rest & (table == one)
            ones = these.to(tl.int32)
            before = tl.atomic_add(tier + POPPED, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
            place = (before + tl.cumsum(ones, axis=0) - 1) % tl.load(tier + RING_SIZE)
            slot = tl.where(these, tl.load(anchor + tl.load(tier + RING_AT) + place, mask=these, other=0), slot)
            rest = rest & (these == 0)
        tl.store(anchor + at, slot, mask=has)
        tl.store(anchor + at + STAMP_BEHIND_SLOT, tl.zeros_like(slot) + stamp, mask=has)
        tl.store(entry_keys(anchor, at, base), key, mask=has)
        tl.store(slots + item, slot, mask=has)
        to = append(seated_count, has)
        tl.store(seated + to, slot, mask=has)
        tl.store(seated_from + to, home, mask=has)
        tl.store(seated_of + to, (table * 2 + trains).to(tl.int32), mask=has)
        tl.store(seated_at + to, tl.load(home_at + lane, mask=has, other=NOT_WON), mask=has)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["n", "stamp"])
def settle(
    anchor, tables, tiers, values, slots, asked, asked_of, asked_count, home_at, won_at, n, stamp,
    PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of listed items whose key another one seated. Those below that are used in place are stamped there.

    Where not PLACE, nobody was seated.
    """
    total = tl.load(asked_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        live = lane < total
        item, _position, key, table, _inserts, base, buckets = lost_keys(values, tables, asked, asked_of, lane, live, n)
        tier = tiers + table * TIER_COLUMNS
        has = live & (tl.load(tier + TIERED, mask=live, other=0) != 0)
        has = has & (tl.load(slots + item, mask=has, other=NO_SLOT) >= 0)
        if PLACE:
            has = has & (tl.load(won_at + lane, mask=has, other=NOT_WON) == NOT_WON)
            above = probe(anchor, base, buckets, key, has)
            tl.store(slots + item, above, mask=has & (above >= 0))
            has = has & (above < 0)
        tl.store(tier + IN_PLACE, (tl.zeros_like(item) + stamp).to(tl.int64), mask=has)
        at = tl.load(home_at + lane, mask=has, other=NOT_WON)
        # A key that is born now was stamped at its birth.
        tl.store(anchor + at + STAMP_BEHIND_SLOT, tl.zeros_like(item) + stamp, mask=has & (at != NOT_WON))
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["stamp"])
def pin(anchor, asked_count, home_at, stamp, BLOCK: tl.constexpr):
    """Stamp the listed items whose rows are below: they are needed soon."""
    total = tl.load(asked_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        at = tl.load(home_at + lane, mask=lane < total, other=NOT_WON)
        has = at != NOT_WON
        last = tl.load(anchor + at + STAMP_BEHIND_SLOT, mask=has, other=stamp)
        tl.store(anchor + at + STAMP_BEHIND_SLOT, tl.zeros_like(last) + stamp, mask=last < stamp)
        first += tl.num_programs(0) * BLOCK
