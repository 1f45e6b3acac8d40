"""Tables go to Parquet and come back, others read them, and hostile files are refused."""

import errno

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exchange import assert_same_table, committed
from support.inside import table_of
from support.logged import assert_rows, made, rows_of, train
from support.sweeps import examples

import shoal
from shoal import _native
from shoal.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    InputError,
    NotFoundError,
    ShoalError,
    StorageError,
)
from shoal.interop.parquet import export_parquet, import_parquet, parquet_to_log
from shoal.interop.safetensors import export_safetensors


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    path = tmp_path_factory.mktemp("logged") / "log"
    return path, committed(path)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_table_comes_back_bit_for_bit(tmp_path, logged, name):
    path, bags = logged
    assert export_parquet(path, tmp_path / "x.parquet", table=name) == len(bags.table(name))
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]
    other = made()
    assert import_parquet(tmp_path / "x.parquet", other.table(name)) == len(bags.table(name))
    assert_same_table(other.table(name), bags.table(name))


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_table_comes_back_by_way_of_a_log(tmp_path, logged, name):
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table=name)
    assert parquet_to_log(tmp_path / "x.parquet", tmp_path / "made", table=name) == 1
    other = made()
    other.optimizer.param_groups[0]["lr"] = 0.75
    commit = shoal.load(tmp_path / "made", other, tables=[name])
    assert commit.tables[name].step == 6
    assert_same_table(other.table(name), bags.table(name))
    assert other.optimizer.param_groups[0]["lr"] == 0.75, "the file does not know the settings of an optimizer"
    again = shoal.EmbeddingBagCollection([config for config in made()._configs if config.name == name], seed=3)
    assert shoal.recover(tmp_path / "made", again).version == 1, "layouts, births and seeds are as they were"


def test_the_columns(tmp_path, logged):
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table="b")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["key", "row", "state.exp_avg", "state.exp_avg_sq", "state.count", "score"]
    assert table.schema.field("key").type == pa.int64()
    assert table.schema.field("row").type.value_type == pa.float32()
    assert table.schema.field("row").type.list_size == 16
    keys = bags.table("b").keys()
    at = {key: number for number, key in enumerate(table["key"].to_pylist())}
    assert sorted(at) == keys.tolist()
    assert table["row"][at[int(keys[3])]].as_py() == bags.table("b").lookup(keys[3:4])[0].tolist()


def test_an_older_version(tmp_path, logged):
    path, _ = logged
    export_parquet(path, tmp_path / "x.parquet", table="a", version=1)
    then = made()
    shoal.load(path, then, version=1)
    other = made()
    import_parquet(tmp_path / "x.parquet", other.table("a"))
    assert_same_table(other.table("a"), then.table("a"))
    with pytest.raises(CheckpointError, match="newest is 3"):
        export_parquet(path, tmp_path / "x.parquet", table="a", version=9)


def test_min_score(tmp_path, logged):
    path, bags = logged
    scores = bags.table("a").scores(bags.table("a").keys())
    wanted = bags.table("a").keys()[scores >= 3]
    assert 0 < len(wanted) < len(scores)
    assert export_parquet(path, tmp_path / "x.parquet", table="a", min_score=3) == len(wanted)
    assert sorted(pq.read_table(tmp_path / "x.parquet")["key"].to_pylist()) == wanted.tolist()
    assert export_parquet(path, tmp_path / "x.parquet", table="a", min_score=1e9) == 0
    for wrong in (float("nan"), "3", True):
        with pytest.raises(InputError, match="min_score"):
            export_parquet(path, tmp_path / "x.parquet", table="a", min_score=wrong)


def applied(path, keys, rows):
    """Rows by key, with the changes of a file."""
    for line in pq.read_table(path).to_pylist():
        if line["op"] == "put":
            rows[line["key"]] = line["row"]
        else:
            assert line["op"] == "delete"
            assert [line[name] for name in line if name not in ("key", "op")] == [None] * (len(line) - 2)
            rows.pop(line["key"], None)
    return rows


def rows_by_key(bags, name):
    keys = bags.table(name).keys()
    return dict(zip(keys.tolist(), bags.table(name).lookup(keys).tolist(), strict=True))


