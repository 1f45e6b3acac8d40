"""Output gradients to row gradients, and the optimizers' steps, in device memory.

The items of a batch come sorted by slot, cut into chunks of equal length, so that a key with a hundred thousand items
is no more work for anyone than a hundred thousand keys. A row whose items lie in one chunk is updated there. Of a row
that crosses chunks each chunk leaves its share of the sum, and `update_crossing` adds the shares up, in order. So sums
are the same from run to run.
"""

import triton
import triton.language as tl

from shoal.ops.birth.triton import (
    CHANGED_AND_DIRTY,
    ERASED,
    INIT_COLUMNS,
    ZEROS,
    first_row,
    nearest,
    philox,
    score_at,
    tails_at,
    weights_at,
)
from shoal.ops.find.triton import FAMILY, TABLE_COLUMNS, feature_of, mix64
from shoal.ops.pool.triton import (
    BLANK,
    COLUMN,
    COPY,
    MEAN,
    PART_COLUMNS,
    SILENT,
    SOURCE,
    TABLE,
    TICKET_BITS,
    TICKET_MASK,
)

# Columns of a table's settings (float64); the optimizer's own follow.
HYPER_COLUMNS = tl.constexpr(16)
LR = tl.constexpr(0)
WEIGHT_DECAY = tl.constexpr(1)
SHRINK = tl.constexpr(2)
CLIP_VALUE = tl.constexpr(3)
CLIP_NORM = tl.constexpr(4)
MAX_NORM = tl.constexpr(5)
SETTINGS = tl.constexpr(6)

SUM = tl.constexpr(0)
MEAN_OF = tl.constexpr(1)
FIRST = tl.constexpr(2)
LAST = tl.constexpr(3)

# Columns of what an update counts, by table.
COUNT_COLUMNS = tl.constexpr(2)
DROPPED = tl.constexpr(0)
OVERFLOWED = tl.constexpr(1)
# Where the gradient of an item without one would be.
NOWHERE = tl.constexpr((1 << 40) - 1)
# The largest sum of squares of a row's gradient: beyond it, optimizers would keep infinity.
MOST_SQUARES = tl.constexpr(1e30)


@triton.jit
def factor_to(norm, row):
    """The factor that brings each row down to an L2 norm; 1 where it is not above it. Its squares may overflow."""
    largest = tl.max(tl.abs(row), axis=1)
    safe = tl.where(largest > 0.0, largest, 1.0)
    scaled = row / safe[:, None]
    length = tl.sqrt(tl.sum(scaled * scaled, axis=1))
    above = safe * length > norm  # it may be infinite: the factor is not made from it
    return tl.where(above, norm / safe / tl.where(above, length, 1.0), 1.0)


@triton.jit
def stochastic_bf16(x, word):
    bits = x.to(tl.uint32, bitcast=True)
    truncated = bits & 0xFFFF0000
    raised = (bits + (word & 0xFFFF)) & 0xFFFF0000
    kept = tl.where((raised & 0x7F800000) == 0x7F800000, truncated, raised)
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def stochastic_f16(x, word):
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 16) & 0x8000
    body = bits & 0x7FFFFFFF
    scaled = body.to(tl.float32, bitcast=True) * 16777216.0
    tiny = body < 0x38800000
    whole = tl.where(tiny, scaled, 0.0).to(tl.int32)
    up = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 < scaled - whole.to(tl.float32)
    small = whole.to(tl.uint32) + up.to(tl.uint32)
    raised = tl.minimum((body + (word & 0x1FFF)) >> 13, 0x477FE000 >> 13)
    made = tl.where(tiny, small, raised - (112 << 10))
    rounded = (sign | made).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where(body >= 0x7F800000, x.to(tl.float16), rounded)


