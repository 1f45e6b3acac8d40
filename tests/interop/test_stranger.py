"""Files to import that are none: links in a checkpoint, pipes, sockets, devices, folders and holes."""

import shutil

import pytest
import torch
from support.limits import little_memory
from support.shapes import SHAPES, Outside

import shoal
from shoal.errors import CheckpointError, ShoalError
from shoal.interop import dcp
from shoal.interop.parquet import export_parquet, import_parquet, parquet_to_log
from shoal.interop.safetensors import export_safetensors, import_safetensors, safetensors_to_log

FORMATS = {
    "parquet": (export_parquet, import_parquet, parquet_to_log),
    "safetensors": (export_safetensors, import_safetensors, safetensors_to_log),
}


def made():
    return shoal.EmbeddingBagCollection([shoal.Table("t", 2, optimizer=None)], seed=0)


@pytest.fixture(scope="module")
def bags():
    bags = made()
    bags.table("t").assign(range(5), torch.ones(5, 2))
    return bags


@pytest.fixture
def outside(tmp_path):
    return Outside(tmp_path)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_no_file_of_rows_is_not_imported(tmp_path, outside, bags, ending, shape):
    path = tmp_path / f"rows.{ending}"
    SHAPES[shape](path, outside)
    _, into_table, to_log = FORMATS[ending]
    for call in (
        lambda: into_table(path, bags.table("t"), progress=False),
        lambda: to_log(path, tmp_path / "log", table="t", progress=False),
    ):
        with little_memory(), pytest.raises(ShoalError, match=rf"rows\.{ending}\]"):
            call()
    outside.assert_untouched()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_export_writes_through_nothing(tmp_path, outside, bags, ending, shape):
    shoal.save(tmp_path / "saved", bags, progress=False)
    (tmp_path / "to").mkdir()
    for name in (f"rows.{ending}", f"rows.{ending}.tmp"):
        SHAPES[shape](tmp_path / "to" / name, outside)
    export, *_ = FORMATS[ending]
    if shape == "a folder":
        with pytest.raises(ShoalError, match="rows"):
            export(tmp_path / "saved", tmp_path / "to" / f"rows.{ending}", table="t", progress=False)
    else:
        assert export(tmp_path / "saved", tmp_path / "to" / f"rows.{ending}", table="t", progress=False) == 5
        assert (tmp_path / "to" / f"rows.{ending}").lstat().st_size < 1 << 20
    outside.assert_untouched()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_of_dcp_is_of_files(tmp_path, outside, bags, name, shape):
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "saved"
    dcp.save({"model": model}, path)
    SHAPES[shape](path / name, outside)
    weight = torch.nn.Linear(2, 2)
    before = weight.weight.clone()
    if shape == "a file that ends with a hole":  # which nothing refers to
        dcp.load({"model": weight}, path)
        return
    with little_memory(), pytest.raises(CheckpointError, match="saved"):
        dcp.load({"model": weight}, path)
    assert torch.equal(weight.weight, before)
    outside.assert_untouched()


def test_pieces_of_dcp_are_below_its_folder(tmp_path):
    model = torch.nn.Linear(2, 2)
    dcp.save({"model": model}, tmp_path / "saved")
    shutil.move(tmp_path / "saved" / "__0_0.distcp", tmp_path / "__0_0.distcp")
    metadata = tmp_path / "saved" / ".metadata"
    content = metadata.read_bytes()
    # A str of a pickle, with its length: as long as before.
    moved = content.replace(b"\x0c\x00\x00\x00__0_0.distcp", b"\x0f\x00\x00\x00../__0_0.distcp")
    moved = moved if moved != content else content.replace(b"\x0c__0_0.distcp", b"\x0f../__0_0.distcp")
    assert moved != content
    metadata.write_bytes(moved)
    with pytest.raises(CheckpointError, match=r"\.\./__0_0\.distcp\] could not be opened: Invalid argument"):
        dcp.load({"model": model}, tmp_path / "saved")
