"""What the kernels of pooling and gathering take."""

from typing import NamedTuple

from shoal.ops.arguments import F32, I32, I64, Floats, Int, Ints, SomeF32, SomeI32, SomeI64


class Lacking(NamedTuple):
    """The list of bags, or items, that lack rows."""

    lacking: I32
    lacking_count: I32


class Pool(NamedTuple):
    """Arguments of `pool`."""

    anchor: I32
    slabs: I64
    parts: I64
    offsets: Ints
    weights: SomeF32
    slots: I32
    out: Floats
    tickets: SomeI64
    shares: SomeF32
    lacking: Lacking
    bad_bags: I32
    n: Int
    batch: Int
    out_stride: Int
    weight_stride: Int


class PoolLacking(NamedTuple):
    """Arguments of `pool_lacking`."""

    anchor: I32
    slabs: I64
    parts: I64
    inits: I64
    scales: F32
    normal: F32
    values: Ints
    offsets: Ints
    weights: SomeF32
    slots: I32
    out: Floats
    lacking: Lacking
    n: Int
    batch: Int
    out_stride: Int
    weight_stride: Int


class Gather(NamedTuple):
    """Arguments of `gather`."""

    anchor: I32
    slabs: I64
    parts: I64
    parts_of: I32
    offsets: Ints
    starts: SomeI64
    features_of: SomeI32
    slots: I32
    out: Floats
    tickets: SomeI64
    lacking: Lacking
    bad_bags: I32
    n: Int
    batch: Int
    features: Int
    weight_stride: Int
    first_part: Int
    end_part: Int


class GatherLacking(NamedTuple):
    """Arguments of `gather_lacking`."""

    parts: I64
    parts_of: I32
    inits: I64
    scales: F32
    normal: F32
    values: Ints
    offsets: Ints
    starts: SomeI64
    features_of: SomeI32
    out: Floats
    lacking: Lacking
    n: Int
    batch: Int
    features: Int
