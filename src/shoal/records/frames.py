"""Frames, of which a log's segments are made: a header of 64 bytes, a payload, and zeros up to a multiple of 64 bytes.

The header, little-endian:

    offset  bytes
         0      4  magic "SHFR"
         4      2  kind: 1 puts, 2 deletes, 3 commit, 4 base
         6      2  version of the header: 1, or 2 where the payload is deflated
         8      4  table: its number in the manifest; 0xffffffff in a commit and a base
        12      4  CRC-32C of the payload
        16      8  version: the commit that the frame belongs to
        24      8  length of the payload, without the zeros after it
        32      8  rows in the payload; 0 in a commit and a base
        40      8  length of the payload before it was deflated, in version 2; 0 in version 1
        48     12  zeros
        60      4  CRC-32C of the 60 bytes before it

The payload of puts and deletes is one Arrow IPC stream of one record batch (rows.py), deflated (RFC 1951) where it is
small: of one row, most of it is the schema. The payload of a commit is a JSON object in UTF-8, and after a zero byte
what is no text. A base repeats a commit that is elsewhere: the one before the first of a segment.
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa
from torch import Tensor

from shoal import _native
from shoal.config.rows import KEY_BYTES
from shoal.errors import InputError, StorageError
from shoal.records import ipc, strict_json
from shoal.records.arrow import arrow_schema, from_arrow, keys_from_arrow, keys_schema, keys_to_arrow, to_arrow
from shoal.records.layout import Layout
from shoal.records.rows import Rows

Buffer = bytes | bytearray | memoryview

HEADER_BYTES = 64
FRAME_ALIGNMENT = 64
NO_TABLE = 2**32 - 1

MAGIC = b"SHFR"
_PLAIN, _DEFLATED = 1, 2  # versions of a header
# Payloads up to there are deflated: 1 KiB becomes 0.4 KiB in 15 us. Larger ones are mostly numbers, which stay large.
_MOST_DEFLATED = 4096
_RAW_DEFLATE = -15  # as zlib calls a stream without header and checksum
_HEADER = struct.Struct("<4sHHIIQQQQ12s")
_CRC = struct.Struct("<I")
_END_OF_TEXT = b"\0"  # a byte that JSON never has
# Bytes of a payload besides its values: Arrow's messages, and the padding of each column.
_MESSAGE_BYTES = 1 << 16
_COLUMN_BYTES = 1 << 11
_U64_MAX = 2**64 - 1
assert _HEADER.size + _CRC.size == HEADER_BYTES


class Kind(IntEnum):
    """The kind of a frame's payload. The numbers are in files and never change."""

    PUTS = 1
    DELETES = 2
    COMMIT = 3
    BASE = 4


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame, before its payload."""

    kind: Kind
    table: int  # NO_TABLE for a commit and a base
    version: int
    rows: int
    payload_bytes: int
    payload_crc: int
    inflated_bytes: int = 0  # of the payload, where it is deflated

    @property
    def content_bytes(self) -> int:
        """Bytes of the payload after it is inflated."""
        return self.inflated_bytes or self.payload_bytes

    @property
    def padding_bytes(self) -> int:
        """Zeros after the payload."""
        return -self.payload_bytes % FRAME_ALIGNMENT

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole frame: header, payload, padding."""
        return HEADER_BYTES + self.payload_bytes + self.padding_bytes

    def pack(self) -> bytes:
        """Returns the header's 64 bytes."""
        wrong = self._wrong()
        if wrong is not None:
            raise InputError(f"[frame] {wrong}.")
        form = _DEFLATED if self.inflated_bytes else _PLAIN
        sizes = (self.payload_bytes, self.rows, self.inflated_bytes)
        packed = _HEADER.pack(MAGIC, self.kind, form, self.table, self.payload_crc, self.version, *sizes, b"")
        return packed + _CRC.pack(_native.crc32c(packed))

    @classmethod
    def unpack(cls, data: Buffer, where: str) -> "FrameHeader":
        """Returns the header in the first 64 bytes of `data`."""
        if len(data) < HEADER_BYTES:
            raise StorageError(f"[{where}] wanted a frame's header of {HEADER_BYTES} bytes; got {len(data)}.")
        raw = bytes(data[:HEADER_BYTES])
        magic, kind, form, table, payload_crc, version, payload_bytes, rows, inflated, zeros = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise StorageError(f"[{where}] wanted a frame, which begins with {MAGIC!r}; got {magic!r}. Is it damaged?")
        (wanted_crc,) = _CRC.unpack_from(raw, _HEADER.size)
        if (crc := _native.crc32c(raw[: _HEADER.size])) != wanted_crc:
            raise StorageError(f"[{where}] wanted a frame's header with CRC {wanted_crc:#010x}; got {crc:#010x}.")
        if form not in (_PLAIN, _DEFLATED):
            raise StorageError(
                f"[{where}] wanted version {_PLAIN} or {_DEFLATED} of a frame's header; got {form}. Was it written by "
                "a newer version?"
            )
        if kind not in list(Kind) or any(zeros) or (form == _DEFLATED) != (inflated > 0):
            raise StorageError(
                f"[{where}] wanted a frame of kind 1 to 4 and zeros where nothing is defined; got kind {kind}. Was it "
                "written by a newer version?"
            )
        header = cls(Kind(kind), table, version, rows, payload_bytes, payload_crc, inflated)
        wrong = header._wrong()
        if wrong is not None:
            raise StorageError(f"[{where}] {wrong}. Is it damaged?")
        return header

    def _wrong(self) -> str | None:
        """Returns what contradicts itself in the header; None where nothing does."""
        bounds = (
            ("table", self.table, NO_TABLE),
            ("version", self.version, _U64_MAX),
            ("rows", self.rows, _U64_MAX),
            ("payload_bytes", self.payload_bytes, _U64_MAX),
            ("payload_crc", self.payload_crc, 2**32 - 1),
            ("inflated_bytes", self.inflated_bytes, _MOST_DEFLATED),
        )
        for name, given, high in bounds:
            if not 0 <= given <= high:
                return f"{name}: wanted 0 to {high}; got {given}"
        is_commit = self.kind in (Kind.COMMIT, Kind.BASE)
        if is_commit != (self.table == NO_TABLE):
            return f"table: wanted {NO_TABLE} in a commit and there only; got {self.table} in {self.kind.name.lower()}"
        if is_commit and (self.rows or self.inflated_bytes):
            what, got = ("rows", self.rows) if self.rows else ("inflated_bytes", self.inflated_bytes)
            return f"{what}: wanted 0 in a commit; got {got}"
        if self.rows * KEY_BYTES > self.content_bytes:
            return f"rows: wanted keys of {KEY_BYTES} bytes in {self.content_bytes} bytes; got {self.rows} rows"
        return None


