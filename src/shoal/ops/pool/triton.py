"""Rows in device memory to output. Launch with enable_fp_fusion=False, so that rows that are born on the way have the
bits of docs/formats.md."""

import triton
import triton.language as tl

from shoal.ops.birth.triton import INIT_COLUMNS, first_row
from shoal.ops.library.rows import nearest, weights_at
from shoal.ops.library.tables import NO_SLOT

# A ticket tells the backward of an item where its gradient is and whose row it goes to: the part's number, and below it
# the first element of the item's output.
TICKET_BITS = tl.constexpr(40)
TICKET_MASK = tl.constexpr((1 << 40) - 1)
# Columns of a part: feature of the batch, copy of the slots, column of the output, table, mean, silent (a feature that
# only writes reads as zeros), whether missing keys read as zeros, number of the part.
PART_COLUMNS = tl.constexpr(8)
SOURCE = tl.constexpr(0)
COPY = tl.constexpr(1)
COLUMN = tl.constexpr(2)
TABLE = tl.constexpr(3)
MEAN = tl.constexpr(4)
SILENT = tl.constexpr(5)
BLANK = tl.constexpr(6)
NUMBER = tl.constexpr(7)


@triton.jit
def finite_weights(weights, i, live):
    """Weights of items, 0 for those that are not finite, and which these are."""
    given = tl.load(weights + i, mask=live, other=0.0)
    is_finite = tl.abs(given) < float("inf")  # not given - given == 0, which may be fused with what made `given`
    return tl.where(is_finite, given, 0.0), (live & (is_finite == 0)).to(tl.int32)


