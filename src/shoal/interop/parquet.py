"""Tables as Parquet files, which DuckDB, pandas, Polars and Spark read.

    key              int64
    row              list of dim float, all of one length; of float16 and bfloat16 tables too, exactly
    state.<column>   list of width float, one for each column of the optimizer
    score            double
    op               string, in files of changes alone: "put" or "delete"; all but key and op is null for deletes

The schema's metadata describes the table: shoal.layout, shoal.step, shoal.version. A file without it
is imported, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.checkpoint.progress import progress_bar
from shoal.errors import InputError, ShoalError, StorageError
from shoal.interop.export_rows import SINCE, Outgoing, checked_score, regrouped, rows_each
from shoal.interop.files import Sink, Source, replacing
from shoal.interop.import_rows import Shape, log_rows, put_rows
from shoal.interop.parquet_footer import MOST_COLUMNS, require_explained_footer
from shoal.interop.parquet_pages import require_explained_groups, require_honest_pages
from shoal.log.files import FilePath
from shoal.log.retry import while_it_changes
from shoal.records import Layout, Rows, StateColumn
from shoal.records.excerpt import excerpt
from shoal.records.ipc import ARROW_ERRORS
from shoal.table import TableHandle

_PUT, _DELETE = "put", "delete"
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_STATE = "state."
# What a file may become in memory: each row has a key of its own, which takes a byte at least; and values compress by
# no more than zlib's best, of zeros.
_MOST_VALUES_A_BYTE = 1024
_READ_BYTES = 1 << 20
_MOST_THRIFT = 100_000_000


def export_parquet(
    path: str | Path,
    to: str | Path,
    *,
    table: str,
    version: int | None = None,
    min_score: float | None = None,
    since: int | None = None,
    progress: bool | None = None,
) -> int:
    """Write the rows of a table in a checkpoint or a log to a Parquet file; returns how many.

    path: a log, or a checkpoint of `shoal.save`.
    to: the file, which is in its place once it is complete.
    table: the table's name.
    version: of the log; None is the newest.
    min_score: only rows with that score or a higher one.
    since: the changes after that version in place of the rows: the last one of each key, with a column `op`.
    progress: whether to show a bar; None is where standard error is a terminal.
    """
    return while_it_changes(path, lambda: _export(path, to, table, version, min_score, since, progress))


def _export(
    path: str | Path,
    to: str | Path,
    table: str,
    version: int | None,
    min_score: float | None,
    since: int | None,
    progress: bool | None,
) -> int:
    source = Outgoing(path, table, version)
    least = checked_score(source.where, min_score)
    if since is not None and least is not None:
        raise InputError(f"[{source.where}] wanted min_score or since; got both. A delete has no score.")
    schema = _schema(source, since)
    each = rows_each(source.layout)
    batches = _rows(source, schema, each, least) if since is None else _changes(source, schema, each, since)
    written = 0
    with (
        replacing(Path(to)) as temporary,
        progress_bar("exporting", source.rows, progress) as bar,
        _Writer(temporary, schema) as writer,
    ):
        for batch in batches:
            writer.write(batch)
            written += batch.num_rows
            bar(batch.num_rows)
    return written


def import_parquet(path: str | Path, into: TableHandle, *, state: bool = True, progress: bool | None = None) -> int:
    """Put the rows of a Parquet file in a live table, in place of those that their keys had; returns how many.

    `into` is `bags.table("item")`. Weights are rounded to the table's type. What the file does not have is as at birth:
    state, and the score, which is the table's step. state: False leaves the file's state out. A file that is wrong in
    any row, or has more of them than the table has room for, is refused before anything changes. Lookups see none of
    the rows or all of them. Where a disk fails on the way, or batches at work hold memory that rows need, some of the
    rows are in the table, and a note of the error says how many.
    """
    with _ParquetRows(Path(path)) as file:
        return put_rows(file, into, state, progress)


def parquet_to_log(
    path: str | Path,
    to: str | Path,
    *,
    table: str,
    dim: int | None = None,
    dtype: str | None = None,
    buckets: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    trust: bool = False,
) -> int:
    """Commit the rows of a Parquet file to a log as a table, which `shoal.load` reads; returns the version.

    The log is made if it is not there; if it has the table already, its rows are replaced. What is not given is as the
    file says, if it was exported by Shoal; else dtype is float32, buckets 4096 and seed 0. State columns are kept under
    their names, whichever optimizer they are of. No table is made: the rows pass by. trust: as `ChangeLog` takes it.
    """
    with _ParquetRows(Path(path)) as file:
        return log_rows(
            file, to, table, dim=dim, dtype=dtype, buckets=buckets, seed=seed, progress=progress, trust=trust
        )


# ---- writing


def _schema(source: Outgoing, since: int | None) -> pa.Schema:
    layout = source.layout
    optional = since is not None
    lists = {"row": layout.dim} | {f"{_STATE}{column.name}": column.width for column in layout.columns}
    fields = [pa.field("key", pa.int64(), nullable=False)]
    fields += [pa.field("op", pa.string(), nullable=False)] if optional else []
    fields += [pa.field(name, _list_of(width), nullable=optional) for name, width in lists.items()]
    fields.append(pa.field("score", pa.float64(), nullable=optional))
    told = source.told() | ({SINCE: str(since)} if optional else {})
    return pa.schema(fields, metadata=told)


def _list_of(width: int) -> pa.DataType:
    return pa.list_(pa.field("element", pa.float32(), nullable=False), width)


class _Writer:
    """Writes batches to a file, a row group each."""

    def __init__(self, path: FilePath, schema: pa.Schema) -> None:
        self._sink = Sink(path)
        self._schema = schema
        self._writer: Any = None

    def __enter__(self) -> "_Writer":
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


def _rows(source: Outgoing, schema: pa.Schema, each: int, least: float | None) -> Iterator[pa.RecordBatch]:
    for rows in regrouped(source.pieces(least), each):
        yield pa.RecordBatch.from_arrays(_arrays(rows, source.layout), schema=schema)


def _changes(source: Outgoing, schema: pa.Schema, each: int, since: int) -> Iterator[pa.RecordBatch]:
    deletes: list[Tensor] = []

    def puts() -> Iterator[Rows]:
        for change in source.changes(since):
            if change.puts is not None:
                yield change.puts
            else:
                deletes.append(change.keys)

    for rows in regrouped(puts(), each):
        keys, *others = _arrays(rows, source.layout)
        yield pa.RecordBatch.from_arrays([keys, pa.repeat(pa.scalar(_PUT), len(rows)), *others], schema=schema)
    for some in (piece for keys in deletes for piece in keys.split(each)):
        nothing = [pa.nulls(len(some), field.type) for field in list(schema)[2:]]
        arrays = [_flat(some, pa.int64()), pa.repeat(pa.scalar(_DELETE), len(some)), *nothing]
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


# ---- reading


class _ParquetRows:
    """A Parquet file with rows of a table."""

    def __init__(self, path: Path) -> None:
        self.where = f"file {path}"
        self._source = Source(path)
        try:
            require_explained_footer(self._source, self.where)
            with self._reading("wanted a Parquet file; got one with"):
                self._file = self._opened()
                self.shape = self._shape()
                require_explained_groups(self._file.metadata, self._source, self.where)
                require_honest_pages(self._file.metadata, self._source, self.where)
        except BaseException:
            self._source.close()
            raise

    def __enter__(self) -> "_ParquetRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @contextmanager
    def _reading(self, wanted: str) -> Iterator[None]:
        """Raises StorageError for what Arrow finds wrong."""
        try:
            yield
        except ShoalError:
            raise
        except ARROW_ERRORS as error:
            raise self._wrong(f"{wanted}: {excerpt(str(error))}") from None

    def _opened(self) -> Any:
        limit = min(max(self._source.size, 1), _MOST_THRIFT)
        return pq.ParquetFile(
            pa.PythonFile(self._source, mode="r"),
            buffer_size=_READ_BYTES,
            pre_buffer=False,  # it would hold all of the file
            thrift_string_size_limit=limit,
            thrift_container_size_limit=limit,
            page_checksum_verification=True,
        )

    def _wrong(self, what: str) -> StorageError:
        return StorageError(f"[{self.where}] {what}. Is it damaged?")

    def _shape(self) -> Shape:
        schema, metadata = self._file.schema_arrow, self._file.metadata
        names = schema.names
        if len(names) > MOST_COLUMNS:
            raise InputError(f"[{self.where}] wanted {MOST_COLUMNS} columns at most; got {len(names)}. Leave some out.")
        for name in ("key", "row"):
            if names.count(name) != 1:
                raise InputError(f"[{self.where}] wanted one column {name!r}; got {excerpt(names)}.")
        if "op" in names:
            raise InputError(f"[{self.where}] wanted rows; got changes after a version, with a column 'op'.")
        known = {"key", "row", "score"}
        for name in names:
            if name not in known and not (name.startswith(_STATE) and len(name) > len(_STATE)):
                raise InputError(
                    f"[{self.where}] wanted the columns key, row, state.<column> and score; got {excerpt(name)}. Leave "
                    f"it out."
                )
            if names.count(name) != 1:
                raise InputError(f"[{self.where}] wanted each column once; got {excerpt(name)} more often.")
        if schema.field("key").type != pa.int64():
            raise InputError(f"[{self.where}] key: wanted int64; got {schema.field('key').type}.")
        if "score" in names and schema.field("score").type not in _FLOATS:
            raise InputError(f"[{self.where}] score: wanted floats; got {schema.field('score').type}.")
        lists = [(at, name) for at, name in enumerate(names) if name not in ("key", "score")]
        widths = {name: self._width(at, schema.field(name)) for at, name in lists}
        told = {
            name.decode(errors="replace"): text.decode(errors="replace")
            for name, text in (schema.metadata or {}).items()
        }
        return Shape(
            metadata.num_rows,
            widths["row"] or None,
            {name.removeprefix(_STATE): width for name, width in widths.items() if name != "row"},
            "score" in names,
            told,
        )

    def _width(self, at: int, field: pa.Field) -> int:
        """The length of all lists of a column; 0 where no row tells."""
        kind = field.type
        is_list = any(
            is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        )
        if not is_list or kind.value_type not in _FLOATS:
            raise InputError(f"[{self.where}] {field.name}: wanted lists of floats; got {excerpt(str(kind))}.")
        metadata = self._file.metadata
        # Of columns that are numbers or lists of them, each is one of Parquet's, in the same order.
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        counts = [(int(group.num_rows), int(group.column(at).num_values)) for group in groups]
        rows, values = int(metadata.num_rows), sum(values for _rows, values in counts)
        if rows == 0:
            return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else 0
        width = values // rows
        for some, found in counts:
            if width < 1 or found != width * some:
                raise InputError(
                    f"[{self.where}] {field.name}: wanted lists of one length; got {found} values in {some} rows, and "
                    f"{values} in {rows}."
                )
        if width * rows > _MOST_VALUES_A_BYTE * self._source.size:
            raise InputError(
                f"[{self.where}] {field.name}: {values} values are more than {self._source.size} bytes explain. Write "
                f"it without compression."
            )
        return width

    def pieces(self, each: int) -> Iterator[Rows]:
        """The rows, as the file has them."""
        if self.shape.rows > self._source.size:
            raise InputError(
                f"[{self.where}] {self.shape.rows} rows are more than {self._source.size} bytes explain. Write it "
                f"without compression."
            )
        # Of all columns, also of those that the table does not take.
        each = min(each, rows_each(self._layout()), max(self.shape.rows, 1))
        begin = 0
        batches = self._file.iter_batches(batch_size=each, use_threads=False)
        while True:
            with self._reading(f"after row {begin}: wanted Parquet; got"):
                batch = next(batches, None)
                if batch is None:
                    break
                batch.validate(full=True)
                piece = self._piece(batch, begin)
            yield piece
            begin += batch.num_rows
        if begin != self.shape.rows:
            raise self._wrong(f"wanted {self.shape.rows} rows; got {begin}")

    def _layout(self) -> Layout:
        """Of the rows as the file has them."""
        columns = tuple(StateColumn(name, width, 0.0) for name, width in self.shape.state.items() if width)
        return Layout("file", self.shape.dim or 1, columns=columns)

    def _piece(self, batch: pa.RecordBatch, begin: int) -> Rows:
        shape = self.shape
        return Rows(
            self._flat(batch, "key", begin),
            self._list(batch, "row", shape.dim or 0, begin),
            {name: self._list(batch, _STATE + name, width, begin) for name, width in shape.state.items()},
            self._flat(batch, "score", begin) if shape.has_scores else None,
        )

    def _flat(self, batch: pa.RecordBatch, name: str, begin: int) -> Tensor:
        return self._tensor(batch.column(name), name, begin)

    def _list(self, batch: pa.RecordBatch, name: str, width: int, begin: int) -> Tensor:
        column = batch.column(name)
        self._require_no_nulls(column, name, begin)
        if not pa.types.is_fixed_size_list(column.type):
            lengths = pc.list_value_length(column)
            other = pc.index(pc.equal(lengths, width), False).as_py()
            if other >= 0:
                raise InputError(
                    f"[{self.where}] {name}: wanted lists of {width} values; got {lengths[other]} in row "
                    f"{begin + other}."
                )
        values = column.flatten()
        if len(values) != len(column) * width:
            raise self._wrong(f"{name}: wanted {len(column) * width} values after row {begin}; got {len(values)}")
        return self._tensor(values, name, begin).view(len(column), width)

    def _tensor(self, values: pa.Array, name: str, begin: int) -> Tensor:
        self._require_no_nulls(values, name, begin)
        tensor: Tensor = from_dlpack(values)
        return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()

    def _require_no_nulls(self, values: pa.Array, name: str, begin: int) -> None:
        if values.null_count:
            where = pc.index(pc.is_null(values), True).as_py()
            raise InputError(f"[{self.where}] {name}: wanted no nulls; got one after row {begin}, at {where}.")
