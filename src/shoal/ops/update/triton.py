"""Output gradients to row gradients, and the optimizers' steps, in device memory.

The items of a batch come sorted by slot. `deal` lists the rows that have one item, which `update_single` updates, and
cuts the others, from their first item on, into pieces of PIECE items; `update` adds up the gradients of each piece. A
row of one piece is updated at once; the sums of longer ones are kept, and `update_long` adds them up. So a key with a
hundred thousand items is no more work for anyone than a hundred thousand keys, and a row's sum depends on its own items
alone: not on slots, on other rows, or on the order in which programs run.
"""

import triton
import triton.language as tl

from shoal.ops.birth.triton import INIT_COLUMNS, ZEROS, first_row
from shoal.ops.library.items import append, feature_of
from shoal.ops.library.rows import CHANGED, flags_at, nearest, score_at, tails_at, weights_at
from shoal.ops.library.tables import FAMILY, TABLE_COLUMNS
from shoal.ops.library.uses import table_of, trains
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
from shoal.ops.update.apply import apply_rows, load_rows

SUM = tl.constexpr(0)
MEAN_OF = tl.constexpr(1)
FIRST = tl.constexpr(2)
LAST = tl.constexpr(3)
# Items of a row that are added up together.
PIECE = tl.constexpr(32)
# Where the gradient of an item without one would be.
NOWHERE = tl.constexpr((1 << 40) - 1)


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
    use = tl.load(tables_of + copy * features + feature, mask=i < n, other=0)
    table = table_of(use).to(tl.int64)
    live = (slot >= 0) & trains(use)
    live = live & (tl.load(tables + table * TABLE_COLUMNS + FAMILY, mask=live, other=-1) == family)
    tail_at = tails_at(slabs, slot, live, tail_stride, SLAB_BITS)
    score = tl.load(steps + table, mask=live, other=0).to(tl.float64)
    scored = anchor.to(tl.pointer_type(tl.float64), bitcast=True) + tail_at * 2 + score_at(STATE) // 2
    flagged = anchor + tail_at * 4 + flags_at(STATE)
    older = live & (tl.load(scored, mask=live, other=0.0) < score)
    tl.store(scored, score, mask=older)
    tl.store(flagged, tl.load(flagged, mask=older, other=0) | CHANGED, mask=older)


