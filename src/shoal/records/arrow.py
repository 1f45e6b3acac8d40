"""Rows as Arrow record batches and back, without a copy.

A batch of rows has these columns, none of them with nulls, and the table's name in the schema's metadata (shoal.table):

    key              int64
    row              fixed_size_list<float | halffloat>[dim]; bfloat16, which Arrow lacks, is uint16 with the field's
                     metadata {"shoal.dtype": "bfloat16"}
    state.<column>   fixed_size_list<float>[width], one for each column of the optimizer, in their order
    score            float64

A serving batch has `key` and `row` alone, and a batch of deletes `key` alone.
"""

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.config.dtypes import number_type
from shoal.errors import InputError, StorageError
from shoal.records.excerpt import sentence
from shoal.records.finite import first_not_finite
from shoal.records.ipc import ARROW_ERRORS, require_schema
from shoal.records.layout import Layout
from shoal.records.rows import Rows

_KEY = pa.field("key", pa.int64(), nullable=False)
_SCORE = pa.field("score", pa.float64(), nullable=False)


def arrow_schema(layout: Layout, with_state: bool = True) -> pa.Schema:
    """Returns the schema of a batch of rows; without state and score, as serving has it, if `with_state` is False."""
    metadata = {"shoal.dtype": "bfloat16"} if layout.dtype == "bfloat16" else None
    fields = [_KEY, pa.field("row", _list_of(_values(layout.dtype), layout.dim), nullable=False, metadata=metadata)]
    if with_state:
        for name, width, _ in layout.columns:
            fields.append(pa.field(f"state.{name}", _list_of(pa.float32(), width), nullable=False))
        fields.append(_SCORE)
    return pa.schema(fields, metadata=_table_metadata(layout))


def _values(dtype: str) -> pa.DataType:
    """The Arrow type of weights."""
    return pa.type_for_alias(number_type(dtype).arrow)


def keys_schema(layout: Layout) -> pa.Schema:
    """Returns the schema of a batch of deletes."""
    return pa.schema([_KEY], metadata=_table_metadata(layout))


def to_arrow(rows: Rows, layout: Layout) -> pa.RecordBatch:
    """Returns rows as a batch over the same memory; a tensor that is not contiguous is copied. Rows without scores make
    a serving batch."""
    where = f"rows of table {layout.name!r}"
    count = len(_checked(rows.keys, "keys", torch.int64, (None,), where))
    weights = _checked(rows.weights, "weights", layout.torch_dtype, (count, layout.dim), where)
    arrays = [
        _flat_array(rows.keys, pa.int64()),
        _list_array(weights, _values(layout.dtype)),
    ]
    if rows.scores is not None:
        names = [column.name for column in layout.columns]
        if set(rows.state) != set(names):
            raise InputError(f"[{where}] wanted the state columns {names}; got {list(rows.state)}.")
        for name, width, _ in layout.columns:
            state = _checked(rows.state[name], f"state {name!r}", torch.float32, (count, width), where)
            arrays.append(_list_array(state, pa.float32()))
        arrays.append(_flat_array(_checked(rows.scores, "scores", torch.float64, (count,), where), pa.float64()))
    elif rows.state:
        raise InputError(f"[{where}] wanted scores with the state; got state {list(rows.state)} without scores.")
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(layout, rows.scores is not None))


def from_arrow(batch: pa.RecordBatch, layout: Layout, where: str, *, with_state: bool = True) -> Rows:
    """Returns the rows of a batch with the schema `arrow_schema(layout, with_state)`, over the batch's memory. Weights
    and state may have NaN or infinity, as in a table; scores may not."""
    _require(batch, arrow_schema(layout, with_state), where)
    count = batch.num_rows
    weights = _list_tensor(batch, "row", count, layout.dim, where)
    if layout.dtype == "bfloat16":
        weights = weights.view(torch.bfloat16)
    state: dict[str, Tensor] = {}
    scores = None
    if with_state:
        state = {name: _list_tensor(batch, f"state.{name}", count, width, where) for name, width, _ in layout.columns}
        scores = _tensor(batch.column("score"), "score", where)
    if scores is not None and (bad := first_not_finite(scores)) is not None:
        raise StorageError(
            f"[{where}] column 'score': wanted finite values; got {float(scores[bad])} in row {bad}. Is it damaged?"
        )
    return Rows(_tensor(batch.column("key"), "key", where), weights, state, scores)


