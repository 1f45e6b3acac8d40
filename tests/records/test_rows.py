"""Rows as Arrow: the same memory, the same bits, and nothing that is not what the layout says."""

import mmap

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_rows import LAYOUT, assert_same, bits_of, layouts, rows_of

from shoal.errors import InputError, StorageError
from shoal.records import Layout, Rows, StateColumn
from shoal.records.arrow import arrow_schema, from_arrow, keys_from_arrow, keys_schema, keys_to_arrow, to_arrow
from shoal.records.finite import count_not_finite


def test_schema():
    schema = arrow_schema(LAYOUT)
    assert schema.names == ["key", "row", "state.sum", "state.exp_avg", "score"]
    assert schema.metadata == {b"shoal.table": b"item"}
    assert not any(schema.field(name).nullable for name in schema.names)
    assert schema.field("row").type.list_size == 8
    assert schema.field("row").type.value_type == pa.float32()
    assert arrow_schema(LAYOUT, with_state=False).names == ["key", "row"]
    assert keys_schema(LAYOUT).names == ["key"]
    assert arrow_schema(Layout("a", 1, "float16")).field("row").type.value_type == pa.float16()
    wide = arrow_schema(Layout("a", 1, "bfloat16")).field("row")
    assert wide.type.value_type == pa.uint16()
    assert wide.metadata == {b"shoal.dtype": b"bfloat16"}


@given(layouts, st.integers(0, 20), st.booleans())
def test_rows_come_back_bit_for_bit(layout, count, serving):
    rows = rows_of(layout, count, serving=serving)
    batch = to_arrow(rows, layout)
    batch.validate(full=True)
    assert batch.num_rows == count
    assert_same(from_arrow(batch, layout, "here", with_state=not serving), rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_is_copied(dtype):
    layout = Layout("item", 8, dtype, LAYOUT.columns)
    rows = rows_of(layout, 5)
    batch = to_arrow(rows, layout)
    assert batch.column("key").buffers()[1].address == rows.keys.data_ptr()
    assert batch.column("row").values.buffers()[1].address == rows.weights.data_ptr()
    found = from_arrow(batch, layout, "here")
    assert found.keys.data_ptr() == rows.keys.data_ptr()
    assert found.weights.data_ptr() == rows.weights.data_ptr()
    assert found.scores is not None and rows.scores is not None
    assert found.scores.data_ptr() == rows.scores.data_ptr()
    for name in rows.state:
        assert found.state[name].data_ptr() == rows.state[name].data_ptr()
    keys = keys_from_arrow(keys_to_arrow(rows.keys, layout), layout, "here")
    assert keys.data_ptr() == rows.keys.data_ptr()


def test_memory_lives_as_long_as_what_looks_at_it():
    wanted = rows_of(LAYOUT, 1000)
    copies = Rows(wanted.keys.clone(), wanted.weights.clone(), {k: v.clone() for k, v in wanted.state.items()},
                  wanted.scores.clone())  # fmt: skip
    batch = to_arrow(copies, LAYOUT)
    del copies
    found = from_arrow(batch, LAYOUT, "here")
    del batch
    filling = [torch.full((1000, 8), 7.0) for _ in range(20)]
    assert_same(found, wanted)
    del filling


def test_read_only_memory_is_looked_at_without_a_copy_or_a_warning(tmp_path):
    rows = rows_of(LAYOUT, 100)
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, arrow_schema(LAYOUT)) as writer:
        writer.write_batch(to_arrow(rows, LAYOUT))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory = pa.py_buffer(mapped)
        batch = pa.ipc.open_stream(memory).read_next_batch()
        found = from_arrow(batch, LAYOUT, "here")
        assert memory.address <= found.weights.data_ptr() < memory.address + memory.size
        assert_same(found, rows)
        del found, batch, memory


@given(layouts, st.integers(0, 6), st.integers(0, 6))
def test_slices_of_batches(layout, begin, count):
    rows = rows_of(layout, 12)
    part = to_arrow(rows, layout).slice(begin, count)
    wanted = Rows(
        rows.keys[begin : begin + count],
        rows.weights[begin : begin + count],
        {name: state[begin : begin + count] for name, state in rows.state.items()},
        rows.scores[begin : begin + count],
    )
    found = from_arrow(part, layout, "here")
    assert_same(found, wanted)
    if count:
        assert found.weights.data_ptr() == wanted.weights.data_ptr()
    assert_same(from_arrow(to_arrow(wanted, layout), layout, "here"), wanted)
    assert keys_from_arrow(keys_to_arrow(rows.keys, layout).slice(begin, count), layout, "here").equal(wanted.keys)