@pytest.mark.parametrize("since", [0, 1, 2, 3])
def test_changes_behind_a_version_lead_to_the_newest(tmp_path, logged, since):
    path, bags = logged
    for name in "abc":
        before = made()
        if since:
            shoal.load(path, before, version=since)
        count = export_parquet(path, tmp_path / "x.parquet", table=name, since=since)
        table = pq.read_table(tmp_path / "x.parquet")
        assert table.num_rows == count == len(set(table["key"].to_pylist())), "each key once"
        assert (count == 0) == (since == 3)
        found = applied(tmp_path / "x.parquet", [], rows_by_key(before, name))
        assert found == rows_by_key(bags, name)


def test_changes_behind_a_version_where_all_rows_were_replaced(tmp_path):
    bags, other = made(), made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3), keys=200)
        log.commit(bags)
        train(bags, [3], keys=300)
        log.commit(bags)
        train(other, range(10, 12), keys=250)
        log.commit(other)
        assert log.newest.tables["a"].replaces
        other.table("a").erase(other.table("a").keys()[:3])
        log.commit(other)
    before = made()
    shoal.load(tmp_path / "log", before, version=1)
    export_parquet(tmp_path / "log", tmp_path / "x.parquet", table="a", since=1)
    assert applied(tmp_path / "x.parquet", [], rows_by_key(before, "a")) == rows_by_key(other, "a")


def test_changes_that_cannot_be_had(tmp_path, logged):
    path, _ = logged
    for since, error in ((4, InputError), (-1, ConfigError)):
        with pytest.raises(error, match="since"):
            export_parquet(path, tmp_path / "x.parquet", table="a", since=since)
    with pytest.raises(InputError, match="got both"):
        export_parquet(path, tmp_path / "x.parquet", table="a", since=1, min_score=2)
    bags = made()
    shoal.save(tmp_path / "saved", bags)
    shoal.save(tmp_path / "saved", bags)
    with pytest.raises(CheckpointError, match="in a snapshot alone"):
        export_parquet(tmp_path / "saved", tmp_path / "x.parquet", table="a", since=1)
    assert not list(tmp_path.glob("x.parquet*"))


def test_an_empty_table(tmp_path):
    bags = made()
    shoal.save(tmp_path / "saved", bags)
    assert export_parquet(tmp_path / "saved", tmp_path / "x.parquet", table="a") == 0
    assert export_parquet(tmp_path / "saved", tmp_path / "changes.parquet", table="a", since=1) == 0
    assert import_parquet(tmp_path / "x.parquet", bags.table("a")) == 0
    parquet_to_log(tmp_path / "x.parquet", tmp_path / "made", table="a")
    assert shoal.load(tmp_path / "made", bags, tables=["a"]).version == 1
    empty = pa.table({"key": pa.array([], pa.int64()), "row": pa.array([], pa.list_(pa.float32()))})
    pq.write_table(empty, tmp_path / "y.parquet")
    assert import_parquet(tmp_path / "y.parquet", bags.table("a")) == 0
    with pytest.raises(InputError, match="--dim"):
        parquet_to_log(tmp_path / "y.parquet", tmp_path / "other", table="a")
    assert not (tmp_path / "other").exists()
    assert parquet_to_log(tmp_path / "y.parquet", tmp_path / "other", table="a", dim=5) == 1


def test_the_parts_of_several_ranks(tmp_path, logged):
    path, bags = logged
    for rank in range(3):
        part = made()
        shoal.load(path, part, rank=rank, ranks=3)
        shoal.save(tmp_path / "parts", part, rank=rank, ranks=3, save_id="x")
    assert export_parquet(tmp_path / "parts", tmp_path / "x.parquet", table="b") == len(bags.table("b"))
    other = made()
    import_parquet(tmp_path / "x.parquet", other.table("b"))
    assert_same_table(other.table("b"), bags.table("b"))


def test_ranks_of_different_saves_are_refused(tmp_path):
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        shoal.save(tmp_path / "parts", made(), rank=rank, ranks=2, step=step, save_id=str(step))
    with pytest.raises(CheckpointError, match=r"rank 0 saved step 2 .* and rank 1 step 1"):
        export_parquet(tmp_path / "parts", tmp_path / "x.parquet", table="a")
    assert not list(tmp_path.glob("x.parquet*"))