@triton.jit
def apply_rows(
    anchor, slabs, hyper, inits, steps, scores, counts, slot, table, key, gradient, do, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """One optimizer step on each row of `slot` where `do`: [g] slots, tables and keys, [g, d] gradients.

    PLAIN: no table of the family clips, decays or bounds its rows.
    """
    element = tl.arange(0, D)
    inside = (element < DIM)[None, :]
    tail_at = tails_at(slabs, slot, do, tail_stride, SLAB_BITS)
    tail = anchor + tail_at * 4
    flags_at = tail + score_at(STATE) + 2
    row_at = weights_at(slabs, slot, do, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
    weights = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True) + row_at[:, None] + element[None, :]
    settings = hyper + table * HYPER_COLUMNS
    flags = tl.load(flags_at, mask=do, other=0)
    w = tl.load(weights, mask=do[:, None] & inside, other=0.0).to(tl.float32)
    erased = do & ((flags & ERASED) != 0)
    going = do & (erased == 0)
    finite = gradient - gradient == 0.0
    if PLAIN == 0:
        finite = tl.where(do[:, None] & inside, finite, True)
        top = tl.load(settings + CLIP_VALUE, mask=do, other=0.0).to(tl.float32)[:, None]
        gradient = tl.where(top > 0.0, tl.minimum(tl.maximum(gradient, -top), top), gradient)
        norm = tl.load(settings + CLIP_NORM, mask=do, other=0.0).to(tl.float32)
        factor = tl.where(norm > 0.0, factor_to(norm, gradient), 1.0)[:, None]
        gradient = tl.where(factor < 1.0, gradient * factor, gradient)
        decay = tl.load(settings + WEIGHT_DECAY, mask=do, other=0.0).to(tl.float32)[:, None]
        gradient = tl.where(decay > 0.0, gradient + decay * w, gradient)
        # A limit would make a number of what is none.
        bad = tl.max(tl.where(finite, 0, 1), axis=1) > 0
        squares = tl.where(bad, float("inf"), tl.sum(gradient * gradient, axis=1))
    else:
        squares = tl.sum(gradient * gradient, axis=1)
    fits = squares <= MOST_SQUARES
    overflowed = going & (fits == 0)
    going = going & fits
    tl.atomic_add(counts + table * COUNT_COLUMNS + DROPPED, 1, mask=erased)
    tl.atomic_add(counts + table * COUNT_COLUMNS + OVERFLOWED, 1, mask=overflowed)
    step = tl.load(steps + table, mask=do, other=0)
    if PLAIN == 0:
        w = w * tl.load(settings + SHRINK, mask=do, other=1.0).to(tl.float32)[:, None]
    state = anchor.to(tl.pointer_type(tl.float32), bitcast=True) + tail_at * 4
    w = STEP(w, gradient, squares, state, settings, settings + SETTINGS, step + 1, element, inside, going, DIM)
    if PLAIN == 0:
        bound = tl.load(settings + MAX_NORM, mask=do, other=0.0).to(tl.float32)
        shorter = tl.where(bound > 0.0, factor_to(bound, w), 1.0)[:, None]
        w = tl.where(shorter < 1.0, w * shorter, w)
    if WEIGHT_BYTES == 2:
        stream = tl.load(inits + table * INIT_COLUMNS + 2, mask=do, other=0).to(tl.uint64) ^ mix64(step >> 32)
        word = philox(stream[:, None], key[:, None], element[None, :], (step & 0xFFFFFFFF)[:, None])
        if tl.bfloat16 == WEIGHTS:
            tl.store(weights, stochastic_bf16(w, word), mask=going[:, None] & inside)
        else:
            tl.store(weights, stochastic_f16(w, word), mask=going[:, None] & inside)
    else:
        tl.store(weights, w, mask=going[:, None] & inside)
    score = tl.load(scores + table, mask=going, other=0).to(tl.float64)
    scored = anchor.to(tl.pointer_type(tl.float64), bitcast=True) + tail_at * 2 + score_at(STATE) // 2
    older = tl.load(scored, mask=going, other=0.0) < score
    tl.store(scored, score, mask=going & older)
    tl.store(flags_at, flags | CHANGED_AND_DIRTY, mask=going)


@triton.jit(do_not_specialize=["n", "batch", "features", "family", "tail_stride"])
def touch(
    anchor, slabs, tables, tables_of, offsets, slots, steps, n, batch, features, family, tail_stride,
    SLAB_BITS: tl.constexpr, STATE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score the rows of one family that a batch used, where its parts train."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    slot = tl.load(slots + copy * n + i, mask=i < n, other=-1)
    feature = feature_of(offsets, i, batch, features, STEPS)
    coded = tl.load(tables_of + copy * features + feature, mask=i < n, other=0)
    table = (coded >> 2).to(tl.int64)
    live = (slot >= 0) & ((coded & 1) == 1)
    live = live & (tl.load(tables + table * TABLE_COLUMNS + FAMILY, mask=live, other=-1) == family)
    tail_at = tails_at(slabs, slot, live, tail_stride, SLAB_BITS)
    score = tl.load(steps + table, mask=live, other=0).to(tl.float64)
    scored = anchor.to(tl.pointer_type(tl.float64), bitcast=True) + tail_at * 2 + score_at(STATE) // 2
    flags_at = anchor + tail_at * 4 + score_at(STATE) + 2
    older = live & (tl.load(scored, mask=live, other=0.0) < score)
    tl.store(scored, score, mask=older)
    tl.store(flags_at, tl.load(flags_at, mask=older, other=0) | CHANGED_AND_DIRTY, mask=older)


@triton.jit(do_not_specialize=["n", "batch", "features"])
def aim(slots, tables_of, offsets, targets, n, batch, features, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of items whose parts train; -1 for the others."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    feature = feature_of(offsets, i, batch, features, STEPS)
    coded = tl.load(tables_of + copy * features + feature, mask=i < n, other=0)
    slot = tl.load(slots + copy * n + i, mask=i < n, other=-1)
    tl.store(targets + copy * n + i, tl.where((coded & 1) == 1, slot, -1), mask=i < n)


@triton.jit
def add_in_segment(flag, sum, later_flag, later_sum):
    return flag | later_flag, tl.where(later_flag != 0, later_sum, sum + later_sum)


@triton.jit
def first_in_segment(flag, value, later_flag, later_value):
    return flag | later_flag, tl.where(later_flag != 0, later_value, value)


@triton.jit
def reduce_rows(begins, rows, REDUCE: tl.constexpr, ITEMS: tl.constexpr, D: tl.constexpr):
    """For each item, what the items of its row so far make together."""
    flags = tl.broadcast_to(begins.to(tl.int32)[:, None], (ITEMS, D))
    if REDUCE == LAST:
        return rows
    if REDUCE == FIRST:
        return tl.associative_scan((flags, rows), 0, first_in_segment)[1]
    return tl.associative_scan((flags, rows), 0, add_in_segment)[1]


@triton.jit(do_not_specialize=["total", "n"])
def deal(
    sorted_slots, order, tickets, parts, moved, item_shares, values, dealt, dealt_shares, dealt_keys, total, n,
    MOVED: tl.constexpr, SHARED: tl.constexpr, KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the update needs of each item, in sorted order: all at once, as one load waits for another.

    The tickets' parts become tables. Where MOVED, gradients do not lie as the outputs did: `moved[part]` elements away.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Items without a row to update may have no ticket.
    live = tl.load(sorted_slots + at, mask=at < total, other=-1) >= 0
    item = tl.load(order + at, mask=live, other=0)
    ticket = tl.load(tickets + item, mask=live, other=-1)
    # An item of a bad bag has none: it brings no gradient to its row.
    given = ticket >= 0
    part = tl.where(given, ticket >> TICKET_BITS, 0)
    place = tl.where(given, ticket & TICKET_MASK, NOWHERE)
    if MOVED:
        place = place + tl.load(moved + part, mask=given, other=0)
    table = tl.load(parts + part * PART_COLUMNS + TABLE, mask=live, other=0)
    tl.store(dealt + at, (table << TICKET_BITS) + place, mask=live)
    if SHARED:
        tl.store(dealt_shares + at, tl.load(item_shares + item, mask=live, other=0.0), mask=live)
    if KEYED:
        tl.store(dealt_keys + at, tl.load(values + item % n, mask=live, other=0).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["total", "family", "weight_stride", "tail_stride"])
def update(
    anchor, slabs, families, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_shares, dealt_keys,
    grads, sums, sum_counts, inverse_scale, skip, total, family, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, ALONE: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, LENGTH: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """One chunk of LENGTH sorted items, ITEMS at a time: rows that lie in it are updated, sums of the others kept.

    `sums[2 c]` is chunk c's part of a row that began before it, `sums[2 c + 1]` of one that goes on behind it.
    SHARED: `dealt_shares` has a factor for every item. ALIGNED: gradients begin at multiples of four elements. ALONE:
    the group has no other family.
    """
    if SCALED:  # noqa: SIM102 (a constant; what is below it is not compiled otherwise)
        if tl.load(skip) != 0:
            return
    chunk = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, D)
    inside = (element < DIM)[None, :]
    number = tl.arange(0, ITEMS)
    first = chunk * LENGTH
    carried = tl.zeros((D,), tl.float32)
    carried_items = 0.0
    is_open = first > 0  # the row that the chunk begins with began before it
    slot_ahead = tl.load(sorted_slots + first + number, mask=first + number < total, other=-1)
    ticket_ahead = tl.load(dealt + first + number, mask=first + number < total, other=0)
    for r in range(0, LENGTH, ITEMS):
        at = first + r + number
        slot = slot_ahead
        ticket = ticket_ahead
        if LENGTH > ITEMS:
            slot_ahead = tl.load(sorted_slots + at + ITEMS, mask=at + ITEMS < total, other=-1)
            ticket_ahead = tl.load(dealt + at + ITEMS, mask=at + ITEMS < total, other=0)
        behind = tl.load(sorted_slots + at + 1, mask=at + 1 < total, other=-1)
        before = tl.load(sorted_slots + at - 1, mask=(at > 0) & (at < total), other=-2)
        live = slot >= 0
        if ALONE == 0:
            live = live & (tl.load(families + (slot >> SLAB_BITS), mask=live, other=-1) == family)
        table = ticket >> TICKET_BITS
        begin = ticket & TICKET_MASK
        given = (live & (begin != NOWHERE))[:, None]
        if ALIGNED:
            begin = begin // 4 * 4
        rows = tl.load(grads + begin[:, None] + element[None, :], mask=given & inside, other=0.0).to(tl.float32)
        if SHARED:
            rows = rows * tl.load(dealt_shares + at, mask=live, other=0.0)[:, None]
        if SCALED:
            rows = rows * tl.load(inverse_scale)
        begins = slot != before
        at_start = (number == 0) & (begins == 0)
        # What came before in this row counts as a part of the first item.
        if REDUCE == FIRST:
            if r > 0:
                rows = tl.where(at_start[:, None], carried[None, :], rows)
        elif REDUCE != LAST:
            rows = rows + tl.where(at_start[:, None], carried[None, :], 0.0)
        reduced = reduce_rows(begins, rows, REDUCE, ITEMS, D)
        crossing = (tl.cumsum(begins.to(tl.int32), axis=0) == 0) & is_open
        ends = live & (behind != slot)
        last = live & (ends == 0) & (r + number == LENGTH - 1)
        kept = (ends & crossing) | last
        place = 2 * chunk + (last & (crossing == 0)).to(tl.int64)
        tl.store(sums + place[:, None] * D + element[None, :], reduced, mask=kept[:, None])
        if REDUCE == MEAN_OF:
            ones = tl.where(at_start, carried_items + 1.0, 1.0)
            counted = tl.associative_scan((begins.to(tl.int32), ones), 0, add_in_segment)[1]
            tl.store(sum_counts + place, counted, mask=kept)
            carried_items = tl.sum(tl.where(number == ITEMS - 1, counted, 0.0), axis=0)
        carried = tl.sum(tl.where((number == ITEMS - 1)[:, None], reduced, 0.0), axis=0)
        is_open = is_open & (tl.max(begins.to(tl.int32), axis=0) == 0)
        if REDUCE == MEAN_OF:
            reduced = reduced / counted[:, None]
        key = ticket
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + at, mask=live, other=0)
        apply_rows(
            anchor, slabs, hyper, inits, steps, scores, counts, slot, table, key, reduced, ends & (crossing == 0),
            weight_stride, tail_stride, STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "family", "weight_stride", "tail_stride"])
def update_crossing(
    anchor, slabs, families, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_keys, sums,
    sum_counts, skip, total, family, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SCALED: tl.constexpr, ALONE: tl.constexpr,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    STATE: tl.constexpr, LENGTH: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The row that begins in a chunk and goes on behind it, if there is one: its sums added up, SUMS at a time."""
    chunk = tl.program_id(0).to(tl.int64)
    final = chunk * LENGTH + LENGTH - 1
    mine = final + 1 < total
    if SCALED:
        mine = mine & (tl.load(skip) == 0)
    slot = tl.load(sorted_slots + final, mask=mine, other=-1)
    behind = tl.load(sorted_slots + final + 1, mask=mine, other=-1)
    before = tl.load(sorted_slots + chunk * LENGTH - 1, mask=mine & (chunk > 0), other=-1)
    mine = mine & (slot >= 0) & (slot == behind) & (slot != before)
    if ALONE == 0:
        mine = mine & (tl.load(families + (slot >> SLAB_BITS), mask=slot >= 0, other=-1) == family)
    if mine:
        element = tl.arange(0, D)
        one = tl.arange(0, 1)  # a vector of one row, as apply_rows wants it
        reduced = tl.load(sums + ((2 * chunk + 1 + one) * D)[:, None] + element[None, :])
        items = 0.0
        if REDUCE == MEAN_OF:
            items = tl.load(sum_counts + 2 * chunk + 1)
        at = chunk + 1
        more = True
        while more:
            others = at + tl.arange(0, SUMS)
            belongs = tl.load(sorted_slots + others * LENGTH, mask=others * LENGTH < total, other=-1) == slot
            found = tl.sum(belongs.to(tl.int32), axis=0)
            wanted = belongs
            if REDUCE == FIRST:
                wanted = belongs & (others < 0)
            if REDUCE == LAST:
                wanted = belongs & (others == at + found - 1)
            share = tl.load(sums + (2 * others * D)[:, None] + element[None, :], mask=wanted[:, None], other=0.0)
            if REDUCE == LAST:
                reduced = tl.where(found > 0, tl.sum(share, axis=0)[None, :], reduced)
            else:
                reduced += tl.sum(share, axis=0)[None, :]
            if REDUCE == MEAN_OF:
                items += tl.sum(tl.load(sum_counts + 2 * others, mask=belongs, other=0.0), axis=0)
            more = found == SUMS
            at += SUMS
        if REDUCE == MEAN_OF:
            reduced = reduced / items
        table = (tl.load(dealt + final) >> TICKET_BITS) + one
        key = table
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + final) + one
        apply_rows(
            anchor, slabs, hyper, inits, steps, scores, counts, slot + one, table, key, reduced, one == 0,
            weight_stride, tail_stride, STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "batch", "weight_stride", "grad_stride"])
def weight_gradients(
    anchor, slabs, parts, inits, scales, normal, values, offsets, slots, grads, out,
    n, batch, weight_stride, grad_stride,
    WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, HAS_NORMAL: tl.constexpr, SLAB_BITS: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The gradient of the per-sample weights: of each item, its bag's gradient times its row, which may be unborn.

    A part whose output is zeros gives none.
    """
    number = tl.program_id(1).to(tl.int64)
    part = parts + number * PART_COLUMNS
    source = tl.load(part + SOURCE)
    table = tl.load(part + TABLE)
    run = tl.load(part + COPY) * n
    b = tl.program_id(0).to(tl.int64)
    bag = source * batch + b
    begin = tl.load(offsets + bag).to(tl.int64)
    end = tl.load(offsets + bag + 1).to(tl.int64)
    end = tl.where((begin < 0) | (end > n) | (tl.load(part + SILENT) != 0), begin, end)
    element = tl.arange(0, D)
    inside = element < DIM
    grad_at = b * grad_stride + tl.load(part + COLUMN)
    gradient = tl.load(grads + grad_at + element, mask=inside, other=0.0).to(tl.float32)
    if tl.load(part + MEAN) != 0:
        gradient = gradient / tl.maximum(end - begin, 1).to(tl.float32)
    kind = tl.load(inits + table * INIT_COLUMNS)
    kind = tl.where(tl.load(part + BLANK) != 0, ZEROS, kind)
    stream = tl.load(inits + table * INIT_COLUMNS + 1).to(tl.uint64)
    rows = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True)
    at = begin
    while at < end:
        i = at + tl.arange(0, IDS)
        live = i < end
        slot = tl.load(slots + run + i, mask=live, other=-1)
        has = live & (slot >= 0)
        wanted = live[:, None] & inside[None, :]
        row_at = weights_at(slabs, slot, has, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
        row = tl.load(rows + row_at[:, None] + element[None, :], mask=wanted & has[:, None], other=0.0).to(tl.float32)
        if tl.max((live & (slot < 0)).to(tl.int32), axis=0) > 0:
            key = tl.load(values + i, mask=live, other=0).to(tl.int64)
            born = first_row(
                kind + key * 0, stream + (key * 0).to(tl.uint64), scales, table + key * 0, key, element, wanted, normal,
                HAS_NORMAL,
            )  # fmt: skip
            row = tl.where(has[:, None], row, nearest(born, WEIGHTS).to(tl.float32))
        row = tl.where(wanted, row, 0.0)
        tl.store(out + run + i, tl.sum(row * gradient[None, :], axis=1), mask=live)
        at += IDS
