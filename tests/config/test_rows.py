"""What a row is made of: bytes and places of its parts, and the names of types."""

import pyarrow as pa
import pytest
import torch

from shoal import SGD, Adam, Table, _native
from shoal.config import Column, RowFormat
from shoal.config.dtypes import NUMBER_TYPES, WEIGHTS, name_of, number_type, torch_dtype
from shoal.config.rows import SCORE
from shoal.errors import ConfigError
from shoal.storage.hbm import Layout

SEEN, USES = Column("seen", 1, -1, dtype="int64"), Column("uses", 2, 0.5, dtype="float64")


class Keeps:
    """A policy that declares columns."""

    def __init__(self, *columns):
        self.columns = columns


def test_a_packed_row_has_its_parts_one_after_the_other():
    state = (Column("sum", 3), Column("count", 1))
    rows = RowFormat(5, "float16", state, (SCORE, SEEN, USES))
    assert (rows.weight_bytes, rows.state_bytes, rows.state_floats, rows.fact_bytes) == (10, 16, 4, 8 + 8 + 16)
    assert [rows.packed_at[column] for column in rows.columns] == [10, 22, 26, 34, 42]
    assert rows.packed_bytes == 58 and rows.record_bytes == 66 and rows.trained_bytes == 26
    assert rows.column("seen") is SEEN and rows.other_facts == (SEEN, USES)


def test_in_host_memory_the_flags_come_right_after_the_score():
    rows = RowFormat(5, "float16", (Column("sum", 3),), (SCORE, SEEN, USES))
    assert [rows.tail_at[column] for column in rows.columns] == [0, 12, 24, 32]
    assert rows.tail_bytes == 12 + 8 + 4 + 24


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_todays_rows_are_where_they_were(dtype, dim):
    rows = Table("t", dim, dtype=dtype, optimizer=Adam()).format
    size, floats = torch_dtype(dtype).itemsize, 2 * dim + 1
    assert rows.packed_bytes == dim * size + 4 * floats + 8
    assert rows.tail_bytes == 4 * floats + 8 + 4
    assert rows.packed_at[SCORE] == dim * size + 4 * floats and rows.tail_at[SCORE] == 4 * floats
    on_device = Layout(rows)
    assert on_device.score_at == floats + 1 and on_device.flags_at == floats  # an odd number of floats
    assert on_device.state_at("count") == 2 * dim
    assert on_device.row_bytes == -(-dim * size // 16) * 16 + -(-(4 * floats + 12) // 16) * 16


@pytest.mark.parametrize(("dtype", "dim", "wanted"), [("int8", 7, 7 + 8), ("int4", 7, 4 + 8), ("int4", 8, 4 + 8)])
def test_rows_that_are_served_have_room_for_scale_and_bias(dtype, dim, wanted):
    rows = Table("t", dim).format.served(dtype)
    assert rows.packed_bytes == wanted and rows.columns == ()


def test_a_tables_format_has_what_its_policies_declare():
    table = Table("t", 4, optimizer=SGD())
    assert table.format == RowFormat(4)
    kept = table.with_policies(Keeps(SEEN), Keeps(USES, SEEN))
    assert kept.format.facts == (SCORE, SEEN, USES) and kept == table
    assert table.format.facts == (SCORE,)


def test_formats_that_cannot_be_are_refused():
    for wrong, message in [
        (lambda: RowFormat(0), "dim"),
        (lambda: RowFormat(4, "float8"), "dtype"),
        (lambda: RowFormat(4, state=(SEEN,)), "state: wanted columns of float32"),
        (lambda: RowFormat(4, facts=(SEEN,)), "score first"),
        (lambda: RowFormat(4, facts=(SCORE, SEEN, SEEN)), "each name once"),
        (lambda: RowFormat(4, state=(Column("seen", 1),), facts=(SCORE, SEEN)), "each name once"),
        (lambda: Column("seen", 1, 0.5, dtype="int64"), "initial"),
        (lambda: Column("seen", 1, dtype="int32"), "dtype"),
        (lambda: Layout(RowFormat(4, facts=(SCORE, SEEN))), "seen"),
    ]:
        with pytest.raises(ConfigError, match=message):
            wrong()


def test_every_type_has_its_names():
    for one in NUMBER_TYPES:
        assert name_of(one.torch) == one.name and torch_dtype(one.name) is one.torch
        if one.arrow is not None:
            assert pa.type_for_alias(one.arrow).bit_width == 8 * one.torch.itemsize
    assert [number_type(name).torchrec for name in WEIGHTS] == ["FP32", "FP16", "BF16"]
    assert set(WEIGHTS) == {one.name for one in _native.Dtype}
    assert name_of(torch.float32) == "float32" and number_type("bfloat16").safetensors == "BF16"