def test_tensors_that_are_not_contiguous_are_copied():
    rows = rows_of(LAYOUT, 6)
    strided = Rows(rows.keys[::2], rows.weights[::2], {k: v[::2] for k, v in rows.state.items()}, rows.scores[::2])
    assert_same(from_arrow(to_arrow(strided, LAYOUT), LAYOUT, "here"), strided)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": torch.zeros(3, dtype=torch.int32)},
        {"keys": torch.zeros(3, 1, dtype=torch.int64)},
        {"keys": torch.zeros(3, dtype=torch.int64, device="meta")},
        {"weights": torch.zeros(3, 7)},
        {"weights": torch.zeros(2, 8)},
        {"weights": torch.zeros(3, 8, dtype=torch.float16)},
        {"weights": torch.zeros(24)},
        {"scores": torch.zeros(3)},
        {"scores": torch.zeros(2, dtype=torch.float64)},
        {"scores": None},
        {"state": {}},
        {"state": {"sum": torch.zeros(3, 1)}},
        {"state": {"sum": torch.zeros(3, 2), "exp_avg": torch.zeros(3, 8)}},
        {"state": {"sum": torch.zeros(3, 1), "exp_avg": torch.zeros(3, 8), "more": torch.zeros(3, 1)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rows_that_do_not_fit_the_layout_are_refused(change):
    rows = rows_of(LAYOUT, 3)
    given = {"keys": rows.keys, "weights": rows.weights, "state": rows.state, "scores": rows.scores, **change}
    with pytest.raises(InputError, match=r"^\[rows of table 'item'\]"):
        to_arrow(Rows(**given), LAYOUT)


@pytest.mark.parametrize(
    "other",
    [
        Layout("user", 8, "float32", LAYOUT.columns),
        Layout("item", 9, "float32", LAYOUT.columns),
        Layout("item", 8, "float16", LAYOUT.columns),
        Layout("item", 8, "bfloat16", LAYOUT.columns),
        Layout("item", 8, "float32", LAYOUT.columns[:1]),
        Layout("item", 8, "float32", LAYOUT.columns[::-1]),
        Layout("item", 8, "float32", (StateColumn("sum", 2, 0.5), LAYOUT.columns[1])),
    ],
    ids=lambda other: LAYOUT.difference(other)[:40],
)
def test_batches_of_another_layout_are_refused(other):
    batch = to_arrow(rows_of(other, 3), other)
    with pytest.raises(StorageError, match=r"^\[here\] wanted Arrow columns .*; got .*"):
        from_arrow(batch, LAYOUT, "here")


def test_batches_of_another_kind_are_refused():
    training, serving = to_arrow(rows_of(LAYOUT, 3), LAYOUT), to_arrow(rows_of(LAYOUT, 3, serving=True), LAYOUT)
    deletes = keys_to_arrow(torch.zeros(3, dtype=torch.int64), LAYOUT)
    for batch, with_state in [(serving, True), (training, False), (deletes, True), (deletes, False)]:
        with pytest.raises(StorageError, match="wanted Arrow columns"):
            from_arrow(batch, LAYOUT, "here", with_state=with_state)
    with pytest.raises(StorageError, match="wanted Arrow columns"):
        keys_from_arrow(training, LAYOUT, "here")


def changed(name: str, array: pa.Array) -> pa.RecordBatch:
    batch = to_arrow(rows_of(LAYOUT, 3), LAYOUT)
    arrays = [array if column == name else batch.column(column) for column in batch.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def numbers(count: int, mask: int | None = None) -> pa.Array:
    validity = None if mask is None else pa.py_buffer(bytes([mask]) * (count // 8 + 1))
    nulls = 0 if mask is None else -1
    return pa.Array.from_buffers(pa.float32(), count, [validity, pa.py_buffer(bytes(4 * count))], null_count=nulls)


ROW = arrow_schema(LAYOUT).field("row").type


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("key", pa.array([1, None, 3], pa.int64())),
        ("score", pa.array([1.0, 2.0, None], pa.float64())),
        ("row", pa.Array.from_buffers(ROW, 3, [pa.py_buffer(b"\x05")], children=[numbers(24)])),
        ("row", pa.Array.from_buffers(ROW, 3, [None], null_count=0, children=[numbers(24, mask=0x7F)])),
        ("key", pa.Array.from_buffers(pa.int64(), 3, [None, pa.py_buffer(bytes(25))[1:]], null_count=0)),
    ],
)
def test_nulls_and_odd_addresses_are_refused(name, array):
    with pytest.raises(StorageError, match=r"^\[here\] "):
        from_arrow(changed(name, array), LAYOUT, "here")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", ["row", "state.sum", "score"])
def test_scores_are_finite_and_other_values_come_as_they_are(dtype, bad, column):
    layout = Layout("item", 8, dtype, LAYOUT.columns)
    rows = rows_of(layout, 5)
    tensor = {"row": rows.weights, "state.sum": rows.state["sum"], "score": rows.scores}[column]
    tensor.view(5, -1)[3, 0] = bad
    batch = to_arrow(rows, layout)
    if column == "score":
        with pytest.raises(StorageError, match=r"\[here\] column 'score': wanted finite values; got .* in row 3\."):
            from_arrow(batch, layout, "here")
        return
    found = from_arrow(batch, layout, "here")
    assert bits_of(found.weights).equal(bits_of(rows.weights))
    assert bits_of(found.state["sum"]).equal(bits_of(rows.state["sum"]))
    assert count_not_finite(found) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_values_are_finite(dtype):
    layout = Layout("item", 2, dtype)
    largest = torch.finfo(layout.torch_dtype).max
    weights = torch.tensor([[largest, -largest]], dtype=layout.torch_dtype)
    rows = Rows(torch.tensor([1]), weights, {}, torch.tensor([1e308], dtype=torch.float64))
    assert_same(from_arrow(to_arrow(rows, layout), layout, "here"), rows)
