"""One record batch as one self-contained Arrow IPC stream: a schema message, a batch message, the end."""

import struct

import pyarrow as pa

from shoal.errors import StorageError
from shoal.records.excerpt import sentence

Buffer = bytes | bytearray | memoryview
# What Arrow raises for wrong bytes: errors of its own, and Python's errors for numbers and names in them.
ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, IndexError, struct.error)


def encode(batch: pa.RecordBatch) -> list[memoryview]:
    """Returns the stream's bytes in pieces, to be written one after another; columns are views of the batch's
    memory."""
    pieces = Pieces()
    with pa.ipc.new_stream(pa.PythonFile(pieces, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
    return pieces.take()


def decode(data: Buffer, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Returns the batch of a stream with that schema, over the memory of `data`.

    What the batch holds is not checked here: whether lengths fit, and that there are no nulls.
    """
    memory = pa.py_buffer(data)
    source = pa.BufferReader(memory)
    try:
        messages = pa.ipc.MessageReader.open_stream(source)
        found = pa.ipc.read_schema(_next(messages, "schema", where))
        # Checked before the batch is read: a schema of another kind could make Arrow allocate, say for a dictionary.
        require_schema(found, schema, where)
        batch = _batch(_next(messages, "record batch", where), found, where)
        after = next(iter(messages), None)
    except ARROW_ERRORS as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"[{where}] wanted an Arrow stream; got one with: {sentence(str(error))} Is it damaged?"
        ) from None
    if after is not None or source.tell() != memory.size:
        raise StorageError(f"[{where}] wanted one Arrow batch and nothing after it; got more. Is it damaged?")
    return batch


def require_schema(found: pa.Schema, wanted: pa.Schema, where: str) -> None:
    """Raises StorageError unless both are the same, metadata included."""
    if not found.equals(wanted, check_metadata=True):
        raise StorageError(
            f"[{where}] wanted Arrow columns {_shown(wanted)}; got {_shown(found)}. Does it belong to another table, "
            "or to one with another layout?"
        )


def decode_batch(data: Buffer, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Returns the batch of a message that was part of a stream with that schema, over the memory of `data`, as `decode`
    does."""
    source = pa.BufferReader(pa.py_buffer(data))
    try:
        messages = pa.ipc.MessageReader.open_stream(source)
        batch = _batch(_next(messages, "record batch", where), schema, where)
    except ARROW_ERRORS as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"[{where}] wanted an Arrow batch; got one with: {sentence(str(error))} Is it damaged?"
        ) from None
    if source.tell() != memoryview(data).nbytes:
        raise StorageError(f"[{where}] wanted one Arrow batch and nothing after it; got more. Is it damaged?")
    return batch


def _batch(message: pa.Message, schema: pa.Schema, where: str) -> pa.RecordBatch:
    if _is_compressed(message.metadata):
        raise StorageError(f"[{where}] wanted an Arrow stream without compression; got a compressed batch.")
    return pa.ipc.read_record_batch(message, schema)


class Pieces:
    """A file for Arrow to write to, which keeps the buffers that are written and copies none."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytearray | pa.Buffer] = []

    def write(self, data: "bytes | pa.Buffer") -> int:
        # Metadata and padding come as many small bytes, columns as Arrow's buffers.
        if not isinstance(data, bytes):
            self._pieces.append(data)
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: nothing is buffered elsewhere."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[memoryview]:
        """Returns what was written since the last call."""
        pieces, self._pieces = self._pieces, []
        return [memoryview(piece).cast("B") for piece in pieces]


def _next(messages: pa.ipc.MessageReader, kind: str, where: str) -> pa.Message:
    message = next(iter(messages), None)
    if message is None or message.type != kind:
        came = "nothing" if message is None else f"a {message.type}"
        raise StorageError(f"[{where}] wanted a {kind} in an Arrow stream; got {came}. Is it damaged?")
    return message


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Returns whether a batch's buffers are compressed: each then says how much memory it needs, whatever its size.

    Arrow has verified the flatbuffer but does not tell. Message: header is its third field; RecordBatch: compression
    is its fourth.
    """
    data = memoryview(metadata).cast("B")
    message = _offset(data, 0)
    header = _field(data, message, 2)
    return header is None or _field(data, _offset(data, header), 3) is not None


def _offset(data: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Returns where a flatbuffer's table has a field; None where it does not have it."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * number >= int(struct.unpack_from("<H", data, vtable)[0]):
        return None
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else None


def _shown(schema: pa.Schema) -> str:
    text = str(schema.to_string(show_field_metadata=True, show_schema_metadata=True)).replace("\n", ", ")
    return text if len(text) <= 500 else f"{text[:500]}..."