def keys_to_arrow(keys: Tensor, layout: Layout) -> pa.RecordBatch:
    """Returns deleted keys as a batch over the same memory."""
    where = f"deleted keys of table {layout.name!r}"
    array = _flat_array(_checked(keys, "keys", torch.int64, (None,), where), pa.int64())
    return pa.RecordBatch.from_arrays([array], schema=keys_schema(layout))


def keys_from_arrow(batch: pa.RecordBatch, layout: Layout, where: str) -> Tensor:
    """Returns the keys of a batch with the schema `keys_schema(layout)`, over the batch's memory."""
    _require(batch, keys_schema(layout), where)
    return _tensor(batch.column("key"), "key", where)


def _list_of(values: pa.DataType, width: int) -> pa.DataType:
    return pa.list_(pa.field("item", values, nullable=False), width)


def _table_metadata(layout: Layout) -> dict[str, str]:
    return {"shoal.table": layout.name}


def _checked(given: Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...], where: str) -> Tensor:
    fits = (
        given.device.type == "cpu"
        and given.layout == torch.strided
        and given.dtype == dtype
        and given.dim() == len(shape)
        and all(wanted is None or wanted == size for wanted, size in zip(shape, given.shape, strict=True))
    )
    if not fits:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise InputError(
            f"[{where}] {name}: wanted {dtype} [{wanted}] on the CPU; got {given.dtype} {list(given.shape)} on "
            f"{given.device}."
        )
    return given


def _flat_array(values: Tensor, kind: pa.DataType) -> pa.Array:
    values = values.detach().resolve_neg().contiguous()
    memory = pa.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    return pa.Array.from_buffers(kind, values.numel(), [None, memory], null_count=0)


def _list_array(values: Tensor, kind: pa.DataType) -> pa.Array:
    count, width = values.shape
    children = [_flat_array(values, kind)]
    return pa.Array.from_buffers(_list_of(kind, width), count, [None], null_count=0, children=children)


def _require(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> None:
    require_schema(batch.schema, schema, where)
    try:
        batch.validate(full=True)
    except ARROW_ERRORS as error:
        raise StorageError(
            f"[{where}] wanted a valid Arrow batch; got one with: {sentence(str(error))} Is it damaged?"
        ) from None


def _list_tensor(batch: pa.RecordBatch, name: str, count: int, width: int, where: str) -> Tensor:
    column = batch.column(name)
    _require_no_nulls(column, name, where)
    values = column.values  # of the whole memory, whatever part of it the column is
    begin, size = column.offset * width, count * width
    if len(values) < begin + size:
        raise StorageError(
            f"[{where}] column {name!r}: wanted {begin + size} values; got {len(values)}. Is it damaged?"
        )
    return _tensor(values.slice(begin, size), name, where).view(count, width)


def _tensor(values: pa.Array, name: str, where: str) -> Tensor:
    """Returns a tensor over an array's memory. DLPack takes memory that is read-only; torch.frombuffer would warn."""
    _require_no_nulls(values, name, where)
    tensor: Tensor = from_dlpack(values)
    if tensor.data_ptr() % tensor.itemsize:
        raise StorageError(
            f"[{where}] column {name!r}: wanted values at multiples of {tensor.itemsize} bytes; got them at "
            f"{tensor.data_ptr():#x}. Is it damaged?"
        )
    return tensor


def _require_no_nulls(values: pa.Array, name: str, where: str) -> None:
    if values.null_count:
        raise StorageError(f"[{where}] column {name!r}: wanted no nulls; got {values.null_count}. Is it damaged?")
