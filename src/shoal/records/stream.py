"""Many record batches of a table as one Arrow IPC stream. A batch whose place is known can be read without the
others."""

import pyarrow as pa

from shoal.records.arrow import arrow_schema, from_arrow, to_arrow
from shoal.records.ipc import Buffer, Pieces, decode_batch
from shoal.records.layout import Layout
from shoal.records.rows import Rows


class StreamEncoder:
    """Gives the stream's bytes in pieces, to be written one after another."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sink = Pieces()
        self._file = pa.PythonFile(self._sink, mode="w")
        schema = arrow_schema(layout)
        self._writer = pa.ipc.new_stream(self._file, schema)
        # The writer writes it with the first batch, or at the end.
        self._schema = memoryview(schema.serialize()).cast("B")
        self._is_written = False

    def begin(self) -> list[memoryview]:
        """Returns the schema."""
        return [self._schema]

    def _take(self) -> list[memoryview]:
        pieces = self._sink.take()
        if not self._is_written:
            size = len(self._schema)
            assert pieces[0][:size] == self._schema
            pieces[0] = pieces[0][size:]
            self._is_written = True
        return pieces

    def batch(self, rows: Rows) -> list[memoryview]:
        """Returns a record batch; large pieces are the rows' own memory."""
        self._writer.write_batch(to_arrow(rows, self._layout))
        return self._take()

    def end(self) -> list[memoryview]:
        """Returns what comes after the last batch."""
        self._writer.close()
        return self._take()


class StreamDecoder:
    """Reads batches of a stream, each from its own bytes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._schema = arrow_schema(layout)

    def batch(self, data: Buffer, where: str) -> Rows:
        """Returns the rows of a batch, over the memory of `data`; all of it is checked."""
        return from_arrow(decode_batch(data, self._schema, where), self._layout, where)