@triton.jit(do_not_specialize=["n", "batch", "out_stride", "weight_stride"])
def pool(
    anchor, slabs, parts, offsets, weights, slots, out, tickets, shares, lacking, lacking_count, bad_bags,
    n, batch, out_stride, weight_stride,
    WEIGHTED: tl.constexpr, SHARED: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BAGS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Sum or mean of the rows of each bag; keys without a row count as zeros, and their bags are listed.

    Where KEEP, `tickets` gets what the backward needs of every item and, where SHARED, `shares` its share of the bag's
    gradient: its weight, divided by the bag's length for a mean. A bag whose offsets make no sense reads as empty, a
    weight that is not finite as 0; both are counted, the weights behind the bags.
    """
    number = tl.program_id(1)
    part = parts + number * PART_COLUMNS
    source = tl.load(part + SOURCE)
    silent = tl.load(part + SILENT)
    copy = tl.load(part + COPY)
    items = slots + copy * n
    b = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = b < batch
    bag = source * batch + b
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
    bad = inside & ((begin < 0) | (end < begin) | (end > n))
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        tl.atomic_add(bad_bags, tl.sum(bad.to(tl.int32), axis=0), sem="relaxed")
    end = tl.where(bad, begin, end)
    length = end - begin
    divisor = tl.where(tl.load(part + MEAN) != 0, tl.maximum(length, 1), 1)
    ticket = (tl.load(part + NUMBER) << TICKET_BITS) + b.to(tl.int64) * out_stride + tl.load(part + COLUMN)
    element = tl.arange(0, D)
    rows = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True)
    total = tl.zeros((BAGS, D), tl.float32)
    lacks = tl.zeros((BAGS,), tl.int32)
    at = begin
    while tl.max(end - at, axis=0) > 0:
        i = at[:, None] + tl.arange(0, IDS)[None, :]
        live = i < end[:, None]
        slot = tl.load(items + i, mask=live, other=-1)
        if WEIGHTED:
            given, wrong = finite_weights(weights, i, live)
            if tl.max(tl.max(wrong, axis=1), axis=0) > 0:
                tl.atomic_add(bad_bags + 1, tl.sum(tl.sum(wrong, axis=1), axis=0), sem="relaxed")
        else:
            given = tl.full(i.shape, 1.0, tl.float32)
        if KEEP:
            item = copy * n + i
            tl.store(tickets + item, (ticket[:, None] + i * 0), mask=live)
            if SHARED:
                share = (divisor[:, None] + i * 0).to(tl.float32)
                tl.store(shares + item, given / share, mask=live)
        has = live & (slot >= 0)
        lacks = tl.maximum(lacks, tl.max((live & (slot < 0)).to(tl.int32), axis=1))
        row_at = weights_at(slabs, slot, has, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
        wanted = has[:, :, None] & (element < DIM)[None, None, :]
        row = tl.load(rows + row_at[:, :, None] + element[None, None, :], mask=wanted, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * given[:, :, None]
        total += tl.sum(row, axis=1)
        at += IDS
    total = total / divisor.to(tl.float32)[:, None]
    total = tl.where(silent != 0, 0.0, total)
    to = out + b.to(tl.int64)[:, None] * out_stride + tl.load(part + COLUMN) + element[None, :]
    tl.store(to, nearest(total, out.dtype.element_ty), mask=inside[:, None] & (element < DIM)[None, :])
    again = inside & (lacks > 0) & (silent == 0) & (tl.load(part + BLANK) == 0)
    if tl.max(again.to(tl.int32), axis=0) > 0:
        ones = again.to(tl.int32)
        place = tl.atomic_add(lacking_count, tl.sum(ones, axis=0), sem="relaxed") + tl.cumsum(ones, axis=0) - 1
        tl.store(lacking + place, number * batch + b, mask=again)


@triton.jit(do_not_specialize=["n", "batch", "out_stride", "weight_stride"])
def pool_lacking(
    anchor, slabs, parts, inits, scales, normal, values, offsets, weights, slots, out, lacking, lacking_count,
    n, batch, out_stride, weight_stride,
    WEIGHTED: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr, HAS_NORMAL: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The listed bags once more, with the rows that their missing keys would be born with."""
    element = tl.arange(0, D)
    rows = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True)
    many = tl.load(lacking_count)
    place = tl.program_id(0)
    while place < many:
        listed = tl.load(lacking + place)
        part = parts + (listed // batch) * PART_COLUMNS
        b = listed % batch
        table = tl.load(part + TABLE)
        items = slots + tl.load(part + COPY) * n
        bag = tl.load(part + SOURCE) * batch + b
        begin = tl.load(offsets + bag).to(tl.int64)
        end = tl.load(offsets + bag + 1).to(tl.int64)
        kind = tl.load(inits + table * INIT_COLUMNS)
        stream = tl.load(inits + table * INIT_COLUMNS + 1).to(tl.uint64)
        total = tl.zeros((D,), tl.float32)
        at = begin
        while at < end:
            i = at + tl.arange(0, IDS)
            live = i < end
            slot = tl.load(items + i, mask=live, other=-1)
            has = live & (slot >= 0)
            row_at = weights_at(slabs, slot, has, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
            wanted = live[:, None] & (element < DIM)[None, :]
            row = tl.load(rows + row_at[:, None] + element[None, :], mask=wanted & has[:, None], other=0.0).to(
                tl.float32
            )
            key = tl.load(values + i, mask=live, other=0).to(tl.int64)
            born = first_row(
                kind + key * 0, stream + (key * 0).to(tl.uint64), scales, table + key * 0, key, element, wanted, normal,
                HAS_NORMAL,
            )  # fmt: skip
            row = tl.where(has[:, None], row, tl.where(wanted, nearest(born, WEIGHTS).to(tl.float32), 0.0))
            if WEIGHTED:
                row = row * finite_weights(weights, i, live)[0][:, None]
            total += tl.sum(row, axis=0)
            at += IDS
        if tl.load(part + MEAN) != 0:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)
        to = out + b.to(tl.int64) * out_stride + tl.load(part + COLUMN) + element
        tl.store(to, nearest(total, out.dtype.element_ty), mask=element < DIM)
        place += tl.num_programs(0)


@triton.jit(do_not_specialize=["n", "batch", "features", "weight_stride", "first_part", "end_part"])
def gather(
    anchor, slabs, parts, parts_of, offsets, starts, features_of, slots, out, tickets, lacking, lacking_count, bad_bags,
    n, batch, features, weight_stride, first_part, end_part,
    KEEP: tl.constexpr, IN_ORDER: tl.constexpr, WEIGHTS: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    SLAB_BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row of every item of a family's parts, without pooling; those without a row read as zeros and are listed.

    `features_of`: the feature of every item. `starts[part]`: where a part's output begins and ends; an item that would
    be elsewhere has no row, and counts as a bad bag. Where IN_ORDER, parts lie as the batch does, and all are shown.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.program_id(1) * n + i
    live = i < n
    slot = tl.load(slots + item, mask=live, other=-1)
    # Which part an item belongs to matters only to some: the loads that tell it are left out for the others.
    if IN_ORDER == 0 or KEEP:
        feature = tl.load(features_of + item, mask=live, other=0)
        number = tl.load(parts_of + tl.program_id(1) * features + feature, mask=live, other=-1)
        part = parts + number.to(tl.int64) * PART_COLUMNS
    to = i.to(tl.int64) * DIM
    shown = live
    if IN_ORDER == 0:
        live = live & (number >= first_part) & (number < end_part)
        begin = tl.load(offsets + feature.to(tl.int64) * batch, mask=live, other=0)
        start = tl.load(starts + 2 * number, mask=live, other=0)
        to = start + (i - begin).to(tl.int64) * DIM
        strays = live & ((to < start) | (to + DIM > tl.load(starts + 2 * number + 1, mask=live, other=0)))
        if tl.max(strays.to(tl.int32), axis=0) > 0:
            tl.atomic_add(bad_bags, tl.sum(strays.to(tl.int32), axis=0), sem="relaxed")
            tl.store(slots + item, NO_SLOT, mask=strays)
        live = live & (strays == 0)
        shown = live & (tl.load(part + SILENT, mask=live, other=0) == 0)
    has = shown & (slot >= 0)
    element = tl.arange(0, D)
    rows = anchor.to(tl.pointer_type(WEIGHTS), bitcast=True)
    row_at = weights_at(slabs, slot, has, weight_stride, SLAB_BITS) * (16 // WEIGHT_BYTES)
    inside = (element < DIM)[None, :]
    row = tl.load(rows + row_at[:, None] + element[None, :], mask=has[:, None] & inside, other=0.0)
    tl.store(
        out + to[:, None] + element[None, :],
        nearest(row.to(tl.float32), out.dtype.element_ty),
        mask=live[:, None] & inside,
    )
    if KEEP:
        tl.store(tickets + item, (number.to(tl.int64) << TICKET_BITS) + to, mask=live)
    lacks = shown & (slot < 0)
    if tl.max(lacks.to(tl.int32), axis=0) > 0:
        ones = lacks.to(tl.int32)
        place = tl.atomic_add(lacking_count, tl.sum(ones, axis=0), sem="relaxed") + tl.cumsum(ones, axis=0) - 1
        tl.store(lacking + place, item, mask=lacks)


@triton.jit(do_not_specialize=["n", "batch", "features"])
def gather_lacking(
    parts, parts_of, inits, scales, normal, values, offsets, starts, features_of, out, lacking, lacking_count,
    n, batch, features,
    IN_ORDER: tl.constexpr, WEIGHTS: tl.constexpr, HAS_NORMAL: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The listed items as the rows that they would be born with."""
    element = tl.arange(0, D)
    many = tl.load(lacking_count)
    first = tl.program_id(0) * BLOCK
    while first < many:
        lane = first + tl.arange(0, BLOCK)
        live = lane < many
        item = tl.load(lacking + lane, mask=live, other=0)
        i = item % n
        feature = tl.load(features_of + item, mask=live, other=0)
        number = tl.load(parts_of + (item // n) * features + feature, mask=live, other=0)
        part = parts + number.to(tl.int64) * PART_COLUMNS
        table = tl.load(part + TABLE, mask=live, other=0)
        live = live & (tl.load(part + BLANK, mask=live, other=1) == 0)
        kind = tl.load(inits + table * INIT_COLUMNS, mask=live, other=0)
        stream = tl.load(inits + table * INIT_COLUMNS + 1, mask=live, other=0).to(tl.uint64)
        key = tl.load(values + i, mask=live, other=0).to(tl.int64)
        wanted = live[:, None] & (element < DIM)[None, :]
        born = first_row(kind, stream, scales, table, key, element, wanted, normal, HAS_NORMAL)
        if IN_ORDER:
            to = i.to(tl.int64) * DIM
        else:
            begin = tl.load(offsets + feature.to(tl.int64) * batch, mask=live, other=0)
            to = tl.load(starts + 2 * number, mask=live, other=0) + (i - begin).to(tl.int64) * DIM
        tl.store(
            out + to[:, None] + element[None, :],
            nearest(nearest(born, WEIGHTS).to(tl.float32), out.dtype.element_ty),
            mask=wanted,
        )
        first += tl.num_programs(0) * BLOCK
