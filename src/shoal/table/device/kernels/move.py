"""Rows of a table between its tiers, once their keys have slots above: see index/kernels/tiers.py.

A row that comes up to a slot whose last row was changed swaps homes with that row: an access to host memory is mostly
the translation of its address, so one place there is read and then written, not two. `rehome` sets homes and the slot
words of both keys below, `exchange` moves the rows. A row that is only read keeps its home, so that it can leave
without a write: for it, `step_aside` writes the last row down. `bear` writes the last row down to its home, and then
the first row of a new key. `flush` writes down the rows of slots that were taken and that no key was seated on.
`locate` follows an index below that was built anew.
"""

import triton
import triton.language as tl

from shoal.index.kernels.buckets import (
    BUCKET_UNITS,
    EMPTY,
    ENTRIES,
    FIRST_SLOT,
    NOT_WON,
    STAMP_BEHIND_SLOT,
    UNIT,
    entry_number,
    probe_entries,
)
from shoal.index.kernels.insert import lost_keys
from shoal.index.kernels.tiers import (
    DEMOTED,
    POPPED,
    PROMOTED,
    PUSHED,
    RING_AT,
    RING_SIZE,
    TIER_COLUMNS,
    WANTED,
    count_by_table,
    free_slots,
)
from shoal.ops.birth.triton import bear as bear_rows
from shoal.ops.library.rows import weights_at
from shoal.ops.library.tables import AT, BUCKETS, FAMILY, NO_SLOT, TABLE_COLUMNS

DIRTY = tl.constexpr(2)
NOT_DIRTY = tl.constexpr(~2)


@triton.jit
def home_word(anchor, homes, slot, has, SLAB_BITS: tl.constexpr):
    """Where the homes of slots above are."""
    inside = (slot & ((1 << SLAB_BITS) - 1)).to(tl.int64)
    words = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    return words + tl.load(homes + (slot >> SLAB_BITS), mask=has, other=0) + inside


@triton.jit
def home_with(slot, entry):
    """A home: a slot below, and the number of its key's entry in the index there, of up to 32 bits."""
    return (entry << 32) | slot.to(tl.int64)


@triton.jit
def slot_of(home):
    """The slot below, negative where there is no home."""
    return home.to(tl.int32)


