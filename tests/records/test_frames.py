"""Frames: the bytes of a log."""

import struct
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_rows import LAYOUT, assert_same, layouts, rows_of

from shoal import _native
from shoal.errors import InputError, StorageError
from shoal.records import ipc
from shoal.records.arrow import to_arrow
from shoal.records.frames import (
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    NO_TABLE,
    FrameHeader,
    Kind,
    binary_of,
    check_payload,
    decode_commit,
    decode_deletes,
    decode_puts,
    encode_commit,
    encode_deletes,
    encode_puts,
)


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


def parts(frame: bytes) -> tuple[FrameHeader, memoryview]:
    header = FrameHeader.unpack(frame, "here")
    assert len(frame) == header.frame_bytes
    assert len(frame) % FRAME_ALIGNMENT == 0
    payload = memoryview(frame)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    assert not any(frame[HEADER_BYTES + header.payload_bytes :])
    return header, payload


def test_crc32c_of_any_contiguous_buffer():
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(b"") == 0
    assert _native.crc32c(bytearray(b"56789"), _native.crc32c(b"1234")) == 0xE3069283
    assert _native.crc32c(memoryview(b"_123456789")[1:]) == 0xE3069283
    assert _native.crc32c(pa.py_buffer(b"123456789")) == 0xE3069283
    assert _native.crc32c(data=b"6789", seed=_native.crc32c(b"12345")) == 0xE3069283
    with pytest.raises(TypeError):
        _native.crc32c(memoryview(b"12345678")[::2])
    with pytest.raises(TypeError):
        _native.crc32c("123456789")


headers = st.builds(
    FrameHeader,
    kind=st.sampled_from([Kind.PUTS, Kind.DELETES]),
    table=st.integers(0, NO_TABLE - 1),
    version=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 2**60),
    payload_bytes=st.integers(2**63, 2**64 - 1),
    payload_crc=st.integers(0, 2**32 - 1),
)


@given(headers)
def test_headers_come_back(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert FrameHeader.unpack(packed, "here") == header
    assert FrameHeader.unpack(memoryview(packed + b"more"), "here") == header


def test_header_is_as_documented():
    header = FrameHeader(Kind.DELETES, 3, 0x0102030405060708, 2, 1000, 0xAABBCCDD)
    packed = header.pack()
    assert packed[:4] == b"SHFR"
    assert struct.unpack_from("<HHIIQQQ", packed, 4) == (2, 1, 3, 0xAABBCCDD, 0x0102030405060708, 1000, 2)
    assert packed[40:60] == bytes(20)
    assert struct.unpack_from("<I", packed, 60) == (_native.crc32c(packed[:60]),)
    assert header.padding_bytes == 24
    assert header.frame_bytes == 64 + 1024


def with_crc(raw: bytes) -> bytes:
    return raw[:60] + struct.pack("<I", _native.crc32c(raw[:60]))


HEADER = FrameHeader(Kind.PUTS, 3, 9, 2, 1000, 77)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, b"SHFQ", "begins with"),
        (4, b"\x00\x00", "of kind 1 to 4"),
        (4, b"\x05\x00", "of kind 1 to 4"),
        (4, b"\x03\x00", "in a commit"),
        (4, b"\x04\x00", "in a commit"),
        (6, b"\x02\x00", "zeros"),
        (6, b"\x03\x00", "newer version"),
        (8, b"\xff\xff\xff\xff", "in a commit"),
        (32, b"\x00\x00\x00\x00\x00\x00\x00\x80", "keys of 8 bytes"),
        (32, b"\x7e", "keys of 8 bytes"),
        (40, b"\x01", "zeros"),
        (48, b"\x01", "zeros"),
        (59, b"\x01", "zeros"),
    ],
)
def test_impossible_headers_are_refused_even_with_their_crc(at, value, complaint):
    raw = bytearray(HEADER.pack())
    raw[at : at + len(value)] = value
    with pytest.raises(StorageError, match=rf"^\[7\.seg\] .*{complaint}"):
        FrameHeader.unpack(with_crc(bytes(raw)), "7.seg")


def test_short_headers_are_refused():
    packed = HEADER.pack()
    for size in range(HEADER_BYTES):
        with pytest.raises(StorageError, match="of 64 bytes"):
            FrameHeader.unpack(packed[:size], "here")


