"""The rows of a Parquet file, checked before a table or a log gets them; parquet.py has the columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.errors import InputError, ShoalError, StorageError
from shoal.interop.export_rows import rows_each
from shoal.interop.files import Source
from shoal.interop.import_rows import Shape
from shoal.interop.parquet_batches import STATE
from shoal.interop.parquet_footer import MOST_COLUMNS, require_explained_footer
from shoal.interop.parquet_pages import require_explained_groups, require_honest_pages
from shoal.records import Layout, Rows, StateColumn
from shoal.records.excerpt import excerpt
from shoal.records.ipc import ARROW_ERRORS

_FLOATS = (pa.float16(), pa.float32(), pa.float64())
# The most that a file may become in memory. Each row has a key of its own, which takes at least a byte, and values are
# compressed by at most zlib's best ratio, that of zeros.
_MOST_VALUES_A_BYTE = 1024
_READ_BYTES = 1 << 20
_MOST_THRIFT = 100_000_000


class ParquetRows:
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

    def __enter__(self) -> "ParquetRows":
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
            if name not in known and not (name.startswith(STATE) and len(name) > len(STATE)):
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
            {name.removeprefix(STATE): width for name, width in widths.items() if name != "row"},
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
            {name: self._list(batch, STATE + name, width, begin) for name, width in shape.state.items()},
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
