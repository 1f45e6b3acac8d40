"""Rows and changes of a table as batches of a Parquet file; parquet.py has the columns."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from shoal.interop.export_rows import SINCE, Outgoing, regrouped
from shoal.interop.files import Sink
from shoal.log.files import FilePath
from shoal.records import Layout, Rows

STATE = "state."  # the columns of the optimizer are named so, and then as the optimizer names them
_PUT, _DELETE = "put", "delete"


def schema_of(source: Outgoing, since: int | None) -> pa.Schema:
    """Returns the columns of a file with a table's rows, or with its changes after the version `since`."""
    layout = source.layout
    optional = since is not None
    lists = {"row": layout.dim} | {f"{STATE}{column.name}": column.width for column in layout.columns}
    fields = [pa.field("key", pa.int64(), nullable=False)]
    fields += [pa.field("op", pa.string(), nullable=False)] if optional else []
    fields += [pa.field(name, _list_of(width), nullable=optional) for name, width in lists.items()]
    fields.append(pa.field("score", pa.float64(), nullable=optional))
    told = source.told() | ({SINCE: str(since)} if optional else {})
    return pa.schema(fields, metadata=told)


def _list_of(width: int) -> pa.DataType:
    return pa.list_(pa.field("element", pa.float32(), nullable=False), width)


class ParquetWriter:
    """Writes batches to a file, each as one row group."""

    def __init__(self, path: FilePath, schema: pa.Schema) -> None:
        self._sink = Sink(path)
        self._schema = schema
        self._writer: Any = None

    def __enter__(self) -> "ParquetWriter":
        try:
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._sink, mode="w"),
                self._schema,
                compression="zstd",
                # Rows hardly repeat.
                use_dictionary=["op"] if "op" in self._schema.names else False,
                write_statistics=["key", "score"],
                write_page_checksum=True,
            )
        except BaseException:
            self._sink.abandon()
            raise
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch."""
        self._writer.write_batch(batch, row_group_size=max(batch.num_rows, 1))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            try:
                self._writer.close()
                self._sink.finish()
                return
            except BaseException:
                self._sink.abandon()
                raise
        self._sink.abandon()


def rows(source: Outgoing, schema: pa.Schema, each: int, least: float | None) -> Iterator[pa.RecordBatch]:
    """Yields the rows with at least that score, up to `each` a batch."""
    for some in regrouped(source.pieces(least), each):
        yield pa.RecordBatch.from_arrays(_arrays(some, source.layout), schema=schema)


def changes(source: Outgoing, schema: pa.Schema, each: int, since: int) -> Iterator[pa.RecordBatch]:
    """Yields the last change of each key after that version: first the rows that were put, then the deletes."""
    deletes: list[Tensor] = []

    def puts() -> Iterator[Rows]:
        for change in source.changes(since):
            if change.puts is not None:
                yield change.puts
            else:
                deletes.append(change.keys)

    for some in regrouped(puts(), each):
        keys, *others = _arrays(some, source.layout)
        yield pa.RecordBatch.from_arrays([keys, pa.repeat(pa.scalar(_PUT), len(some)), *others], schema=schema)
    for gone in (piece for keys in deletes for piece in keys.split(each)):
        nothing = [pa.nulls(len(gone), field.type) for field in list(schema)[2:]]
        arrays = [_flat(gone, pa.int64()), pa.repeat(pa.scalar(_DELETE), len(gone)), *nothing]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _arrays(rows: Rows, layout: Layout) -> list[pa.Array]:
    assert rows.scores is not None
    lists = [rows.weights.to(torch.float32), *(rows.state[column.name] for column in layout.columns)]
    arrays = [_flat(rows.keys, pa.int64())]
    for values in lists:
        items = _flat(values, pa.float32())
        kind = _list_of(values.shape[1])
        arrays.append(pa.Array.from_buffers(kind, len(rows), [None], null_count=0, children=[items]))
    return [*arrays, _flat(rows.scores, pa.float64())]


def _flat(values: Tensor, kind: pa.DataType) -> pa.Array:
    values = values.contiguous()
    memory = pa.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    return pa.Array.from_buffers(kind, values.numel(), [None, memory], null_count=0)