@pytest.mark.parametrize(
    "change",
    [
        {"table": -1},
        {"table": NO_TABLE},
        {"table": 2**32},
        {"version": -1},
        {"version": 2**64},
        {"rows": 126},
        {"payload_bytes": 2**64},
        {"kind": Kind.COMMIT},
        {"kind": Kind.COMMIT, "table": NO_TABLE},
    ],
)
def test_impossible_headers_are_not_written(change):
    with pytest.raises(InputError, match=r"^\[frame\]"):
        replace(HEADER, **change).pack()


@given(layouts, st.integers(0, 20), st.booleans(), st.integers(0, 2**64 - 1))
def test_puts_come_back_bit_for_bit(layout, count, serving, version):
    rows = rows_of(layout, count, serving=serving)
    header, payload = parts(joined(encode_puts(rows, layout, table=5, version=version)))
    assert (header.kind, header.table, header.version, header.rows) == (Kind.PUTS, 5, version, count)
    assert_same(decode_puts(header, payload, layout, "here", with_state=not serving), rows)


@given(layouts, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_deletes_come_back(layout, keys):
    given = torch.tensor(keys, dtype=torch.int64)
    header, payload = parts(joined(encode_deletes(given, layout, table=0, version=1)))
    assert (header.kind, header.rows) == (Kind.DELETES, len(keys))
    assert decode_deletes(header, payload, layout, "here").equal(given)


def test_commits_come_back():
    content = {"step": 12, "time": 1.5, "née": ["x", None, True], "big": 2**64, "inner": {"a": {}}}
    header, payload = parts(joined(encode_commit(content, version=7)))
    assert (header.kind, header.table, header.rows, header.version) == (Kind.COMMIT, NO_TABLE, 0, 7)
    assert decode_commit(header, payload, "here") == content
    assert decode_commit(*parts(joined(encode_commit({}, version=7))), "here") == {}


def test_large_columns_are_written_and_read_where_they_lie():
    rows = rows_of(LAYOUT, 1000)
    pieces = encode_puts(rows, LAYOUT, table=0, version=1)
    addresses = {pa.py_buffer(piece).address for piece in pieces}
    tensors = [rows.keys, rows.weights, *rows.state.values(), rows.scores]
    assert addresses >= {tensor.data_ptr() for tensor in tensors}
    # The rest is a header, metadata and an end, which are small.
    assert sum(map(len, pieces)) - sum(tensor.nbytes for tensor in tensors) < 4096
    assert len(pieces) <= len(tensors) + 4

    header, payload = parts(joined(pieces))
    memory = pa.py_buffer(payload)
    found = decode_puts(header, payload, LAYOUT, "here")
    for tensor in [found.keys, found.weights, *found.state.values(), found.scores]:
        assert memory.address <= tensor.data_ptr() < memory.address + memory.size


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_the_payload_is_an_ordinary_arrow_stream(count):
    rows = rows_of(LAYOUT, count)
    header, payload = parts(joined(encode_puts(rows, LAYOUT, table=0, version=1)))
    assert (header.inflated_bytes > 0) == (count < 1000)
    if header.inflated_bytes:
        payload = zlib.decompress(payload, wbits=-15)  # RFC 1951, by any library
        assert len(payload) == header.inflated_bytes
    table = pa.ipc.open_stream(payload).read_all()
    assert table.column("key").to_pylist() == rows.keys.tolist()
    assert table.column("row").to_pylist() == rows.weights.tolist()


def test_frames_of_another_kind_table_or_payload_are_refused():
    puts = parts(joined(encode_puts(rows_of(LAYOUT, 3), LAYOUT, table=0, version=1)))
    deletes = parts(joined(encode_deletes(torch.zeros(3, dtype=torch.int64), LAYOUT, table=0, version=1)))
    commit = parts(joined(encode_commit({}, version=1)))
    with pytest.raises(StorageError, match="wanted a frame of puts; got one of deletes"):
        decode_puts(*deletes, LAYOUT, "here")
    with pytest.raises(StorageError, match="wanted a frame of deletes; got one of puts"):
        decode_deletes(*puts, LAYOUT, "here")
    with pytest.raises(StorageError, match="wanted a frame of commit; got one of puts"):
        decode_commit(*puts, "here")
    with pytest.raises(StorageError, match="wanted a frame of puts; got one of commit"):
        decode_puts(*commit, LAYOUT, "here")
    with pytest.raises(StorageError, match="wanted Arrow columns"):
        decode_puts(*puts, replace(LAYOUT, name="user"), "here")
    with pytest.raises(StorageError, match="wanted Arrow columns"):
        decode_puts(*puts, LAYOUT, "here", with_state=False)
    with pytest.raises(StorageError, match=f"wanted a payload of {puts[0].payload_bytes} bytes"):
        check_payload(puts[0], deletes[1], "here")
    with pytest.raises(StorageError, match="with CRC"):
        check_payload(replace(puts[0], payload_crc=1), puts[1], "here")
    with pytest.raises(StorageError, match="wanted 4 rows; got 3"):
        decode_puts(replace(puts[0], rows=4), puts[1], LAYOUT, "here")


def header_for(payload: bytes, kind: Kind = Kind.PUTS, rows: int = 3) -> FrameHeader:
    table = NO_TABLE if kind is Kind.COMMIT else 0
    return FrameHeader(kind, table, 1, rows, len(payload), _native.crc32c(payload))


def deflated(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


def test_what_is_no_text_in_a_commit_comes_back():
    content, binary = {"née": "\0"}, bytes(range(256)) * 3
    header, payload = parts(joined(encode_commit(content, version=7, binary=binary)))
    assert decode_commit(header, payload, "here") == content
    assert binary_of(payload) == binary
    assert binary_of(parts(joined(encode_commit(content, version=7)))[1]) == b""


def test_payloads_that_do_not_inflate_to_what_their_header_says_are_refused():
    plain = stream([to_arrow(rows_of(LAYOUT, 3), LAYOUT)])
    good = deflated(plain)
    fine = replace(header_for(good), inflated_bytes=len(plain))
    assert len(decode_puts(fine, good, LAYOUT, "here")) == 3
    for payload, size in [
        (good, len(plain) - 1),
        (good, len(plain) + 1),
        (good[:-1], len(plain)),
        (good + b"x", len(plain)),
        (plain, len(plain)),
        (deflated(bytes(2**24)), 4096),  # a bomb
        (b"", len(plain)),
    ]:
        header = replace(header_for(payload, rows=0), inflated_bytes=size)
        with pytest.raises(StorageError, match=r"^\[here\] wanted a (deflated )?payload"):
            decode_puts(header, payload, LAYOUT, "here")
    with pytest.raises(InputError, match="inflated_bytes: wanted 0 to 4096"):
        replace(fine, inflated_bytes=4097).pack()
    with pytest.raises(StorageError, match="keys of 8 bytes"):
        raw = bytearray(replace(fine, rows=3).pack())
        raw[32] = 255  # rows
        FrameHeader.unpack(with_crc(bytes(raw)), "here")


@pytest.mark.parametrize("text", [b"[]", b"1", b"null", b'{"a":1,"a":2}', b"{", b'{"a":NaN}', b""])
def test_commits_that_are_no_object_are_refused(text):
    with pytest.raises(StorageError, match=r"^\[here\] wanted"):
        decode_commit(header_for(text, Kind.COMMIT, 0), text, "here")


def stream(batches: list[pa.RecordBatch], **options) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_streams_that_are_not_one_plain_batch_are_refused():
    batch = to_arrow(rows_of(LAYOUT, 3), LAYOUT)
    plain = stream([batch])
    assert plain == joined(ipc.encode(batch))
    none = pa.BufferOutputStream()
    pa.ipc.new_stream(none, batch.schema).close()
    compressed = to_arrow(rows_of(LAYOUT, 3000), LAYOUT)
    for payload, complaint in [
        (stream([batch, batch]), "nothing after it"),
        (plain + bytes(8), "nothing after it"),
        (plain + plain, "nothing after it"),
        (none.getvalue().to_pybytes(), "wanted a record batch in an Arrow stream; got nothing"),
        (plain[: len(plain) // 2], "wanted"),
        (plain[:100], "wanted"),
        (b"", "wanted a schema in an Arrow stream; got nothing"),
        (stream([compressed], compression="lz4"), "without compression"),
        (stream([compressed], compression="zstd"), "without compression"),
    ]:
        with pytest.raises(StorageError, match=complaint):
            decode_puts(header_for(payload), payload, LAYOUT, "here")


def test_a_batch_that_claims_gigabytes_takes_none():
    """Compressed buffers begin with their length uncompressed, which Arrow would allocate at once."""
    batch = to_arrow(rows_of(LAYOUT, 3000), LAYOUT)
    raw = bytearray(stream([batch], compression="zstd"))
    frames = [at for at in range(8, len(raw) - 4) if raw[at : at + 4] == b"\x28\xb5\x2f\xfd"]
    assert frames
    for at in frames:
        raw[at - 8 : at] = struct.pack("<q", 2**36)
    before = pa.total_allocated_bytes()
    with pytest.raises(StorageError):
        decode_puts(header_for(bytes(raw), rows=3000), bytes(raw), LAYOUT, "here")
    assert pa.total_allocated_bytes() - before < 2**20