@triton.jit(do_not_specialize=["n", "batch", "features"])
def aim(slots, tables_of, offsets, targets, n, batch, features, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of items whose parts train; -1 for the others."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    feature = feature_of(offsets, i, batch, features, STEPS)
    use = tl.load(tables_of + copy * features + feature, mask=i < n, other=0)
    slot = tl.load(slots + copy * n + i, mask=i < n, other=-1)
    tl.store(targets + copy * n + i, tl.where(trains(use), slot, -1), mask=i < n)


@triton.jit
def advance(steps, steps_now, trained, skip, skipped, tables, SCALED: tl.constexpr):
    """Copy the tables' steps for this update, and count those that it trains one further, or as skipped."""
    first = 0
    while first < tables:
        table = first + tl.arange(0, 128)
        inside = table < tables
        step = tl.load(steps + table, mask=inside, other=0)
        more = tl.load(trained + table, mask=inside, other=0)
        if SCALED:
            left_out = tl.where(tl.load(skip) != 0, more, 0)
            tl.store(skipped + table, tl.load(skipped + table, mask=inside, other=0) + left_out, mask=inside)
            more = more - left_out
        tl.store(steps_now + table, step, mask=inside)
        tl.store(steps + table, step + more, mask=inside)
        first += 128


@triton.jit
def items_before(sorted_slots, first, slot):
    """How many items of its row lie before the item `first`: vectors of one."""
    near = tl.arange(0, PIECE)
    at = first[:, None] - 1 - near[None, :]
    alike = tl.load(sorted_slots + at, mask=at >= 0, other=-1) == slot[:, None]
    before = tl.sum(alike.to(tl.int32), axis=1).to(tl.int64)
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


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def list_pieces(
    sorted_slots, slot, dealt, live, first, total, pieces, piece_slots, piece_tickets, piece_count, BLOCK: tl.constexpr
):
    """List where pieces begin among the items from `first` on, with their slots and their first tickets: rows of one
    item from the front of the lists on, others from their end. `piece_count`: how many of both.

    For x, lists have -1 - x where a piece goes on a row (`pieces`), and where it has further items (`piece_slots`).
    """
    number = tl.arange(0, BLOCK)
    at = first + number
    before = tl.load(sorted_slots + at - 1, mask=(at > 0) & live, other=-1)
    behind = tl.load(sorted_slots + at + 1, mask=at + 1 < total, other=-1)
    begins = slot != before
    one = tl.arange(0, 1)
    opened = tl.load(sorted_slots + first + one)
    earlier = tl.zeros((1,), tl.int64)
    if tl.max(tl.where(number == 0, (live & (begins == 0)).to(tl.int32), 0), axis=0) > 0:
        earlier = items_before(sorted_slots, (first + one).to(tl.int64), opened)
    begun = tl.associative_scan(tl.where(begins, number, -1), 0, larger)
    in_row = tl.where(begun >= 0, number - begun, number + tl.max(earlier, axis=0))
    cut = live & (in_row % PIECE == 0)
    single = cut & begins & (behind != slot)
    several = cut & (single == 0)
    place = append(piece_count, single)
    if tl.max(several.to(tl.int32), axis=0) > 0:
        place = tl.where(several, total - 1 - append(piece_count + 1, several), place)
    tl.store(pieces + place, tl.where(in_row == 0, at, -1 - at), mask=cut)
    tl.store(piece_slots + place, tl.where(behind == slot, -1 - slot, slot), mask=cut)
    tl.store(piece_tickets + place, dealt, mask=cut)


@triton.jit(do_not_specialize=["total", "n", "tables"])
def deal(
    sorted_slots, order, tickets, parts, moved, item_shares, values, dealt, dealt_shares, dealt_keys,
    steps, steps_now, trained, skip, skipped, pieces, piece_slots, piece_tickets, piece_count, total, n, tables,
    MOVED: tl.constexpr, SHARED: tl.constexpr, KEYED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the update needs of each item, in sorted order: all at once, as one load waits for another.

    The tickets' parts become tables. Where MOVED, gradients do not lie as the outputs did: `moved[part]` elements away.
    """
    first = tl.program_id(0) * BLOCK
    if first == 0:
        advance(steps, steps_now, trained, skip, skipped, tables, SCALED)
    at = first + tl.arange(0, BLOCK)
    # Items without a row to update may have no ticket.
    slot = tl.load(sorted_slots + at, mask=at < total, other=-1)
    live = slot >= 0
    item = tl.load(order + at, mask=live, other=0)
    ticket = tl.load(tickets + item, mask=live, other=-1)
    # An item in no bag brings no gradient; its ticket says whose it is.
    given = ticket >= 0
    part = tl.where(given, ticket >> TICKET_BITS, 0)
    place = tl.where(given, ticket & TICKET_MASK, NOWHERE)
    if MOVED:
        place = place + tl.load(moved + part, mask=given, other=0)
    table = tl.load(parts + part * PART_COLUMNS + TABLE, mask=live & given, other=0)
    table = tl.where(given, table, -1 - ticket)
    place += table << TICKET_BITS
    tl.store(dealt + at, place, mask=live)
    if first < total:
        list_pieces(
            sorted_slots, slot, place, live, first, total, pieces, piece_slots, piece_tickets, piece_count, BLOCK
        )
    if SHARED:
        tl.store(dealt_shares + at, tl.load(item_shares + item, mask=live & given, other=0.0), mask=live)
    if KEYED:
        tl.store(dealt_keys + at, tl.load(values + item % n, mask=live, other=0).to(tl.int64), mask=live)


@triton.jit
def gradients_of(
    grads, tickets, dealt_shares, inverse_scale, at, live, element, inside,
    SHARED: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The gradients of sorted items: [g] tickets and places, [1, d] elements."""
    begin = tickets & TICKET_MASK
    given = live & (begin != NOWHERE)
    if ALIGNED:
        begin = begin // 4 * 4
    rows = tl.load(grads + begin[:, None] + element, mask=given[:, None] & inside, other=0.0).to(tl.float32)
    if SHARED:
        rows = rows * tl.load(dealt_shares + at, mask=live, other=0.0)[:, None]
    if SCALED:
        rows = rows * tl.load(inverse_scale)
    return rows


@triton.jit
def has_values(gradient):
    """Which of the gradients [g, d] are not all zeros: all reductions but the sum leave out those that are."""
    return tl.max((gradient != 0.0).to(tl.int32), axis=1) > 0


@triton.jit(do_not_specialize=["family", "weight_stride", "tail_stride"])
def update_single(
    anchor, slabs, families, hyper, inits, steps, scores, counts, dealt_shares, dealt_keys, grads, pieces, piece_slots,
    piece_tickets, piece_count, told, inverse_scale, skip, family, weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, ALONE: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows at the front of the list, which have one item, ROWS at a time: all they need is on its way at once.

    `told` gets how many there are.
    """
    if SCALED:  # noqa: SIM102 (a constant; what is below it is not compiled otherwise)
        if tl.load(skip) != 0:
            return
    element = tl.arange(0, D)
    many = tl.load(piece_count)
    if tl.program_id(0) == 0:
        tl.store(told, many)
    listed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(piece_slots + listed, mask=listed < many, other=0)
    ticket = tl.load(piece_tickets + listed, mask=listed < many, other=0)
    while tl.min(listed, axis=0) < many:
        live = listed < many
        at = listed
        if SHARED or WEIGHT_BYTES == 2:
            at = tl.load(pieces + listed, mask=live, other=0)
        if ALONE == 0:
            live = live & (tl.load(families + (slot >> SLAB_BITS), mask=live, other=-1) == family)
        table = ticket >> TICKET_BITS
        row_at, tail_at, w, flags, scored = load_rows(
            anchor, slabs, slot, live, weight_stride, tail_stride, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE
        )
        gradient = gradients_of(
            grads, ticket, dealt_shares, inverse_scale, at, live, element[None, :], (element < DIM)[None, :],
            SHARED, SCALED, ALIGNED,
        )  # fmt: skip
        if REDUCE != SUM:
            live = live & has_values(gradient)
        key = table
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + at, mask=live, other=0)
        listed += tl.num_programs(0) * ROWS
        slot = tl.load(piece_slots + listed, mask=listed < many, other=0)
        ticket = tl.load(piece_tickets + listed, mask=listed < many, other=0)
        apply_rows(
            anchor, hyper, inits, steps, scores, counts, row_at, tail_at, w, flags, scored, table, key, gradient, live,
            STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, DIM, D, STATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "family", "weight_stride", "tail_stride"])
def update(
    anchor, slabs, families, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_shares, dealt_keys,
    grads, pieces, piece_slots, piece_tickets, piece_count, sums, sum_counts, long_rows, long_count, inverse_scale,
    skip, total, family,
    weight_stride, tail_stride,
    STEP: tl.constexpr, PLAIN: tl.constexpr, REDUCE: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, ALONE: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STATE: tl.constexpr, PIECES: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """The pieces at the end of the list, PIECES at a time; of their items behind the first, ITEMS are on their way at a
    time.

    A piece of a longer row leaves its sum at `sums[2 c]`, c being the number of PIECE items before it, divided by
    PIECE; the first of the row, which is listed, at `sums[2 c + 1]`: of either kind c has no other.
    SHARED: `dealt_shares` has a factor for every item. ALIGNED: gradients begin at multiples of four elements. ALONE:
    the group has no other family.
    """
    if SCALED:  # noqa: SIM102 (a constant; what is below it is not compiled otherwise)
        if tl.load(skip) != 0:
            return
    element = tl.arange(0, D)
    inside = element < DIM
    many = tl.load(piece_count + 1)
    listed = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    entry = tl.load(pieces + total - 1 - listed, mask=listed < many, other=0)
    coded_slot = tl.load(piece_slots + total - 1 - listed, mask=listed < many, other=0)
    ticket = tl.load(piece_tickets + total - 1 - listed, mask=listed < many, other=0)
    while tl.min(listed, axis=0) < many:
        live = listed < many
        goes_on = entry < 0
        begin = tl.where(goes_on, -1 - entry, entry).to(tl.int64)
        has_more = live & (coded_slot < 0)
        slot = tl.where(coded_slot < 0, -1 - coded_slot, coded_slot)
        behind = tl.load(sorted_slots + begin + PIECE, mask=has_more & (begin + PIECE < total), other=-1)
        if ALONE == 0:
            live = live & (tl.load(families + (slot >> SLAB_BITS), mask=live, other=-1) == family)
        table = ticket >> TICKET_BITS
        reduced = gradients_of(
            grads, ticket, dealt_shares, inverse_scale, begin, live, element[None, :], inside[None, :],
            SHARED, SCALED, ALIGNED,
        )  # fmt: skip
        listed += tl.num_programs(0) * PIECES
        entry = tl.load(pieces + total - 1 - listed, mask=listed < many, other=0)
        coded_slot = tl.load(piece_slots + total - 1 - listed, mask=listed < many, other=0)
        ticket = tl.load(piece_tickets + total - 1 - listed, mask=listed < many, other=0)
        taken = tl.where(live, 1, 0)  # items that are not left out
        if REDUCE != SUM:
            taken = tl.where(has_values(reduced), taken, 0)
        going = live & has_more
        at = begin + 1
        while tl.max(going.to(tl.int32), axis=0) > 0:
            for i in tl.static_range(ITEMS):
                inside_piece = going & (at + i < tl.minimum(begin + PIECE, total))
                alike = inside_piece & (tl.load(sorted_slots + at + i, mask=inside_piece, other=-1) == slot)
                item_ticket = tl.load(dealt + at + i, mask=alike, other=0)
                rows = gradients_of(
                    grads, item_ticket, dealt_shares, inverse_scale, at + i, alike, element[None, :],
                    inside[None, :], SHARED, SCALED, ALIGNED,
                )  # fmt: skip
                if REDUCE == SUM:
                    reduced += rows
                else:
                    takes = alike & has_values(rows)
                    if REDUCE == FIRST:
                        takes = takes & (taken == 0)
                    if REDUCE == MEAN_OF:
                        reduced += tl.where(takes[:, None], rows, 0.0)
                    else:
                        reduced = tl.where(takes[:, None], rows, reduced)
                    taken += takes.to(tl.int32)
                if i == ITEMS - 1:
                    going = alike
            at += ITEMS
        longer = live & has_more & (behind == slot)  # sorted: then all between are too
        whole = live & (goes_on == 0) & (longer == 0)
        place = 2 * (begin // PIECE) + (goes_on == 0).to(tl.int64)
        tl.store(sums + place[:, None] * D + element[None, :], reduced, mask=(live & (whole == 0))[:, None])
        if REDUCE != SUM:
            tl.store(sum_counts + place, taken.to(tl.float32), mask=live & (whole == 0))
            whole = whole & (taken > 0)
        if REDUCE == MEAN_OF:
            reduced = reduced / tl.maximum(taken, 1).to(tl.float32)[:, None]
        begins = longer & (goes_on == 0)
        if tl.max(begins.to(tl.int32), axis=0) > 0:
            tl.store(long_rows + append(long_count, begins), begin.to(tl.int32), mask=begins)
        key = table
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + begin, mask=whole, other=0)
        row_at, tail_at, w, flags, scored = load_rows(
            anchor, slabs, slot, whole, weight_stride, tail_stride, WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE
        )
        apply_rows(
            anchor, hyper, inits, steps, scores, counts, row_at, tail_at, w, flags, scored, table, key, reduced, whole,
            STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, DIM, D, STATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "weight_stride", "tail_stride"])
def update_long(
    anchor, slabs, hyper, inits, steps, scores, counts, sorted_slots, dealt, dealt_keys, sums, sum_counts,
    long_rows, long_count, skip, total, weight_stride, tail_stride,
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
        begin = tl.load(long_rows + listed).to(tl.int64)
        slot = tl.load(sorted_slots + begin)
        reduced = tl.zeros((1, D), tl.float32)
        taken = tl.zeros((1,), tl.float32)  # items that are not left out
        first = 0
        at = begin + tl.arange(0, SUMS).to(tl.int64) * PIECE
        belongs = tl.load(sorted_slots + at, mask=at < total, other=-1) == slot
        more = True
        while more:
            ahead = at + SUMS * PIECE
            belong_ahead = tl.load(sorted_slots + ahead, mask=ahead < total, other=-1) == slot
            piece = first + tl.arange(0, SUMS)
            found = tl.sum(belongs.to(tl.int32), axis=0)
            place = 2 * (at // PIECE) + (piece == 0).to(tl.int64)
            wanted = belongs
            if REDUCE != SUM:
                counts_here = tl.load(sum_counts + place, mask=belongs, other=0.0)
                wanted = belongs & (counts_here > 0.0)
                taken_here = tl.sum(counts_here, axis=0)
            if REDUCE == FIRST:
                begun = tl.min(tl.where(wanted, piece, first + SUMS), axis=0)
                wanted = wanted & (piece == begun) & (taken == 0.0)
            if REDUCE == LAST:
                wanted = wanted & (piece == tl.max(tl.where(wanted, piece, -1), axis=0))
            share = tl.load(sums + place[:, None] * D + element[None, :], mask=wanted[:, None], other=0.0)
            if REDUCE == LAST:
                reduced = tl.where(taken_here > 0.0, tl.sum(share, axis=0)[None, :], reduced)
            else:
                reduced += tl.sum(share, axis=0)[None, :]
            if REDUCE != SUM:
                taken += taken_here
            more = found == SUMS
            first += SUMS
            at = ahead
            belongs = belong_ahead
        do = one == 0
        if REDUCE != SUM:
            do = do & (taken > 0.0)
        if REDUCE == MEAN_OF:
            reduced = reduced / tl.where(taken > 0.0, taken, 1.0)[:, None]
        table = (tl.load(dealt + begin) >> TICKET_BITS) + one
        key = table
        if WEIGHT_BYTES == 2:
            key = tl.load(dealt_keys + begin) + one
        row_at, tail_at, w, flags, scored = load_rows(
            anchor, slabs, slot + one, do, weight_stride, tail_stride,
            WEIGHTS, WEIGHT_BYTES, SLAB_BITS, DIM, D, STATE,
        )  # fmt: skip
        apply_rows(
            anchor, hyper, inits, steps, scores, counts, row_at, tail_at, w, flags, scored, table, key, reduced,
            do, STEP, PLAIN, WEIGHTS, WEIGHT_BYTES, DIM, D, STATE,
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