@triton.jit
def entry_word(home, base):
    """Where the slot word of the key's entry is, in buckets from `base` units on."""
    entry = (home >> 32) & 0xFFFFFFFF
    return (base + entry // ENTRIES * BUCKET_UNITS) * (UNIT // 4) + FIRST_SLOT + entry % ENTRIES


@triton.jit
def load_row(anchor, at, has, ROW_WORDS: tl.constexpr, R: tl.constexpr):
    """Whole rows that begin so many words from the anchor."""
    word = tl.arange(0, R)[None, :]
    return tl.load(anchor + at[:, None] + word, mask=has[:, None] & (word < ROW_WORDS), other=0)


@triton.jit
def store_row(anchor, at, has, row, dirty, FLAGS_AT: tl.constexpr, ROW_WORDS: tl.constexpr, R: tl.constexpr):
    """Rows, with DIRTY or 0 for that flag."""
    word = tl.arange(0, R)[None, :]
    row = tl.where(word == FLAGS_AT, (row & NOT_DIRTY) | dirty, row)
    tl.store(anchor + at[:, None] + word, row, mask=has[:, None] & (word < ROW_WORDS))


@triton.jit
def owes_row(anchor, slabs, homes, slot, has, FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr):
    """Which slots above have a last row that must be written down, as it has a home and is dirty: (which, where these
    rows are, their homes)."""
    home = tl.load(home_word(anchor, homes, slot, has, SLAB_BITS), mask=has, other=NO_SLOT)
    at = weights_at(slabs, slot, has & (slot_of(home) >= 0), ROW_WORDS // 4, SLAB_BITS) * 4
    flags = tl.load(anchor + at + FLAGS_AT, mask=has & (slot_of(home) >= 0), other=0)
    return has & (slot_of(home) >= 0) & ((flags & DIRTY) != 0), at, home


@triton.jit
def write_down(
    anchor, slabs, homes, slot, has,
    FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the last rows of slots above down to their homes, where they must be; returns which."""
    owes, at, home = owes_row(anchor, slabs, homes, slot, has, FLAGS_AT, SLAB_BITS, ROW_WORDS)
    row = load_row(anchor, at, owes, ROW_WORDS, R)
    to = weights_at(slabs, slot_of(home), owes, ROW_WORDS // 4, SLAB_BITS) * 4
    tl.debug_barrier()
    store_row(anchor, to, owes, row, 0, FLAGS_AT, ROW_WORDS, R)
    return owes


@triton.jit(do_not_specialize=["n", "family", "weight_stride", "tail_stride"])
def bear(
    anchor, slabs, homes, tables, tiers, inits, scales, first_state, normal, steps, values, slots, lost, lost_of,
    lost_count, won_at, n, family, weight_stride, tail_stride,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, HAS_NORMAL: tl.constexpr, SLAB_BITS: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, S: tl.constexpr, FLAGS_AT: tl.constexpr,
    ROW_WORDS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First rows of the keys that were born below, at their slots: most often above. `won_at`: their entries below."""
    total = tl.load(lost_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        at = tl.load(won_at + lane, mask=lane < total, other=NOT_WON)
        live = at != NOT_WON
        item, _position, key, table, _inserts, base, _buckets = lost_keys(values, tables, lost, lost_of, lane, live, n)
        mine = live & (tl.load(tables + table * TABLE_COLUMNS + FAMILY, mask=live, other=-1) == family)
        home = tl.load(anchor + at, mask=mine, other=NO_SLOT)
        born = mine & (home >= 0)
        slot = tl.load(slots + item, mask=born, other=0)
        above = born & (slot != home)
        owed = write_down(anchor, slabs, homes, slot, above, FLAGS_AT, SLAB_BITS, ROW_WORDS, R)
        tl.atomic_add(tiers + table * TIER_COLUMNS + DEMOTED, 1, mask=owed, sem="relaxed")
        bear_rows(
            anchor, slabs, inits, scales, first_state, normal, steps, table, key, slot, born, weight_stride,
            tail_stride, WEIGHTS, WEIGHT_BYTES, HAS_NORMAL, SLAB_BITS, DIM, D, STATE, S, BLOCK,
        )  # fmt: skip
        settled = home_with(home, entry_number(at, base))
        tl.store(home_word(anchor, homes, slot, above, SLAB_BITS), settled, mask=above)
        first += tl.num_programs(0) * BLOCK


@triton.jit
def seated_rows(tables, seated, seated_from, seated_of, seated_at, lane, total, family):
    """What a block of the list of seated keys is about: (slot above, slot below, table, whether the row will change,
    where its word below is, which are of the family and have a row to bring up)."""
    live = lane < total
    slot = tl.load(seated + lane, mask=live, other=0)
    home = tl.load(seated_from + lane, mask=live, other=0)
    coded = tl.load(seated_of + lane, mask=live, other=0).to(tl.int64)
    table = coded >> 1
    at = tl.load(seated_at + lane, mask=live, other=NOT_WON)
    mine = tl.load(tables + table * TABLE_COLUMNS + FAMILY, mask=live, other=-1) == family
    return slot, home, table, (coded & 1) == 1, at, (at != NOT_WON) & mine


@triton.jit(do_not_specialize=["family"])
def step_aside(
    anchor, slabs, homes, tables, tiers, seated, seated_from, seated_of, seated_at, seated_count, family,
    FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the last rows of slots down to their homes, where the rows that come will not change: these keep their
    own, and need not be written down in turn."""
    total = tl.load(seated_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        slot, _own, table, changes, _at, comes = seated_rows(
            tables, seated, seated_from, seated_of, seated_at, lane, total, family
        )
        stays = comes & (changes == 0)
        if tl.max(stays.to(tl.int32), axis=0) > 0:
            owed = write_down(anchor, slabs, homes, slot, stays, FLAGS_AT, SLAB_BITS, ROW_WORDS, R)
            count_by_table(tiers + DEMOTED, table, owed, TIER_COLUMNS)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["family", "pinned_from"])
def rehome(
    anchor, slabs, homes, tables, tiers, seated, seated_from, seated_of, seated_at, seated_count, family, pinned_from,
    FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr, AGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Homes for the keys that were seated: their own or, where they will change and the last row of their slot must be
    written down, that row's, whose key takes theirs. Rows are as before. Where AGES, the index below hears that these
    keys were used: as late as one can be that is not in use."""
    total = tl.load(seated_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        slot, own, table, changes, at, comes = seated_rows(
            tables, seated, seated_from, seated_of, seated_at, lane, total, family
        )
        swaps, _row, last = owes_row(anchor, slabs, homes, slot, comes & changes, FLAGS_AT, SLAB_BITS, ROW_WORDS)
        base = tl.load(tables + table * TABLE_COLUMNS + AT, mask=comes, other=0)
        home = tl.where(swaps, slot_of(last), own)
        tl.store(anchor + at, home, mask=swaps)
        tl.store(anchor + entry_word(last, base), own, mask=swaps)
        if AGES:
            age = tl.zeros_like(own) + pinned_from - 1
            tl.store(anchor + entry_word(last, base) + STAMP_BEHIND_SLOT, age, mask=swaps)
        place = home_word(anchor, homes, slot, comes, SLAB_BITS)
        tl.store(place, home_with(home, entry_number(at, base)), mask=comes)
        count_by_table(tiers + PROMOTED, table, comes, TIER_COLUMNS)
        count_by_table(tiers + DEMOTED, table, swaps, TIER_COLUMNS)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["family"])
def exchange(
    anchor, slabs, homes, tables, seated, seated_from, seated_of, seated_at, seated_count, family,
    FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring the rows of seated keys up. Where one has got another home, it was the last row's, which is put where the
    key's own was."""
    total = tl.load(seated_count)
    first = tl.program_id(0) * BLOCK
    while first < total:
        lane = first + tl.arange(0, BLOCK)
        slot, own, _table, _changes, _at, comes = seated_rows(
            tables, seated, seated_from, seated_of, seated_at, lane, total, family
        )
        below = weights_at(slabs, own, comes, ROW_WORDS // 4, SLAB_BITS) * 4
        above = weights_at(slabs, slot, comes, ROW_WORDS // 4, SLAB_BITS) * 4
        home = tl.load(home_word(anchor, homes, slot, comes, SLAB_BITS), mask=comes, other=NO_SLOT)
        swaps = comes & (slot_of(home) != own)
        row = load_row(anchor, below, comes, ROW_WORDS, R)
        last = load_row(anchor, above, swaps, ROW_WORDS, R)
        tl.debug_barrier()
        store_row(anchor, below, swaps, last, 0, FLAGS_AT, ROW_WORDS, R)
        dirty = tl.where(swaps, DIRTY, 0)[:, None]  # its home has no copy
        store_row(anchor, above, comes, row, dirty, FLAGS_AT, ROW_WORDS, R)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["number"])
def locate(anchor, tables, below, homes, number, SLAB_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Set which entries the keys above have in the index below, which was built anew. `tables` and `below`: where both
    indexes are; of one table."""
    base = tl.load(tables + number * TABLE_COLUMNS + AT)
    entries = tl.load(tables + number * TABLE_COLUMNS + BUCKETS) * ENTRIES
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = (base + lane // ENTRIES * BUCKET_UNITS) * UNIT
    slot = tl.load(anchor + at // 4 + FIRST_SLOT + lane % ENTRIES, mask=lane < entries, other=EMPTY)
    keys = anchor.to(tl.pointer_type(tl.int64), bitcast=True)
    key = tl.load(keys + at // 8 + lane % ENTRIES, mask=slot >= 0, other=0)
    base_below = tl.load(below + number * TABLE_COLUMNS + AT) + tl.zeros_like(key)
    buckets_below = tl.load(below + number * TABLE_COLUMNS + BUCKETS) + tl.zeros_like(key)
    bucket_at, _ends, entry, home = probe_entries(anchor, base_below, buckets_below, key, slot >= 0)
    found = entry_number(bucket_at // 4 + FIRST_SLOT + entry, base_below)
    tl.store(home_word(anchor, homes, slot, home >= 0, SLAB_BITS), home_with(home, found), mask=home >= 0)


@triton.jit(do_not_specialize=["family"])
def flush(
    anchor, slabs, homes, tables, tiers, numbers, asked_count, family,
    FLAGS_AT: tl.constexpr, SLAB_BITS: tl.constexpr, ROW_WORDS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write down the rows of slots that were taken from their keys and that no key was seated on. Programs of the
    second axis are tables."""
    number = tl.load(numbers + tl.program_id(1))
    tier = tiers + number * TIER_COLUMNS
    mine = tl.load(tables + number * TABLE_COLUMNS + FAMILY) == family
    if mine & (tl.load(asked_count) > 0) & (tl.load(tier + WANTED) > 0):
        popped, size, ring = tl.load(tier + POPPED), tl.load(tier + RING_SIZE), tl.load(tier + RING_AT)
        end = popped + free_slots(tier)
        first = tl.maximum(popped, tl.load(tier + PUSHED)) + tl.program_id(0).to(tl.int64) * BLOCK
        while first < end:
            lane = first + tl.arange(0, BLOCK)
            has = lane < end
            slot = tl.load(anchor + ring + lane % size, mask=has, other=0)
            owed = write_down(anchor, slabs, homes, slot, has, FLAGS_AT, SLAB_BITS, ROW_WORDS, R)
            tl.store(home_word(anchor, homes, slot, has, SLAB_BITS), tl.zeros_like(lane) + NO_SLOT, mask=has)
            tl.atomic_add(tier + DEMOTED, tl.sum(owed.to(tl.int64), axis=0), sem="relaxed")
            first += tl.num_programs(0).to(tl.int64) * BLOCK