def saved_by_ranks(path, *keys):
    for rank, held in enumerate(keys):
        bags = shoal.EmbeddingBagCollection([shoal.Table("a", 2)])
        bags.table("a").assign(held, torch.full((len(held), 2), float(rank)))
        shoal.save(path, bags, rank=rank, ranks=len(keys), save_id="x")


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
def test_a_key_that_two_ranks_have_is_refused(tmp_path, one, other):
    keys = [[1, 2, 3], [11, 12, 13], [21, 22, 23]]
    for key in (100, 103, 107):  # of the buckets of each rank
        keys[one][0] = keys[other][1] = key
        saved_by_ranks(tmp_path / f"parts-{key}", *keys)
        with pytest.raises(CheckpointError, match=f"got {key} in those of two"):
            export_parquet(tmp_path / f"parts-{key}", tmp_path / "x.parquet", table="a")
        with pytest.raises(CheckpointError, match=f"got {key} in those of two"):
            export_safetensors(tmp_path / f"parts-{key}", tmp_path / "x.safetensors", table="a")
    assert not list(tmp_path.glob("x.*"))


def test_a_key_that_changed_in_two_ranks_is_refused(tmp_path):
    for rank in range(2):
        bags = shoal.EmbeddingBagCollection([shoal.Table("a", 2)])
        with shoal.ChangeLog(tmp_path / "logs" / f"rank-0000{rank}-of-00002") as log:
            log.commit(bags)
            bags.table("a").assign([7], torch.ones(1, 2))
            log.commit(bags)
    with pytest.raises(CheckpointError, match="got 7 in those of two"):
        export_parquet(tmp_path / "logs", tmp_path / "x.parquet", table="a", since=1)


def test_ranks_that_share_keys_otherwise_than_by_buckets(tmp_path):
    saved_by_ranks(tmp_path / "parts", *(list(range(rank, 60, 3)) for rank in range(3)))
    assert export_parquet(tmp_path / "parts", tmp_path / "x.parquet", table="a") == 60
    found = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert sorted((line["key"], line["row"][0]) for line in found) == [(key, float(key % 3)) for key in range(60)]


def test_many_small_commits_make_few_row_groups(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    with shoal.ChangeLog(tmp_path / "log", fsync="never") as log:
        for key in range(40):
            bags.table("a").assign([key], torch.full((1, 4), float(key)))
            log.commit(bags)
    export_parquet(tmp_path / "log", tmp_path / "x.parquet", table="a")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1


def test_pieces_smaller_than_the_table(tmp_path, logged, monkeypatch):
    monkeypatch.setattr("shoal.interop.export_rows._PIECE_BYTES", 2000)
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table="a")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups > 3
    export_parquet(path, tmp_path / "changes.parquet", table="a", since=1)
    other = made()
    import_parquet(tmp_path / "x.parquet", other.table("a"))
    assert_same_table(other.table("a"), bags.table("a"))


def test_a_file_is_put_in_place_once_it_is_complete(tmp_path, logged):
    path, _ = logged
    export_parquet(path, tmp_path / "x.parquet", table="a", min_score=3)
    before = (tmp_path / "x.parquet").read_bytes()
    for call in (_native.FileCall.write, _native.FileCall.rename):
        _native.inject_fault(call, "x.parquet", errno.ENOSPC)
        try:
            with pytest.raises(StorageError):
                export_parquet(path, tmp_path / "x.parquet", table="a")
        finally:
            _native.clear_faults()
        assert (tmp_path / "x.parquet").read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_there(tmp_path, logged):
    path, bags = logged
    with pytest.raises(NotFoundError, match="'a', 'b', 'c'; got 'x'"):
        export_parquet(path, tmp_path / "x.parquet", table="x")
    with pytest.raises(CheckpointError, match="Is the path right"):
        export_parquet(tmp_path / "nothing", tmp_path / "x.parquet", table="a")
    with pytest.raises(CheckpointError, match="Is the path right"):
        import_parquet(tmp_path / "x.parquet", bags.table("a"))
    with pytest.raises(InputError, match=r"bags\.table"):
        export_parquet(path, tmp_path / "x.parquet", table="a")
        import_parquet(tmp_path / "x.parquet", bags)
    with pytest.raises(InputError, match=r"wanted a file in a folder that is there; got .*/nowhere"):
        export_parquet(path, tmp_path / "nowhere" / "x.parquet", table="a")


# ---- others


