"""Layouts: what a log remembers of a table."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from support.made_rows import LAYOUT, layouts

import shoal
from shoal.errors import ConfigError, StorageError
from shoal.records import Layout, StateColumn, layout_of, strict_json


def test_layout_of_a_table():
    table = shoal.Table("item", dim=16, dtype="bfloat16", optimizer=shoal.RowwiseAdagrad(initial=0.5), buckets=8)
    layout = layout_of(table, 3)
    assert layout == Layout("item", 16, "bfloat16", (StateColumn("sum", 1, 0.5),), 8, 3)
    assert layout.row_bytes == table.row_bytes
    adam = layout_of(shoal.Table("user", dim=4, optimizer=shoal.Adam(), buckets=8), -1)
    assert [column.name for column in adam.columns] == ["exp_avg", "exp_avg_sq", "count"]
    assert adam.seed == 2**64 - 1
    assert layout_of(shoal.Table("x", dim=1, optimizer=None), 0).columns == ()


@given(layouts)
def test_layouts_come_back_from_json(layout):
    encoded = strict_json.encode(layout.to_json(), "here")
    assert Layout.from_json(strict_json.parse(encoded, "here"), "here") == layout
    assert Layout.from_json(json.loads(json.dumps(layout.to_json())), "here") == layout


@given(layouts)
def test_layouts_without_state(layout):
    assert layout.weights_only() == replace(layout, columns=())
    assert layout.weights_only().weights_only() == layout.weights_only()


def test_differences_are_named():
    assert LAYOUT.difference(replace(LAYOUT)) is None
    assert LAYOUT.difference(replace(LAYOUT, dim=4)) == "dim 8 and 4"
    assert LAYOUT.difference(replace(LAYOUT, dtype="float16", seed=1)) == "dtype 'float32' and 'float16', seed 7 and 1"
    assert LAYOUT.difference(replace(LAYOUT, columns=(StateColumn("sum", 1, 0.25),))) == (
        "columns (sum[1] born as 0.5, exp_avg[8] born as 0) and (sum[1] born as 0.25)"
    )
    assert LAYOUT.weights_only().difference(LAYOUT) == ("columns () and (sum[1] born as 0.5, exp_avg[8] born as 0)")
    assert "name 'item' and 'user', " in LAYOUT.difference(replace(LAYOUT, name="user", buckets=1))


COLUMN = {"name": "sum", "width": 1, "initial": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "a.b"},
        {"name": "a\n"},
        {"name": "\ud800"},
        {"name": 1},
        {"name": None},
        {"dim": 0},
        {"dim": 2**31},
        {"dim": 8.0},
        {"dim": True},
        {"dim": "8"},
        {"dim": 10**4000},
        {"dtype": "int8"},
        {"dtype": ["float32"]},
        {"columns": None},
        {"columns": {"sum": 1}},
        {"columns": ["sum"]},
        {"columns": [["sum", 1, 0.0]]},
        {"columns": [{"name": "sum", "width": 1}]},
        {"columns": [{**COLUMN, "more": 1}]},
        {"columns": [{**COLUMN, "width": 0}]},
        {"columns": [{**COLUMN, "width": 2**31}]},
        {"columns": [{**COLUMN, "width": True}]},
        {"columns": [{**COLUMN, "initial": 1e39}]},
        {"columns": [{**COLUMN, "initial": "0"}]},
        {"columns": [{**COLUMN, "name": ""}]},
        {"columns": [COLUMN, COLUMN]},
        {"buckets": 0},
        {"buckets": 2**31},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 0.5},
        {"more": 1},
    ],
    ids=lambda change: repr(change)[:60],
)
def test_impossible_layouts_are_refused(change):
    with pytest.raises(StorageError, match=r"^\[MANIFEST\] "):
        Layout.from_json({**LAYOUT.to_json(), **change}, "MANIFEST")


@pytest.mark.parametrize("given", [None, 1, "x", [], {}, [1] * 10_000, {"name": "item"}])
def test_what_is_no_layout_is_refused(given):
    with pytest.raises(StorageError, match=r"^\[MANIFEST\] wanted a layout as an object") as caught:
        Layout.from_json(given, "MANIFEST")
    assert len(str(caught.value)) < 500


def test_layouts_are_checked_where_they_are_made():
    with pytest.raises(ConfigError, match="dim"):
        Layout("item", 0)
    with pytest.raises(ConfigError, match="each name once"):
        Layout("item", 1, columns=(StateColumn("a", 1, 0.0), StateColumn("a", 2, 0.0)))
