"""Output gradients to row gradients, and the optimizers' steps, in device memory.

The items of a batch come sorted by slot. From its first item on, a row is cut into pieces of PIECE items, and the
sorted items into chunks of the same length; a chunk's walker adds up the pieces that begin in it, item by item. A row
of one piece is updated at once; the sums of longer ones are kept, and `update_long` adds them up. So a key with a
hundred thousand items is no more work for anyone than a hundred thousand keys, and a row's sum depends on its own items
alone: not on slots, on other rows, or on who was first.
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
# Items of a row that are added up one behind the other.
PIECE = tl.constexpr(32)
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
def advance(steps, steps_now, trained, skip, tables, SCALED: tl.constexpr):
    """Copy the tables' steps for this update, and count those that it trains one further."""
    first = 0
    while first < tables:
        table = first + tl.arange(0, 128)
        inside = table < tables
        step = tl.load(steps + table, mask=inside, other=0)
        more = tl.load(trained + table, mask=inside, other=0)
        if SCALED:
            more = tl.where(tl.load(skip) != 0, 0, more)
        tl.store(steps_now + table, step, mask=inside)
        tl.store(steps + table, step + more, mask=inside)
        first += 128


@triton.jit(do_not_specialize=["total", "n", "tables"])
def deal(
    sorted_slots, order, tickets, parts, moved, item_shares, values, dealt, dealt_shares, dealt_keys,
    steps, steps_now, trained, skip, long_count, total, n, tables,
    MOVED: tl.constexpr, SHARED: tl.constexpr, KEYED: tl.constexpr, SCALED: tl.constexpr, FAMILIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What the update needs of each item, in sorted order: all at once, as one load waits for another.

    The tickets' parts become tables. Where MOVED, gradients do not lie as the outputs did: `moved[part]` elements away.
    One program makes ready what the update reads besides: the steps, and the counts of long rows.
    """
    if tl.program_id(0) == 0:
        advance(steps, steps_now, trained, skip, tables, SCALED)
        tl.store(long_count + tl.arange(0, FAMILIES), tl.zeros((FAMILIES,), tl.int32))
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


@triton.jit
def items_before(sorted_slots, first, slot, wanted):
    """How many items of its row lie before each chunk's first one."""
    near = tl.arange(0, PIECE)
    at = first[:, None] - 1 - near[None, :]
    alike = tl.load(sorted_slots + at, mask=wanted[:, None] & (at >= 0), other=-1) == slot[:, None]
    before = tl.sum((alike & wanted[:, None]).to(tl.int32), axis=1).to(tl.int64)
    # Rows are sorted: where all of them are alike, the row's begin is searched by doubling, then by halving.
    far = before == PIECE
    reach = tl.where(far, before * 2, before)
    growing = far
    while tl.max(growing.to(tl.int32), axis=0) > 0:
        here = tl.load(sorted_slots + first - reach, mask=growing & (reach <= first), other=-1)
        growing = growing & (here == slot)
        before = tl.where(growing, reach, before)
        reach = tl.where(growing, reach * 2, reach)
    # `before` items are of the row, `reach` are not.
    while tl.max((far & (reach - before > 1)).to(tl.int32), axis=0) > 0:
        middle = (before + reach) // 2
        here = tl.load(sorted_slots + first - middle, mask=far & (middle <= first), other=-1)
        before = tl.where(far & (here == slot), middle, before)
        reach = tl.where(far & (here != slot), middle, reach)
    return before


@triton.jit(do_not_specialize=["total", "family", "weight_stride", "tail_stride"])
def update(
    anchor, slabs, families, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_shares, dealt_keys,
    grads, sums, sum_counts, long_rows, long_count, inverse_scale, skip, total, family, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, ALONE: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, WALKERS: tl.constexpr,
):  # fmt: skip
    """WALKERS chunks of the sorted items side by side, one item of each at a time.

    A chunk has at most one piece that goes on a row and one that begins a long row: `sums[2 c]` and `sums[2 c + 1]`.
    Long rows are listed with their last item, the chunk of their last piece and the number of pieces before it.
    SHARED: `dealt_shares` has a factor for every item. ALIGNED: gradients begin at multiples of four elements. ALONE:
    the group has no other family.
    """
    if SCALED:  # noqa: SIM102 (a constant; what is below it is not compiled otherwise)
        if tl.load(skip) != 0:
            return
    chunk = tl.program_id(0).to(tl.int64) * WALKERS + tl.arange(0, WALKERS)
    element = tl.arange(0, D)
    inside = (element < DIM)[None, :]
    first = chunk * PIECE
    slot = tl.load(sorted_slots + first, mask=first < total, other=-1)
    before = tl.load(sorted_slots + first - 1, mask=(first > 0) & (first < total), other=-1)
    in_row = items_before(sorted_slots, first, slot, (slot >= 0) & (slot == before))
    # The rest of a piece that began before is its chunk's.
    rest = (PIECE - in_row % PIECE) % PIECE
    near = tl.arange(0, PIECE)
    ahead = first[:, None] + near[None, :]
    alike = tl.load(sorted_slots + ahead, mask=(near[None, :] < rest[:, None]) & (ahead < total), other=-3)
    skipped = tl.sum((alike == slot[:, None]).to(tl.int32), axis=1)
    in_row += skipped
    at = first + skipped
    # What is skipped may have been the end of the row.
    row = slot
    slot = tl.load(sorted_slots + at, mask=at < total, other=-1)
    in_row = tl.where(slot == row, in_row, 0)
    ticket = tl.load(dealt + at, mask=slot >= 0, other=0)
    going = at < tl.minimum(first + PIECE, total)
    total_rows = tl.zeros((WALKERS, D), tl.float32)
    items = tl.zeros((WALKERS,), tl.float32)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        behind = tl.load(sorted_slots + at + 1, mask=going & (at + 1 < total), other=-1)
        ticket_behind = tl.load(dealt + at + 1, mask=going & (at + 1 < total), other=0)
        live = going & (slot >= 0)
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
        fresh = in_row % PIECE == 0
        if REDUCE == FIRST:
            total_rows = tl.where(fresh[:, None], rows, total_rows)
        elif REDUCE == LAST:
            total_rows = rows
        else:
            total_rows = tl.where(fresh[:, None], rows, total_rows + rows)
        row_ends = behind != slot
        whole = live & row_ends & (in_row < PIECE)
        kept = live & (row_ends | (in_row % PIECE == PIECE - 1)) & (whole == 0)
        place = 2 * chunk + (in_row < PIECE).to(tl.int64)
        tl.store(sums + place[:, None] * D + element[None, :], total_rows, mask=kept[:, None])
        reduced = total_rows
        if REDUCE == MEAN_OF:
            items = tl.where(fresh, 1.0, items + 1.0)
            tl.store(sum_counts + place, items, mask=kept)
            reduced = total_rows / items[:, None]
        ended = kept & row_ends
        if tl.max(ended.to(tl.int32), axis=0) > 0:
            ones = ended.to(tl.int32)
            listed = tl.atomic_add(long_count, tl.sum(ones, axis=0)) + tl.cumsum(ones, axis=0) - 1
            tl.store(long_rows + 3 * listed, at.to(tl.int32), mask=ended)
            tl.store(long_rows + 3 * listed + 1, chunk.to(tl.int32), mask=ended)
            tl.store(long_rows + 3 * listed + 2, (in_row // PIECE).to(tl.int32), mask=ended)
        key = ticket
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + at, mask=whole, other=0)
        apply_rows(
            anchor, slabs, hyper, inits, steps, scores, counts, slot, table, key, reduced, whole,
            weight_stride, tail_stride, STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE,
        )  # fmt: skip
        in_row = tl.where(row_ends, 0, in_row + 1)
        at += 1
        slot = behind
        ticket = ticket_behind
        # The piece that begins behind the chunk is another's.
        going = going & (at < total) & ((at < first + PIECE) | (in_row % PIECE != 0))


@triton.jit(do_not_specialize=["weight_stride", "tail_stride"])
def update_long(
    anchor, slabs, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_keys, sums, sum_counts,
    long_rows, long_count, skip, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SCALED: tl.constexpr, WEIGHTS: tl.constexpr,
    WEIGHT_BYTES: tl.constexpr, SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The listed rows, which have several pieces: their sums added up, SUMS at a time."""
    if SCALED:  # noqa: SIM102
        if tl.load(skip) != 0:
            return
    element = tl.arange(0, D)
    one = tl.arange(0, 1)  # a vector of one row, as apply_rows wants it
    many = tl.load(long_count)
    listed = tl.program_id(0)
    while listed < many:
        final = tl.load(long_rows + 3 * listed)
        pieces = tl.load(long_rows + 3 * listed + 2)
        chunk = (tl.load(long_rows + 3 * listed + 1) - pieces).to(tl.int64)
        # Piece 0 began the row, in the odd place of its chunk.
        reduced = tl.zeros((1, D), tl.float32)
        items = 0.0
        first = 0
        while first <= pieces:
            piece = first + tl.arange(0, SUMS)
            belongs = piece <= pieces
            if REDUCE == FIRST:
                belongs = piece == 0
            if REDUCE == LAST:
                belongs = piece == pieces
            place = 2 * (chunk + piece) + (piece == 0).to(tl.int64)
            share = tl.load(sums + place[:, None] * D + element[None, :], mask=belongs[:, None], other=0.0)
            reduced += tl.sum(share, axis=0)[None, :]
            if REDUCE == MEAN_OF:
                items += tl.sum(tl.load(sum_counts + place, mask=belongs, other=0.0), axis=0)
            first += SUMS
        if REDUCE == MEAN_OF:
            reduced = reduced / items
        table = (tl.load(dealt + final) >> TICKET_BITS) + one
        key = table
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + final) + one
        apply_rows(
            anchor, slabs, hyper, inits, steps, scores, counts, tl.load(sorted_slots + final) + one, table, key,
            reduced, one == 0, weight_stride, tail_stride, STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE,
        )  # fmt: skip
        listed += tl.num_programs(0)


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