def test_duckdb_reads_and_writes_them(tmp_path, logged):
    duckdb = pytest.importorskip("duckdb")
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table="a")
    export_parquet(path, tmp_path / "changes.parquet", table="a", since=1)
    ((count, top),) = duckdb.sql(f"SELECT count(*), max(score) FROM '{tmp_path}/x.parquet'").fetchall()
    assert (count, top) == (len(bags.table("a")), 5.0)
    ops = dict(duckdb.sql(f"SELECT op, count(*) FROM '{tmp_path}/changes.parquet' GROUP BY op").fetchall())
    assert set(ops) == {"put", "delete"}
    duckdb.sql(f"COPY (SELECT * FROM '{tmp_path}/x.parquet' WHERE score >= 3) TO '{tmp_path}/y.parquet'")
    other = made()
    rows = import_parquet(tmp_path / "y.parquet", other.table("a"))
    assert 0 < rows < count
    keys = other.table("a").keys()
    assert torch.equal(other.table("a").lookup(keys), bags.table("a").lookup(keys))
    assert parquet_to_log(tmp_path / "y.parquet", tmp_path / "made", table="a") == 1
    third = made()
    shoal.load(tmp_path / "made", third, tables=["a"])
    assert_same_table(third.table("a"), other.table("a"))


def test_pandas_reads_and_writes_them(tmp_path, logged):
    pandas = pytest.importorskip("pandas")
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table="b")
    frame = pandas.read_parquet(tmp_path / "x.parquet")
    assert sorted(frame["key"]) == bags.table("b").keys().tolist()
    frame[frame["score"] >= 3][["key", "row"]].to_parquet(tmp_path / "y.parquet", index=False)
    other = made()
    import_parquet(tmp_path / "y.parquet", other.table("b"))
    keys = other.table("b").keys()
    assert torch.equal(other.table("b").lookup(keys), bags.table("b").lookup(keys))
    assert float(other.table("b").state(keys)["exp_avg"].abs().sum()) == 0


def test_polars_reads_and_writes_them(tmp_path, logged):
    polars = pytest.importorskip("polars")
    path, bags = logged
    export_parquet(path, tmp_path / "x.parquet", table="c")
    frame = polars.read_parquet(tmp_path / "x.parquet")
    assert sorted(frame["key"]) == bags.table("c").keys().tolist()
    frame.filter(polars.col("score") >= 3).write_parquet(tmp_path / "y.parquet")
    other = made()
    import_parquet(tmp_path / "y.parquet", other.table("c"))
    keys = other.table("c").keys()
    assert torch.equal(other.table("c").lookup(keys), bags.table("c").lookup(keys))


# ---- files that are wrong


def columns(n=4, dim=5, **others):
    rows = torch.arange(n * dim, dtype=torch.float32).view(n, dim).tolist()
    return {"key": list(range(n)), "row": pa.array(rows, pa.list_(pa.float32()))} | others


def floats(values, width=None):
    return pa.array(values, pa.list_(pa.float32()) if width is None else pa.list_(pa.float32(), width))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"row": floats([[1.0] * 5])}, "one column 'key'"),
        ({"key": [1]}, "one column 'row'"),
        (columns(key=[3, 1, 2, 1]), r"got 1 in rows 1 and 3"),
        (columns(key=[1, 2, None, 4]), "no nulls"),
        (columns(key=[1.0, 2.0, 3.0, 4.0]), "wanted int64; got double"),
        (columns(key=["1", "2", "3", "4"]), "wanted int64; got"),
        (columns(key=pa.array([1, 2, 3, 2**63], pa.uint64())), "wanted int64; got uint64"),
        (columns(dim=6), "wanted rows of 5 weights; got 6"),
        (columns(row=floats([[1.0] * 5] * 3 + [[1.0] * 4])), "lists of one length"),
        (columns(row=floats([[1.0] * 5] * 2 + [[1.0] * 4, [1.0] * 6])), "got 4 in row 2"),
        (columns(row=floats([[1.0] * 5] * 3 + [None])), "wanted rows of 5 weights"),  # a null is a value, too
        (columns(row=floats([[1.0] * 5] * 3 + [[1.0, None, 1.0, 1.0, 1.0]])), "no nulls"),
        (columns(row=floats([[1.0] * 5] * 3 + [None], 5)), "lists of one length|no nulls|wanted"),
        (columns(row=floats([[1.0] * 5] * 3 + [[1.0, float("nan"), 1.0, 1.0, 1.0]])), "in row 3"),
        (columns(row=pa.array([[1] * 5] * 4)), "wanted lists of floats"),
        (columns(row=[1.0, 2.0, 3.0, 4.0]), "wanted lists of floats"),
        (columns(score=[0.0, 1.0, float("inf"), 2.0]), "in row 2"),
        (columns(score=["a", "b", "c", "d"]), "wanted floats"),
        (columns(**{"state.sum": floats([[1.0]] * 3 + [[-1.0]])}), "no negative values; got one in row 3"),
        (columns(**{"state.sum": floats([[1.0, 2.0]] * 4)}), "wanted 1 values a row; got 2"),
        (columns(**{"state.exp_avg": floats([[1.0]] * 4)}), "state=False"),
        (columns(name=["a", "b", "c", "d"]), "got 'name'"),
        (columns(op=["put", "put", "put", "delete"]), "got changes"),
    ],
)
def test_files_that_are_wrong_change_nothing(tmp_path, content, message):
    pq.write_table(pa.table(content), tmp_path / "x.parquet")
    bags = made()
    bags.table("a").assign([1, 9], torch.ones(2, 5))
    before = rows_of(bags)
    with pytest.raises(ShoalError, match=message) as raised:
        import_parquet(tmp_path / "x.parquet", bags.table("a"))
    assert str(tmp_path / "x.parquet") in str(raised.value)
    for name, value in rows_of(bags).items():
        assert torch.equal(value, before[name])


