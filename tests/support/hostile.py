"""Logs that a stranger wrote: their checksums are right, and what they hold is not what any Shoal writes.

A flaw is drawn, and put into the log at a path. Where a log may not be read with it, its name is in MUST_BE_REFUSED.
"""

import json
import os
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import torch
from hypothesis import strategies as st

import shoal
from shoal import _native
from shoal.log.segment import header_of
from shoal.records import Layout, Rows, join
from shoal.records.arrow import from_arrow, to_arrow
from shoal.records.frames import (
    NO_TABLE,
    FrameHeader,
    Kind,
    decode_deletes,
    decode_puts,
    encode_deletes,
    encode_puts,
)
from shoal.records.stream import StreamEncoder
from support.forged import Forged

LARGE = 1 << 40


def write(path):
    """A small log of two tables and four versions: a snapshot, deletes, several frames of one version."""
    bags = shoal.EmbeddingBagCollection(
        [
            shoal.Table("a", 3, optimizer=shoal.RowwiseAdagrad(), dtype="bfloat16", buckets=16),
            shoal.Table("b", 2, optimizer=shoal.SGD(momentum=0.9)),
        ]
    )
    with shoal.ChangeLog(path) as log:
        for version in range(1, 5):
            bags.table("a").assign(range(version, version + 20), torch.randn(20, 3))
            bags.table("b").assign(range(5), torch.randn(5, 2))
            if version > 2:
                bags.table("a").erase([version, version + 1])
            log.commit(bags)
            if version == 2:
                log.compact()


def collection():
    """Tables that such a log is loaded into."""
    return shoal.EmbeddingBagCollection(
        [
            shoal.Table("a", 3, optimizer=shoal.RowwiseAdagrad(), dtype="bfloat16", buckets=16),
            shoal.Table("b", 2, optimizer=shoal.SGD(momentum=0.9)),
        ]
    )


class _Frames:
    """The frames of the last segment, to be changed."""

    def __init__(self, path, draw):
        self.forged = Forged(path)
        self.draw = draw
        self.layouts = [Layout.from_json(one, "test") for one in self.forged.manifest["tables"]]

    def change(self, choose, make):
        """Replace one frame of those that `choose` takes by those that `make` gives: after the snapshot, so that the
        newest version needs it."""

        def changed(frames):
            chosen = [at for at, (header, _) in enumerate(frames) if choose(header) and header.version > 2]
            at = self.draw(st.sampled_from(chosen))
            return [*frames[:at], *make(*frames[at]), *frames[at + 1 :]]

        self.forged.write_segment(changed)

    def rows(self, header, payload):
        return decode_puts(header, payload, self.layouts[header.table], "test")

    def keys(self, header, payload):
        if header.kind is Kind.PUTS:
            return self.rows(header, payload).keys
        return decode_deletes(header, payload, self.layouts[header.table], "test")

    def puts(self, header, rows):
        return _frame(encode_puts(rows, self.layouts[header.table], table=header.table, version=header.version))

    def deletes(self, header, keys):
        layout = self.layouts[header.table]
        return _frame(encode_deletes(keys, layout, table=header.table, version=header.version))


def _frame(pieces):
    header = FrameHeader.unpack(pieces[0], "test")
    return header, b"".join(pieces[1:])[: header.payload_bytes]


def _is_puts(header):
    return header.kind is Kind.PUTS and header.rows > 1


def _is_rows(header):
    return header.kind is not Kind.COMMIT


def key_twice_in_a_frame(path, draw):
    frames = _Frames(path, draw)

    def make(header, payload):
        rows = frames.rows(header, payload)
        order = draw(st.permutations(range(len(rows))))
        some = order[: draw(st.integers(1, len(rows)))]
        again = join([rows, rows.some(torch.tensor(some))])
        return [frames.puts(header, again.some(torch.tensor(draw(st.permutations(range(len(again)))))))]

    frames.change(_is_puts, make)


def key_twice_in_two_frames(path, draw):
    frames = _Frames(path, draw)

    def make(header, payload):
        rows = frames.rows(header, payload)
        cut = draw(st.integers(1, len(rows)))
        first, second = rows.some(slice(0, cut)), rows.some(slice(draw(st.integers(0, cut - 1)), len(rows)))
        both = [frames.puts(header, first), frames.puts(header, second)]
        return both if draw(st.booleans()) else both[::-1]

    frames.change(_is_puts, make)


def key_put_and_deleted(path, draw):
    frames = _Frames(path, draw)

    def make(header, payload):
        keys = frames.keys(header, payload)
        some = keys[: draw(st.integers(1, len(keys)))].clone()
        both = [(header, payload), frames.deletes(header, some)]
        return both if draw(st.booleans()) else both[::-1]

    frames.change(_is_puts, make)


