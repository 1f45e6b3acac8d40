"""Random bytes and flipped bits: a StorageError or the exact data, and no more memory than they explain."""

import contextlib
import random
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_rows import LAYOUT, assert_same, rows_of

from shoal import _native
from shoal.errors import StorageError
from shoal.records import Layout, ipc, nested, strict_json, tensors
from shoal.records.arrow import arrow_schema, from_arrow, to_arrow
from shoal.records.frames import (
    HEADER_BYTES,
    FrameHeader,
    Kind,
    decode_commit,
    decode_deletes,
    decode_puts,
    encode_commit,
    encode_deletes,
    encode_puts,
)

T = TypeVar("T")

ROUNDS = 1500
MOST_BYTES = 64 * 2**20


def attempt(decode: Callable[..., T], *args: object, **options: object) -> T | None:
    """What the call gives, or None where it raises StorageError; the process must not have grown much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = None
    with contextlib.suppress(StorageError):
        found = decode(*args, **options)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    return found


def flips(data: bytes, rounds: int = ROUNDS):
    """`data` with one to four bits flipped, or cut, or bytes of it set to extremes or moved elsewhere."""
    draw = random.Random(0)
    for _ in range(rounds):
        changed = bytearray(data)
        kind = draw.randrange(8)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            if kind < 4:
                changed[at] ^= 1 << draw.randrange(8)
            elif kind == 4:
                changed[at : at + 8] = draw.choice(
                    [b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"\xff" * 7 + b"\x7f"]
                )
            elif kind == 5:
                changed[at : at + 4] = draw.randbytes(4)
            elif kind == 6:
                size = draw.choice([4, 8, 16])
                source = draw.randrange(len(changed))
                changed[at : at + size] = changed[source : source + size]
        if kind == 7:
            del changed[draw.randrange(len(changed)) :]
        yield bytes(changed)


def header_of(payload: bytes, kind: Kind, rows: int) -> FrameHeader:
    """As an attacker writes it: the CRC fits."""
    return FrameHeader(kind, 0, 1, rows, len(payload), _native.crc32c(payload))


def frame_decoded(frame: bytes, decode, *args):
    header = FrameHeader.unpack(frame, "here")
    return decode(header, memoryview(frame)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes], *args)


def test_flipped_frames_of_puts():
    rows = rows_of(LAYOUT, 9)
    frame = b"".join(encode_puts(rows, LAYOUT, table=1, version=3))
    for changed in flips(frame):
        found = attempt(frame_decoded, changed, decode_puts, LAYOUT, "here")
        if found is None:
            continue
        assert_same(found, rows)


def test_flipped_frames_of_deletes():
    keys = torch.arange(9)
    frame = b"".join(encode_deletes(keys, LAYOUT, table=1, version=3))
    for changed in flips(frame):
        found = attempt(frame_decoded, changed, decode_deletes, LAYOUT, "here")
        if found is None:
            continue
        assert found.equal(keys)


def test_flipped_frames_of_commits():
    content = {"step": 5, "tables": {"item": [1, 2.5, None, "née"]}}
    frame = b"".join(encode_commit(content, version=3))
    for changed in flips(frame):
        found = attempt(frame_decoded, changed, decode_commit, "here")
        if found is None:
            continue
        assert found == content


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flipped_arrow_streams_whose_crc_fits(dtype):
    """Whatever still decodes has the shapes of the layout and lies within the payload."""
    layout = Layout("item", 5, dtype, LAYOUT.columns)
    stream = b"".join(ipc.encode(_batch(layout)))
    decoded = 0
    for changed in flips(stream, 2 * ROUNDS):
        payload = memoryview(changed)
        memory = pa.py_buffer(payload)
        found = attempt(decode_puts, header_of(changed, Kind.PUTS, 9), payload, layout, "here")
        if found is None:
            continue
        decoded += 1
        for tensor, shape in [(found.keys, (9,)), (found.weights, (9, 5)), (found.scores, (9,))]:
            assert tensor.shape == shape
            assert memory.address <= tensor.data_ptr()
            assert tensor.data_ptr() + tensor.nbytes <= memory.address + memory.size
            tensor.clone()
    assert decoded > 10  # flips in values


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_flipped_compressed_streams(compression):
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, arrow_schema(LAYOUT), options=options) as writer:
        writer.write_batch(_batch(LAYOUT))
    for changed in flips(sink.getvalue().to_pybytes()):
        found = attempt(decode_puts, header_of(changed, Kind.PUTS, 9), changed, LAYOUT, "here")
        if found is None:
            continue
        assert found.weights.shape == (9, 8)


def _batch(layout: Layout) -> pa.RecordBatch:
    return to_arrow(rows_of(layout, 9), layout)


def test_flipped_tensors():
    given = {
        "a": torch.randn(3, 4),
        "flags": torch.ones(5, dtype=torch.bool),
        "half": torch.randn(7).bfloat16(),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(5),
    }
    data = _joined(tensors.encode(given, {"format": "pt"}))
    for changed in flips(data, 2 * ROUNDS):
        memory = pa.py_buffer(changed)
        decoded = attempt(tensors.decode, changed, "here")
        if decoded is None:
            continue
        found, metadata = decoded
        assert all(isinstance(text, str) for text in metadata.values())
        for tensor in found.values():
            if tensor.numel():
                assert memory.address <= tensor.data_ptr()
                assert tensor.data_ptr() + tensor.nbytes <= memory.address + memory.size
            tensor.clone()


def _joined(encoded: tuple[bytes, list[memoryview]]) -> bytes:
    header, pieces = encoded
    return b"".join([header, *pieces])


def test_flipped_skeletons_and_layouts():
    value = OrderedDict(a=[1, (2.5, None)], b={1: torch.ones(2), "x": 2**70, -1: float("inf")})
    skeleton, flat = nested.flatten(value, "here")
    for changed in flips(strict_json.encode(skeleton, "here")):
        attempt(lambda text: nested.unflatten(strict_json.parse(text, "here"), flat, "here"), changed)
    for changed in flips(strict_json.encode(LAYOUT.to_json(), "here")):
        attempt(lambda text: Layout.from_json(strict_json.parse(text, "here"), "here"), changed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["a", "0x1f"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "float", "tuple", "dict", "ordered", "metadata", "tensor"]), inner, max_size=2
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_skeleton(skeleton):
    attempt(nested.unflatten, skeleton, {"a": torch.ones(1)}, "here")


@given(st.binary(max_size=300))
def test_random_bytes(data):
    for decode in (
        lambda: FrameHeader.unpack(data, "here"),
        lambda: decode_puts(header_of(data, Kind.PUTS, 0), data, LAYOUT, "here"),
        lambda: decode_deletes(header_of(data, Kind.DELETES, 0), data, LAYOUT, "here"),
        lambda: from_arrow(ipc.decode(data, arrow_schema(LAYOUT), "here"), LAYOUT, "here"),
        lambda: tensors.decode(data, "here"),
        lambda: tensors.decode(len(data).to_bytes(8, "little") + data, "here"),
        lambda: tensors.decode((len(data) + 1).to_bytes(8, "little") + b"{" + data, "here"),
        lambda: strict_json.parse(data, "here"),
    ):
        attempt(decode)