def of_tiers(*tiers):
    return shoal.EmbeddingBagCollection([shoal.Table("a", 5, tiers=list(tiers))])


@pytest.mark.parametrize("kind", ["dram", "ssd"])
def test_a_file_whose_rows_do_not_fit_changes_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("shoal.interop.export_rows._PIECE_BYTES", 20_000)
    ssd = [shoal.Ssd(tmp_path / "ssd", "512KiB")] if kind == "ssd" else []
    bags = of_tiers(shoal.Dram("64KiB" if ssd else "256KiB"), *ssd)
    table = bags.table("a")
    table.assign(torch.arange(100), torch.full((100, 5), -1.0))
    before = rows_of(bags)
    pq.write_table(pa.table(columns(20_000)), tmp_path / "x.parquet")
    with pytest.raises(CapacityError, match="100 rows and 19900 new ones") as raised:
        import_parquet(tmp_path / "x.parquet", table)
    assert raised.value.__notes__ == ["Nothing was imported."]
    assert_rows(bags, before)
    held = table_of(bags)
    room = held.below.capacity if ssd else 100 + held.room.spare(20_000)
    pq.write_table(pa.table(columns(room + 1)), tmp_path / "x.parquet")
    with pytest.raises(CapacityError):
        import_parquet(tmp_path / "x.parquet", table)
    assert_rows(bags, before)
    for rows in (room, room - 1):  # then into a table that is full, which has all the keys
        pq.write_table(pa.table(columns(rows)), tmp_path / "x.parquet")
        assert import_parquet(tmp_path / "x.parquet", table) == rows
        assert table.keys().tolist() == list(range(room))
        assert torch.equal(table.lookup([0, rows - 1]), torch.arange(5.0) + torch.tensor([[0], [5.0 * (rows - 1)]]))
    assert table.stats().bytes <= table.stats().budget_bytes


def test_a_disk_that_fails_in_the_middle_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.interop.export_rows._PIECE_BYTES", 20_000)
    table = of_tiers(shoal.Dram("64KiB"), shoal.Ssd(tmp_path / "ssd", "512KiB")).table("a")
    pq.write_table(pa.table(columns(4000)), tmp_path / "x.parquet")
    _native.inject_fault(_native.FileCall.write, ".seg", errno.ENOSPC, 1, 1 << 30)
    try:
        with pytest.raises(StorageError) as raised:
            import_parquet(tmp_path / "x.parquet", table)
    finally:
        _native.clear_faults()
    (note,) = raised.value.__notes__
    assert "of the 4000 rows" in note and "Import it again" in note
    assert int(note.split("] ")[1].split()[0]) <= len(table) < 4000
    assert import_parquet(tmp_path / "x.parquet", table) == len(table) == 4000