def encode_puts(rows: Rows, layout: Layout, *, table: int, version: int) -> list[memoryview]:
    """Returns a frame of rows that were put, in pieces to be written one after another; with state if rows have scores.

    Large pieces are the tensors' own memory, which must not change before they are written.
    """
    return _row_frame(Kind.PUTS, table, version, len(rows), ipc.encode(to_arrow(rows, layout)))


def encode_deletes(keys: Tensor, layout: Layout, *, table: int, version: int) -> list[memoryview]:
    """Returns a frame of keys that were deleted, in pieces as `encode_puts` does."""
    return _row_frame(Kind.DELETES, table, version, keys.numel(), ipc.encode(keys_to_arrow(keys, layout)))


def encode_commit(
    content: Mapping[str, Any], *, version: int, binary: bytes = b"", kind: Kind = Kind.COMMIT
) -> list[memoryview]:
    """Returns the frame that ends a version, or a base, in pieces. content: values that JSON can hold; tuples come back
    as lists. binary: data that is no text."""
    payload = strict_json.encode(dict(content), f"commit {version}")
    return _frame(kind, NO_TABLE, version, 0, [memoryview(payload + _END_OF_TEXT + binary if binary else payload)])


def decode_puts(header: FrameHeader, payload: Buffer, layout: Layout, where: str, *, with_state: bool = True) -> Rows:
    """Returns the rows of a frame, over the memory of `payload` where it is not deflated. They are checked as in
    `from_arrow`.

    REQUIRES: `payload` begins at a multiple of 8 bytes, as that of a frame at a multiple of 64 does.
    """
    batch = _batch(header, Kind.PUTS, payload, arrow_schema(layout, with_state), where)
    return from_arrow(batch, layout, where, with_state=with_state)


def decode_deletes(header: FrameHeader, payload: Buffer, layout: Layout, where: str) -> Tensor:
    """Returns the keys of a frame of deletes, over the memory of `payload` if it is not deflated; all is checked."""
    return keys_from_arrow(_batch(header, Kind.DELETES, payload, keys_schema(layout), where), layout, where)


