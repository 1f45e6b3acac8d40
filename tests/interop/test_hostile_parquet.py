"""Parquet files that a stranger wrote: rows or a ShoalError, in memory that the file's size explains."""

import os
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.limits import little_memory
from support.sweeps import examples

import shoal
from shoal.errors import InputError, OutOfMemoryError, ShoalError, StorageError
from shoal.interop.parquet import import_parquet, parquet_to_log

# docs/guarantees.md; little_memory has as much.
FACTOR = 128


def table():
    return shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=shoal.SGD(momentum=0.9))])


def lists(lengths, value, kind):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    values = torch.full((int(offsets[-1]),), value)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), pa.array(values.numpy()).cast(kind))


@st.composite
def files(draw):
    """Columns of a file, and how it is written."""
    rows = draw(st.sampled_from([0, 1, 3, 1000]))
    dim = draw(st.sampled_from([1, 4, 5]))
    lengths = [dim] * rows
    if rows and draw(st.booleans()):
        lengths[draw(st.integers(0, rows - 1))] = draw(st.sampled_from([0, 1, 9, 5_000_000, 20_000_000]))
        if draw(st.booleans()):  # as many in all as there would be
            total = sum(lengths)
            lengths = [total - rows + 1 if at == 0 else 1 for at in range(rows)]
    kind = draw(st.sampled_from([pa.float16(), pa.float32(), pa.float64(), pa.int32(), pa.string()]))
    keys = draw(st.sampled_from([range(rows), [7] * rows]))
    columns = {"key": pa.array(keys, pa.int64()), "row": lists(lengths, 0.0, kind)}
    if draw(st.booleans()):
        columns["state.momentum"] = lists([4] * rows, 1.0, pa.float32())
    if draw(st.booleans()):
        columns["score"] = pa.array([draw(st.sampled_from([0.0, float("nan")]))] * rows, pa.float64())
    for number in range(draw(st.sampled_from([0, 0, 1, 70, 2000]))):
        columns[f"state.AAAA{number}"] = lists([1] * rows, 1.0, pa.float32())
    padding = os.urandom(draw(st.sampled_from([0, 20_000]))).hex()
    wanted = pa.table(columns).replace_schema_metadata({"padding": padding, "AAAA": "AAAA"})
    how = {
        "compression": draw(st.sampled_from(["none", "zstd", "gzip", "snappy"])),
        "use_dictionary": draw(st.booleans()),
        "data_page_size": draw(st.sampled_from([1 << 10, 1 << 30])),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "row_group_size": draw(st.sampled_from([1, 100, 1 << 20])),
        "store_schema": draw(st.booleans()),
    }
    name = draw(st.sampled_from([b"AAAA", b"\x80\xff\xfe\x80", b"A\x00A\n"]))
    return wanted, how, name


@settings(
    max_examples=examples(40),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(given=files())
def test_whoever_imports_one_gets_rows_or_an_error(tmp_path, given):
    columns, how, name = given
    path = tmp_path / "x.parquet"
    pq.write_table(columns, path, **how)
    path.write_bytes(path.read_bytes().replace(b"AAAA", name))
    for number, into in enumerate((table(), None)):
        try:
            with little_memory(FACTOR * path.stat().st_size):
                if into is not None:
                    count = import_parquet(path, into.table("a"), progress=False)
                    assert count == len(into.table("a")) == columns.num_rows
                else:
                    log = tmp_path / f"log{number}-{os.urandom(4).hex()}"
                    parquet_to_log(path, log, table="a", dim=None if columns.num_rows else 4, progress=False)
        except OutOfMemoryError:
            raise AssertionError("it asked for more memory than there is") from None
        except ShoalError as error:
            assert "memory" not in str(error) or "claims" in str(error), error


def test_a_long_list_of_one_value_is_not_read(tmp_path):
    """It is some hundred bytes, in a file that has others."""
    n = 20_000_000
    columns = pa.table({"key": pa.array([1], pa.int64()), "row": lists([n], 0.0, pa.float32())})
    columns = columns.replace_schema_metadata({"padding": os.urandom(n // 1024).hex()})
    pq.write_table(columns, tmp_path / "x.parquet", compression="zstd")
    with little_memory(), pytest.raises(InputError, match=r"row group 0: 20000001 values are more than its \d+ bytes"):
        parquet_to_log(tmp_path / "x.parquet", tmp_path / "log", table="a")
    with pytest.raises(InputError, match=r"values are more than|wanted rows of 4 weights"):
        import_parquet(tmp_path / "x.parquet", table().table("a"))


def test_rows_of_other_lengths_in_another_row_group(tmp_path):
    columns = pa.table({"key": pa.array([1, 2], pa.int64()), "row": lists([3, 5], 0.0, pa.float32())})
    pq.write_table(columns, tmp_path / "x.parquet", row_group_size=1)
    with pytest.raises(InputError, match="lists of one length; got 3 values in 1 rows, and 8 in 2"):
        import_parquet(tmp_path / "x.parquet", table().table("a"))


def test_names_that_are_no_text(tmp_path):
    columns = pa.table({"key": pa.array([1], pa.int64()), "row": lists([4], 0.0, pa.float32()), "state.AAAA": [1.0]})
    pq.write_table(columns, tmp_path / "x.parquet", store_schema=False)
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(content.replace(b"AAAA", b"\x80\x81AA"))
    with pytest.raises(StorageError, match=r"x\.parquet\] wanted a Parquet file; got one with: .*utf-8"):
        import_parquet(tmp_path / "x.parquet", table().table("a"))


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


@pytest.mark.parametrize("kind", ["groups", "columns", "schema"])
@pytest.mark.parametrize("has_bytes", [True, False])
def test_a_footer_that_claims_many_things_of_a_byte_each(tmp_path, kind, has_bytes):
    count = 2_000_000
    items = bytes(count) if has_bytes else b""
    many = b"\xfc" + varint(count) + items
    body = {
        "schema": b"\x15\x02\x19" + many + b"\x00",
        "groups": b"\x15\x02\x19\x0c\x16\x00\x19" + many + b"\x00",
        "columns": b"\x15\x02\x19\x0c\x16\x00\x19\x1c" + b"\x19" + many + b"\x16\x00\x16\x00\x00" + b"\x00",
    }[kind]
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + body + struct.pack("<I", len(body)) + b"PAR1")
    with little_memory(), pytest.raises((StorageError, InputError), match=r"say nothing|at most|that are none"):
        import_parquet(tmp_path / "x.parquet", table().table("a"))


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b"PAR1\xff\xff\xff\x7fPAR1", b"PAR1" + bytes(4) + b"PARE"]
)
def test_files_that_are_none(tmp_path, content):
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(StorageError, match=r"x\.parquet\] wanted a"):
        import_parquet(tmp_path / "x.parquet", table().table("a"))
