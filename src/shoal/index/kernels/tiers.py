"""Keys of a table between its tiers: device memory above pinned host memory. Their rows follow: see
table/device/kernels/move.py.

The tier below has every row of the table, and an index of all keys, both in pinned memory, which kernels reach over the
bus. The tier above has copies of some rows and an index of their keys in device memory; a slot there knows its *home*,
the slot below that its key has, and the key's entry in the index there. A slot is a slot, wherever it is, so a row that
is not above is used in place.

A training batch asks above, then below for what is not there (`find_below`); new keys are born below without their
rows. Then slots above are made free (see victims.py), `claim_above` and `seat` give the wanted keys entries and slots,
and `settle` tells all items their slots.
"""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import FIRST_SLOT, NOT_WON, STAMP_BEHIND_SLOT, entry_keys, probe, probe_entries
from shoal.index.kernels.insert import claim_entries, lost_keys
from shoal.ops.library.items import append
from shoal.ops.library.tables import NO_SLOT

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
    above. Where neither PLACE nor KEEP, `home_at` is not written.
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

    Where not PLACE, no key was seated.
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