def decode_commit(header: FrameHeader, payload: Buffer, where: str, kind: Kind = Kind.COMMIT) -> dict[str, Any]:
    """Returns the content that was given to `encode_commit`."""
    _require_kind(header, kind, where)
    check_payload(header, payload, where)
    content = strict_json.parse(bytes(payload).partition(_END_OF_TEXT)[0], where)
    if not isinstance(content, dict):
        raise StorageError(f"[{where}] wanted a JSON object in a commit; got a {type(content).__name__}.")
    return content


def binary_of(payload: Buffer) -> bytes:
    """Returns the binary data that was given to `encode_commit`."""
    return bytes(payload).partition(_END_OF_TEXT)[2]


def most_bytes(layout: Layout, rows: int) -> int:
    """Returns the most bytes that so many rows, with state, take as Arrow's messages."""
    names = sum(len(name.encode()) for name in (layout.name, *(column.name for column in layout.columns)))
    values = rows * layout.format.record_bytes
    return values + _MESSAGE_BYTES + _COLUMN_BYTES * len(layout.columns) + 2 * names


def require_explained(header: FrameHeader, layout: Layout, where: str) -> None:
    """Raises StorageError where a payload is larger than its rows can be. Call it before the payload is read."""
    most = most_bytes(layout, header.rows)
    if header.payload_bytes > most:
        raise StorageError(
            f"[{where}] wanted {most} bytes at most for {header.rows} rows; got {header.payload_bytes}. Is it damaged?"
        )


def check_payload(header: FrameHeader, payload: Buffer, where: str) -> None:
    """Raises StorageError where `payload` has another length or CRC than the header says. Decoding a frame calls it."""
    size = memoryview(payload).nbytes
    if size != header.payload_bytes:
        raise StorageError(f"[{where}] wanted a payload of {header.payload_bytes} bytes; got {size}.")
    if (crc := _native.crc32c(payload)) != header.payload_crc:
        raise StorageError(
            f"[{where}] wanted a payload with CRC {header.payload_crc:#010x}; got {crc:#010x}. It is damaged."
        )


def _row_frame(kind: Kind, table: int, version: int, rows: int, payload: list[memoryview]) -> list[memoryview]:
    size = sum(map(len, payload))
    if size > _MOST_DEFLATED:
        return _frame(kind, table, version, rows, payload)
    deflated = memoryview(zlib.compress(b"".join(payload), wbits=_RAW_DEFLATE))
    if len(deflated) >= size:
        return _frame(kind, table, version, rows, payload)
    return _frame(kind, table, version, rows, [deflated], size)


def inflated(header: FrameHeader, payload: Buffer, where: str) -> Buffer:
    """Returns a payload as it was before it was deflated; the same where it is not deflated."""
    if not header.inflated_bytes:
        return payload
    stream = zlib.decompressobj(_RAW_DEFLATE)
    try:
        data = bytearray(stream.decompress(payload, header.inflated_bytes + 1))
    except zlib.error as error:
        raise StorageError(f"[{where}] wanted a deflated payload; got one with: {error}. Is it damaged?") from None
    if len(data) != header.inflated_bytes or not stream.eof or stream.unused_data:
        raise StorageError(
            f"[{where}] wanted a payload that inflates to {header.inflated_bytes} bytes and ends there; got another. "
            f"Is it damaged?"
        )
    return data


def _frame(
    kind: Kind, table: int, version: int, rows: int, payload: list[memoryview], inflated_bytes: int = 0
) -> list[memoryview]:
    crc = 0
    for piece in payload:
        crc = _native.crc32c(piece, crc)
    header = FrameHeader(kind, table, version, rows, sum(map(len, payload)), crc, inflated_bytes)
    padding = [memoryview(bytes(header.padding_bytes))] if header.padding_bytes else []
    return [memoryview(header.pack()), *payload, *padding]


def _batch(header: FrameHeader, kind: Kind, payload: Buffer, schema: pa.Schema, where: str) -> pa.RecordBatch:
    _require_kind(header, kind, where)
    check_payload(header, payload, where)
    batch = ipc.decode(inflated(header, payload, where), schema, where)
    if batch.num_rows != header.rows:
        raise StorageError(f"[{where}] wanted {header.rows} rows; got {batch.num_rows}. Is it damaged?")
    return batch


def _require_kind(header: FrameHeader, kind: Kind, where: str) -> None:
    if header.kind is not kind:
        raise StorageError(f"[{where}] wanted a frame of {kind.name.lower()}; got one of {header.kind.name.lower()}.")