def _with_value(path, draw, columns):
    frames = _Frames(path, draw)

    def make(header, payload):
        rows = frames.rows(header, payload)
        tensors = {"row": rows.weights.clone(), "score": rows.scores.clone()}
        tensors |= {name: value.clone() for name, value in rows.state.items()}
        chosen = tensors[draw(st.sampled_from(sorted({*tensors} & {*columns})))].view(-1)
        chosen[draw(st.integers(0, len(chosen) - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), -float("inf")])
        )
        state = {name: tensors[name] for name in rows.state}
        return [frames.puts(header, Rows(rows.keys, tensors["row"], state, tensors["score"]))]

    frames.change(_is_puts, make)


def scores_that_are_not_finite(path, draw):
    _with_value(path, draw, ("score",))


def rows_that_are_not_finite(path, draw):
    _with_value(path, draw, ("row", "sum", "momentum"))


def counts_that_lie(path, draw):
    forged = Forged(path)
    number = draw(st.sampled_from([0, 1, 3, LARGE, 2**63 - 1]))
    name = draw(st.sampled_from(["puts", "deletes", "rows"]))
    forged.set_tables(**{name: number})


def headers_that_lie(path, draw):
    frames = _Frames(path, draw)
    rows = draw(st.sampled_from([0, 1, 1000, LARGE]))
    payload_bytes = draw(st.sampled_from([0, 64, 1000, 8 * LARGE]))
    frames.change(
        _is_rows,
        lambda header, payload: [
            (
                replace(header, rows=min(rows, payload_bytes // 8), payload_bytes=payload_bytes)
                if draw(st.booleans())
                else replace(header, rows=min(rows, len(payload) // 8)),
                payload,
            )
        ],
    )


def tables_that_are_not_there(path, draw):
    frames = _Frames(path, draw)
    number = draw(st.sampled_from([0, 1, 2, 1000, NO_TABLE - 1]))
    frames.change(_is_rows, lambda header, payload: [(replace(header, table=number), payload)])


def compressed_batches(path, draw):
    """Of zeros, which are few bytes; and perhaps a claim that they are many."""
    frames = _Frames(path, draw)
    codec = draw(st.sampled_from(["lz4", "zstd"]))
    count = draw(st.sampled_from([4, 100_000]))

    def make(header, _payload):
        layout = frames.layouts[header.table]
        state = {one.name: torch.zeros(count, one.width) for one in layout.columns}
        weights = torch.zeros(count, layout.dim, dtype=layout.torch_dtype)
        batch = to_arrow(
            Rows(torch.zeros(count, dtype=torch.int64), weights, state, torch.zeros(count).double()), layout
        )
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        data = sink.getvalue().to_pybytes()
        lie = count * 8
        data = data.replace(lie.to_bytes(8, "little"), LARGE.to_bytes(8, "little")) if draw(st.booleans()) else data
        rows = draw(st.sampled_from([0, 4, len(data) // 8]))
        return [(replace(header, rows=min(rows, len(data) // 8), payload_bytes=len(data)), data)]

    frames.change(_is_puts, make)


def schemas_of_others(path, draw):
    """Fields of other types, with names that are no text, or thousands of them."""
    frames = _Frames(path, draw)
    name = draw(st.sampled_from(["key", "kAAAAy", "\ud7ff", "x" * 1000]))
    count = draw(st.sampled_from([1, 3, 2000]))
    kind = draw(st.sampled_from([pa.int64(), pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.list_(pa.float32()))]))

    def make(header, _payload):
        schema = pa.schema([pa.field(name, kind)] * count, metadata={"shoal.table": "AAAA"})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        data = sink.getvalue().to_pybytes().replace(b"AAAA", draw(st.sampled_from([b"AAAA", b"\x80\xff\xfe\x80"])))
        return [(replace(header, rows=0, payload_bytes=len(data)), data)]

    frames.change(_is_rows, make)


def commits_that_say_strange_things(path, draw):
    values = ["x", -1, 0, 1e308, 2**63, 10**400, None, [], {}, "\ud800", [[[]]], {"a": {"b": []}}, True]
    deep = "DEEP"
    value = draw(st.sampled_from([*values, deep]))
    names = ["version", "time", "step", "event_time", "tables", "dense", "rng", "metadata", "kept", "epoch", "writer"]
    name = draw(st.sampled_from([*names, "before", "required", "other"]))
    depth = draw(st.sampled_from([100, 300, 5000]))
    forged = Forged(path)

    def changed(text):
        said = json.loads(text)
        said["commit"][name] = value
        return json.dumps(said).replace(f'"{deep}"', "[" * depth + "]" * depth).encode()

    forged.write_text(changed)


def claims_of_the_rest_of_the_file(path, draw):
    """Headers one after another, each of which claims what comes after it, with or without the right checksum."""
    count = draw(st.sampled_from([1, 50, 2000]))
    kinds = st.sampled_from([Kind.COMMIT, Kind.PUTS])
    kind, is_right, version = draw(kinds), draw(st.booleans()) and count < 100, draw(st.sampled_from([5, 6, 1]))
    table = NO_TABLE if kind is Kind.COMMIT else 0
    tail = draw(st.sampled_from([b"", bytes(640), b"SHFR" * 1600]))
    for at in range(count):
        claimed = draw(st.sampled_from([0, 64])) if at == count // 2 else 0
        crc = _native.crc32c(tail) if is_right else at
        tail = FrameHeader(kind, table, version, 0, len(tail) + claimed, crc).pack() + tail
    file = sorted((path / "segments").iterdir())[-1]
    content = file.read_bytes()
    broken = bytes(64) if draw(st.booleans()) else b""
    file.write_bytes(content + broken + tail if draw(st.booleans()) else content[:64] + broken + tail)
    if draw(st.booleans()):
        (path / "HEAD").unlink()


def holes(path, draw):
    """Files that are almost all holes."""
    names = [name for name in sorted(path.rglob("*")) if name.suffix in (".seg", ".arrow") or name.name == "HEAD"]
    file = draw(st.sampled_from(names))
    os.truncate(file, draw(st.sampled_from([1 << 20, LARGE, 1 << 42])))
    if draw(st.booleans()):
        (path / "HEAD").unlink()


def _snapshot_of(path, draw, change):
    """Write a table of the snapshot anew, of rows that `change` gives; blocks of two tables."""
    forged = Forged(path)
    layouts = [Layout.from_json(one, "test") for one in forged.manifest["tables"]]
    folder = sorted((path / "snapshots").iterdir())[-1]
    name = draw(st.sampled_from([layout.name for layout in layouts]))
    number = next(at for at, layout in enumerate(layouts) if layout.name == name)
    layout = layouts[number]
    file = folder / f"{number:05}.arrow"
    with pa.ipc.open_stream(pa.BufferReader(file.read_bytes())) as reader:
        batches = list(reader)

    rows = join([from_arrow(batch, layout, "test") for batch in batches])
    pieces = change(rows)
    encoder = StreamEncoder(layout)
    content = b"".join(map(bytes, encoder.begin()))
    blocks = []
    for piece in pieces:
        data = b"".join(map(bytes, encoder.batch(piece)))
        buckets = torch.empty_like(piece.keys)
        _native.buckets(piece.keys.contiguous(), layout.buckets, buckets)
        ends = [int(buckets.min()), int(buckets.max())]
        blocks.append([len(content), len(data), _native.crc32c(data), len(piece), *ends])
        content += data
    content += b"".join(map(bytes, encoder.end()))
    file.write_bytes(content)
    forged.write_snapshot(lambda value: value["tables"][name].update(bytes=len(content), blocks=blocks))


def key_twice_in_a_snapshot(path, draw):
    def change(rows):
        at = draw(st.integers(0, len(rows) - 1))
        # Next to its first: in the order of buckets.
        again = torch.cat([torch.arange(at + 1), torch.arange(at, len(rows))])
        rows = rows.some(again)
        cuts = sorted(draw(st.sets(st.integers(1, len(rows) - 1), max_size=4)))
        ends = [0, *cuts, len(rows)]
        return [rows.some(slice(begin, end)) for begin, end in pairwise(ends)]

    _snapshot_of(path, draw, change)


def snapshots_out_of_order(path, draw):
    def change(rows):
        order = torch.arange(len(rows))
        order[[0, -1]] = order[[-1, 0]]
        return [rows.some(order)]

    _snapshot_of(path, draw, change)


def blocks_that_lie(path, draw):
    forged = Forged(path)
    forged.set_blocks(draw(st.integers(0, 5)), draw(st.sampled_from([0, 1, 5, LARGE, 2**63 - 1])))


def segments_of_another_log(path, draw):
    file = sorted((path / "segments").iterdir())[-1]
    content = file.read_bytes()
    file.write_bytes(header_of("ab" * 16, draw(st.sampled_from([1, 2, 2**63]))) + content[64:])


MUST_BE_REFUSED = (
    key_twice_in_a_frame,
    key_twice_in_two_frames,
    key_put_and_deleted,
    scores_that_are_not_finite,
)
DAMAGED_SNAPSHOTS = (key_twice_in_a_snapshot, snapshots_out_of_order)
OTHERS = (
    rows_that_are_not_finite,
    counts_that_lie,
    headers_that_lie,
    tables_that_are_not_there,
    compressed_batches,
    schemas_of_others,
    commits_that_say_strange_things,
    claims_of_the_rest_of_the_file,
    holes,
    blocks_that_lie,
    segments_of_another_log,
)
FLAWS = (*MUST_BE_REFUSED, *DAMAGED_SNAPSHOTS, *OTHERS)