def test_state_that_is_left_out_and_doubles(tmp_path):
    rows = pa.array([[1.0 + 2**-30] * 5] * 4, pa.list_(pa.float64()))
    pq.write_table(pa.table(columns(row=rows) | {"state.x": floats([[1.0]] * 4)}), tmp_path / "x.parquet")
    bags = made()
    assert import_parquet(tmp_path / "x.parquet", bags.table("a"), state=False) == 4
    assert torch.equal(bags.table("a").lookup([0, 3]), torch.ones(2, 5))


def test_rows_beyond_float16(tmp_path):
    pq.write_table(pa.table(columns(dim=3, row=floats([[1.0, 2.0, 70000.0]] * 4))), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="finite in float16"):
        import_parquet(tmp_path / "x.parquet", made().table("c"))


@pytest.mark.parametrize("column", ["sum", "exp_avg_sq", "count", "n"])
def test_negative_sums_of_squares_do_not_come_to_a_log(tmp_path, column):
    state = {f"state.{column}": floats([[1.0]] * 3 + [[-1.0]])}
    pq.write_table(pa.table(columns() | state), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=rf"state\.{column}: wanted no negative values; got one in row 3"):
        parquet_to_log(tmp_path / "x.parquet", tmp_path / "made", table="a")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("column", ["momentum", "exp_avg", "z", "of_another_system"])
def test_state_of_either_sign_comes_to_a_log(tmp_path, column):
    state = {f"state.{column}": floats([[1.0, -1.0]] * 4)}
    pq.write_table(pa.table(columns() | state), tmp_path / "x.parquet")
    assert parquet_to_log(tmp_path / "x.parquet", tmp_path / "made", table="a") == 1


def test_an_import_into_a_log_that_has_the_table(tmp_path, logged):
    bags = logged[1]
    shoal.save(tmp_path / "saved", bags)
    pq.write_table(pa.table(columns() | {"state.sum": floats([[1.0]] * 4)}), tmp_path / "x.parquet")
    with pytest.raises(CheckpointError, match="another layout: seed 3 and 0"):
        parquet_to_log(tmp_path / "x.parquet", tmp_path / "saved", table="a")
    assert parquet_to_log(tmp_path / "x.parquet", tmp_path / "saved", table="a", seed=3) == 2
    other = made()
    shoal.load(tmp_path / "saved", other)
    assert other.table("a").keys().tolist() == [0, 1, 2, 3]
    assert_same_table(other.table("b"), bags.table("b"))


def test_a_file_that_would_not_fit_its_size(tmp_path):
    n = 1 << 20
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(torch.zeros(n * 5).numpy()), 5)
    table = pa.table({"key": pa.array(range(n), pa.int64()), "row": zeros})
    encoding = {"key": "DELTA_BINARY_PACKED"}
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=["row"], column_encoding=encoding)
    assert (tmp_path / "x.parquet").stat().st_size < n // 10
    with pytest.raises(InputError, match="bytes explain"):
        import_parquet(tmp_path / "x.parquet", made().table("a"))


def test_a_page_that_claims_more_memory_than_its_values_explain(tmp_path):
    pq.write_table(pa.table(columns(n=2000)), tmp_path / "x.parquet", use_dictionary=False, compression="none")
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    at = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0).column(0).data_page_offset
    assert content[at : at + 3] == b"\x15\x00\x15" and content[at + 5] < 128, "a size of three bytes stands there"
    content[at + 3 : at + 6] = b"\xfe\xff\x7f"
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(StorageError, match="claims 1048575 bytes of memory"):
        import_parquet(tmp_path / "x.parquet", made().table("a"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, logged):
    folder = tmp_path_factory.mktemp("exported")
    export_parquet(logged[0], folder / "x.parquet", table="a")
    return folder, (folder / "x.parquet").read_bytes()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_an_error_or_the_same_rows(exported, logged, data):
    folder, content = exported
    damaged = bytearray(content)
    if data.draw(st.booleans(), "cut"):
        del damaged[data.draw(st.integers(0, len(content) - 1), "to") :]
    else:
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4), "at"):
            damaged[at] = data.draw(st.integers(0, 255), "byte")
    (folder / "y.parquet").write_bytes(damaged)
    other = made()
    try:
        rows = import_parquet(folder / "y.parquet", other.table("a"))
    except ShoalError:
        assert len(other.table("a")) == 0
    else:
        assert rows == len(other.table("a"))
