"""What leaves memory, as bytes: rows as Arrow, frames of a log, dense tensors, state dicts. No file is touched here.

Whatever is decoded is hostile until checked: what is wrong with it is a StorageError, and no more memory is asked for
than the size of what came explains.
"""

from shoal.records.frames import (
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    NO_TABLE,
    FrameHeader,
    Kind,
    check_payload,
    decode_commit,
    decode_deletes,
    decode_puts,
    encode_commit,
    encode_deletes,
    encode_puts,
)
from shoal.records.layout import Layout, StateColumn, layout_of
from shoal.records.rows import (
    Rows,
    arrow_schema,
    from_arrow,
    keys_from_arrow,
    keys_schema,
    keys_to_arrow,
    to_arrow,
)

__all__ = [
    "FRAME_ALIGNMENT",
    "HEADER_BYTES",
    "NO_TABLE",
    "FrameHeader",
    "Kind",
    "Layout",
    "Rows",
    "StateColumn",
    "arrow_schema",
    "check_payload",
    "decode_commit",
    "decode_deletes",
    "decode_puts",
    "encode_commit",
    "encode_deletes",
    "encode_puts",
    "from_arrow",
    "keys_from_arrow",
    "keys_schema",
    "keys_to_arrow",
    "layout_of",
    "to_arrow",
]
