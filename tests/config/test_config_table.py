"""Table and Feature."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.config import (
    SGD,
    Adam,
    Column,
    Constant,
    Dram,
    Feature,
    Normal,
    PartialRowwiseAdam,
    RowwiseAdagrad,
    Ssd,
    Table,
    Uniform,
    Zeros,
)
from shoal.errors import ConfigError


def test_defaults():
    table = Table("user", 8)
    assert table == Table(name="user", dim=8)
    assert table.features == (Feature("user", "train"),)
    assert table.pooling == "sum"
    assert table.optimizer == RowwiseAdagrad(lr=0.01)
    assert table.init == Uniform(-0.01, 0.01)
    assert table.tiers is None
    assert table.missing == "init"
    assert table.dtype == "float32"
    assert table.buckets == 4096


def test_features_are_names_or_values_and_become_values():
    table = Table("item", 8, features=["item", Feature("history", mode="read")])
    assert table.features == (Feature("item"), Feature("history", "read"))
    assert table.feature_names == ("item", "history")


@pytest.mark.parametrize("features", ["item", Feature("item")])
def test_single_feature_that_is_not_in_a_list_is_refused_with_a_hint(features):
    with pytest.raises(ConfigError, match=r"Write features=\['item'\]"):
        Table("item", 8, features=features)


@pytest.mark.parametrize("features", [[], (), 3, {"a": 1}, [3], [None], [""], ["a", "a"], ["a", Feature("a", "read")]])
def test_bad_features_are_refused(features):
    with pytest.raises(ConfigError, match="wanted"):
        Table("item", 8, features=features)


@pytest.mark.parametrize("mode", ["train", "read", "write"])
def test_feature_modes(mode):
    assert Feature("a", mode).mode == mode


def test_unknown_feature_mode_is_refused():
    with pytest.raises(ConfigError, match=r"\[Feature 'a'\] mode: wanted one of 'train', 'read', 'write'; got 'eval'"):
        Feature("a", "eval")


@pytest.mark.parametrize("name", ["user", "User 7", "产品", "a/b", "a@b", "a-b_c"])
def test_names_that_are_fine(name):
    assert Table(name, 1).feature_names == (name,)


@pytest.mark.parametrize("name", ["", "a.b", ".", "a\n", "\0", "a\x7fb", "\ud800", None, 3, b"user"])
def test_bad_table_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"\[Table\] name: wanted"):
        Table(name, 8)


@pytest.mark.parametrize("name", ["", "a\n", "\0", None, 3])
def test_bad_feature_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"\[Feature\] name: wanted"):
        Feature(name)


@pytest.mark.parametrize("dim", [1, 3, 128, np.int32(8), np.uint64(8), torch.tensor(8)])
def test_dims_that_are_fine(dim):
    assert type(Table("user", dim).dim) is int
    assert Table("user", dim).dim == int(dim)


@pytest.mark.parametrize("dim", [0, -1, True, False, 1.0, np.float32(8), "8", None, 2**31, np.array([1, 2])])
def test_bad_dims_are_refused(dim):
    with pytest.raises(ConfigError, match=r"\[Table 'user'\] dim: wanted an integer from 1 to 2147483647; got"):
        Table("user", dim)


@pytest.mark.parametrize("buckets", [0, -1, True, 1.5, None])
def test_bad_buckets_are_refused(buckets):
    with pytest.raises(ConfigError, match="buckets: wanted an integer"):
        Table("user", 8, buckets=buckets)


def test_buckets_need_not_be_a_power_of_two():
    assert Table("user", 8, buckets=1).buckets == 1
    assert Table("user", 8, buckets=1000).buckets == 1000


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
    ],
)
def test_dtype_is_a_name_or_torchs_own(given, name):
    assert Table("user", 8, dtype=given).dtype == name


@pytest.mark.parametrize("dtype", ["float64", "fp16", torch.float64, torch.int8, np.float32, None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="dtype: wanted one of 'float32', 'float16', 'bfloat16'"):
        Table("user", 8, dtype=dtype)


def test_other_choices_are_refused():
    with pytest.raises(ConfigError, match="pooling: wanted one of 'sum', 'mean', 'none'; got 'max'"):
        Table("user", 8, pooling="max")
    with pytest.raises(ConfigError, match=r"pooling: .*got None"):
        Table("user", 8, pooling=None)
    with pytest.raises(
        ConfigError, match=r"missing: wanted one of 'init', 'zero'; got 'zeros'\. Did you mean 'zero'\?"
    ):
        Table("user", 8, missing="zeros")


def test_tiers_are_a_list_of_different_kinds():
    assert Table("user", 8, tiers=[Dram("1GiB")]).tiers == (Dram("1GiB"),)
    for bad in (Dram(), "8GiB"):
        with pytest.raises(ConfigError, match="tiers: wanted a list; got"):
            Table("user", 8, tiers=bad)
    for bad in ([], 3, ["8GiB"], [None]):
        with pytest.raises(ConfigError, match="tiers: wanted"):
            Table("user", 8, tiers=bad)
    with pytest.raises(ConfigError, match="each kind of tier once"):
        Table("user", 8, tiers=[Dram("1GiB"), Dram("2GiB")])


def a_storage(_row_bytes):
    return None


@pytest.mark.parametrize("others", [[a_storage], [Ssd("/nvme", "1GiB")]])
def test_only_one_tier_is_the_lowest(others):
    with pytest.raises(ConfigError, match=r"tiers: wanted one lowest tier, .*; got \[.*\]\. Keep one"):
        Table("user", 8, tiers=[Dram("1GiB"), *others, Ssd("/nvme", "1GiB")])


@pytest.mark.parametrize("path", ["", "/nvme\0/shoal", Path("/nvme\0"), b"/nvme", 3, None])
def test_what_is_no_path_of_a_folder_is_refused(path):
    with pytest.raises(ConfigError, match=r"\[Ssd\] path: wanted the path of a folder.*; got "):
        Ssd(path, "1GiB")


@pytest.mark.parametrize("optimizer", ["adam", SGD, torch.optim.SGD, 0.1])
def test_other_optimizers_are_refused(optimizer):
    with pytest.raises(ConfigError, match="optimizer: wanted a value such as"):
        Table("user", 8, optimizer=optimizer)


@pytest.mark.parametrize("init", [None, 0.0, Uniform, torch.zeros])
def test_other_inits_are_refused(init):
    with pytest.raises(ConfigError, match="init: wanted Uniform, Normal, Zeros or Constant"):
        Table("user", 8, init=init)


def test_init_must_be_finite_in_the_type_of_the_weights():
    assert Table("user", 8, init=Constant(65504), dtype="float16").init.value == 65504.0
    assert Table("user", 8, init=Constant(1e38), dtype="bfloat16").init.value == 1e38
    for init in (Constant(65520), Uniform(-1e5, 0.0), Normal(0.0, 1e4)):
        assert Table("user", 8, init=init).init == init
        with pytest.raises(ConfigError, match="init: wanted weights that are finite in float16"):
            Table("user", 8, init=init, dtype="float16")
    with pytest.raises(ConfigError, match="finite in bfloat16"):
        Table("user", 8, init=Constant(3.4e38), dtype="bfloat16")


def test_row_bytes_are_weights_and_state():
    assert Table("user", 8).row_bytes == 8 * 4 + 4
    assert Table("user", 8, dtype="float16").row_bytes == 8 * 2 + 4
    assert Table("user", 8, optimizer=None).row_bytes == 8 * 4
    assert Table("user", 7, optimizer=SGD()).row_bytes == 7 * 4
    assert Table("user", 7, optimizer=Adam(), dtype="bfloat16").row_bytes == 7 * 2 + (7 + 7 + 1) * 4
    assert Table("user", 7, optimizer=PartialRowwiseAdam()).row_bytes == 7 * 4 + (7 + 1 + 1) * 4


def test_columns_are_the_optimizers():
    assert Table("user", 8).columns == (Column("sum", 1, signed=False),)
    assert Table("user", 8, optimizer=None).columns == ()


def test_replace_keeps_the_rest_and_checks():
    table = Table("user", 8, features=["a", "b"], init=Zeros(), dtype=torch.float16, tiers=[Dram()])
    assert dataclasses.replace(table, dim=9) == Table(
        "user", 9, features=["a", "b"], init=Zeros(), dtype="float16", tiers=[Dram()]
    )
    with pytest.raises(ConfigError, match="dim"):
        dataclasses.replace(table, dim=0)
