"""Tables go to safetensors and come back, others read them, and hostile files are refused."""

import errno
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exchange import assert_same_table, committed
from support.logged import made
from support.sweeps import examples

import shoal
from shoal import _native
from shoal.errors import InputError, ShoalError, StorageError
from shoal.interop.safetensors import export_safetensors, import_safetensors, safetensors_to_log
from shoal.records import tensors


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    path = tmp_path_factory.mktemp("logged") / "log"
    return path, committed(path)


def write(path, found, metadata=None):
    header, pieces = tensors.encode(found, metadata or {})
    path.write_bytes(header + b"".join(pieces))


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_table_comes_back_bit_for_bit(tmp_path, logged, name, monkeypatch):
    monkeypatch.setattr("shoal.interop.export_rows._PIECE_BYTES", 2000)
    path, bags = logged
    assert export_safetensors(path, tmp_path / "x.safetensors", table=name) == len(bags.table(name))
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    other = made()
    assert import_safetensors(tmp_path / "x.safetensors", other.table(name)) == len(bags.table(name))
    assert_same_table(other.table(name), bags.table(name))
    assert safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table=name) == 1
    third = shoal.EmbeddingBagCollection([config for config in made()._configs if config.name == name], seed=3)
    assert shoal.recover(tmp_path / "made", third).tables[name].step == 6
    assert_same_table(third.table(name), bags.table(name))


def test_the_entries_are_those_of_a_state_dict(tmp_path, logged):
    safetensors = pytest.importorskip("safetensors.torch")
    path, bags = logged
    export_safetensors(path, tmp_path / "x.safetensors", table="b")
    found = safetensors.load_file(tmp_path / "x.safetensors")
    prefix = "embedding_bags.b."
    wanted = {name.removeprefix(prefix): one for name, one in bags.state_dict().items() if name.startswith(prefix)}
    assert set(found) == set(wanted)
    order = found["weight_id"].reshape(-1).argsort()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name] if name == "step" else found[name][order], value), name
    other = made()
    other.load_state_dict({prefix + name: value for name, value in found.items()}, strict=False)
    assert_same_table(other.table("b"), bags.table("b"))


def test_min_score_and_empty_tables(tmp_path, logged):
    path, bags = logged
    scores = bags.table("a").scores(bags.table("a").keys())
    wanted = bags.table("a").keys()[scores >= 3]
    assert export_safetensors(path, tmp_path / "x.safetensors", table="a", min_score=3) == len(wanted)
    other = made()
    import_safetensors(tmp_path / "x.safetensors", other.table("a"))
    assert torch.equal(other.table("a").keys(), wanted)
    assert export_safetensors(path, tmp_path / "x.safetensors", table="a", min_score=1e9) == 0
    assert import_safetensors(tmp_path / "x.safetensors", other.table("a")) == 0
    assert safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a") == 1
    assert shoal.load(tmp_path / "made", other, tables=["a"]).tables["a"].rows == 0
    assert len(other.table("a")) == 0


def test_weights_and_keys_alone(tmp_path):
    keys = torch.tensor([5, -(2**63), 2**63 - 1])
    write(tmp_path / "x.safetensors", {"weight": torch.full((3, 5), 2.0, dtype=torch.float64), "weight_id": keys})
    bags = made()
    assert import_safetensors(tmp_path / "x.safetensors", bags.table("a")) == 3
    assert bags.table("a").lookup(keys).unique().tolist() == [2.0]
    assert bags.table("a").scores(keys).tolist() == [0.0] * 3
    assert safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a") == 1
    other = made()
    shoal.load(tmp_path / "made", other, tables=["a"], state=False)
    assert_same_table(other.table("a"), bags.table("a"))


def test_a_disk_that_is_full(tmp_path, logged):
    path, _ = logged
    _native.inject_fault(_native.FileCall.write, "x.safetensors", errno.ENOSPC, after=3)
    try:
        with pytest.raises(StorageError, match="space"):
            export_safetensors(path, tmp_path / "x.safetensors", table="a")
    finally:
        _native.clear_faults()
    assert list(tmp_path.iterdir()) == []


def entries(n=3, dim=5, **others):
    return {"weight": torch.ones(n, dim), "weight_id": torch.arange(n).view(n, 1)} | others


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"weight": torch.ones(3, 5)}, "wanted a tensor 'weight_id'"),
        ({"weight_id": torch.arange(3)}, "wanted a tensor 'weight'"),
        (entries(weight_id=torch.tensor([1, 2, 1])), "got 1 in rows 0 and 2"),
        (entries(weight_id=torch.arange(3).int()), "weight_id: wanted int64"),
        (entries(weight_id=torch.tensor(3)), "weight_id: wanted int64"),
        (entries(weight_id=torch.arange(4)), "weight: wanted"),
        (entries(dim=6), "wanted rows of 5 weights; got 6"),
        (entries(weight=torch.ones(15)), "weight: wanted"),
        (entries(weight=torch.ones(3, 0)), "weight: wanted"),
        (entries(weight=torch.ones(3, 5).int()), "weight: wanted"),
        (entries(weight=torch.full((3, 5), float("nan"))), "NaN or infinity in row 0"),
        (entries(score=torch.ones(2)), "score: wanted"),
        (entries(score=torch.tensor([1.0, 2.0, float("inf")])), "infinity in row 2"),
        (entries(step=torch.tensor([1, 2])), "step: wanted"),
        (entries(**{"state.sum": -torch.ones(3, 1)}), "no negative values"),
        (entries(**{"state.sum": torch.ones(3, 2)}), "wanted 1 values a row; got 2"),
        (entries(**{"state.z": torch.ones(3, 5)}), "state=False"),
        (entries(bias=torch.ones(3)), "got 'bias'"),
    ],
)
def test_files_that_are_wrong_change_nothing(tmp_path, found, message):
    write(tmp_path / "x.safetensors", found)
    bags = made()
    with pytest.raises(ShoalError, match=message):
        import_safetensors(tmp_path / "x.safetensors", bags.table("a"))
    assert len(bags.table("a")) == 0


def test_what_is_said_beside_the_rows_is_checked(tmp_path):
    for metadata in ({"shoal.layout": "{"}, {"shoal.layout": "[1]"}, {"shoal.layout": json.dumps({"name": "x"})}):
        write(tmp_path / "x.safetensors", entries(), metadata)
        with pytest.raises(StorageError, match=r"shoal\.layout"):
            safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a")
    for step in (-1, 2**62 + 1, 2**63 - 1):
        write(tmp_path / "x.safetensors", entries(step=torch.tensor(step)))
        with pytest.raises(StorageError, match=r"shoal\.step"):
            safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a")
    with pytest.raises(ShoalError, match="dtype"):
        write(tmp_path / "x.safetensors", entries())
        safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a", dtype="int8")
    assert not (tmp_path / "made").exists()


def test_the_most_steps_can_be_trained_on_and_committed(tmp_path):
    write(tmp_path / "x.safetensors", entries(step=torch.tensor(2**62)))
    safetensors_to_log(tmp_path / "x.safetensors", tmp_path / "made", table="a")
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 5, optimizer=shoal.SGD())])
    shoal.load(tmp_path / "made", bags)
    bags(shoal.KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        assert log.newest.tables["a"].step == 2**62 + 1
    assert shoal.load(tmp_path / "log", bags).tables["a"].step == 2**62 + 1


def test_claims_of_a_header_are_no_memory(tmp_path):
    bags = made()
    for content in (
        b"",
        b"1234567",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 62) + b'{"weight":{"dtype":"F32","shape":[9999999999,5],"data_offsets":[0,199]}}',
    ):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises((StorageError, InputError)):
            import_safetensors(tmp_path / "x.safetensors", bags.table("a"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, logged):
    folder = tmp_path_factory.mktemp("exported")
    export_safetensors(logged[0], folder / "x.safetensors", table="a")
    return folder, (folder / "x.safetensors").read_bytes()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_an_error_or_rows(exported, data):
    folder, content = exported
    damaged = bytearray(content)
    if data.draw(st.booleans(), "cut"):
        del damaged[data.draw(st.integers(0, len(content) - 1), "to") :]
    else:
        for at in data.draw(st.lists(st.integers(0, 900), min_size=1, max_size=4), "at"):
            damaged[at] = data.draw(st.integers(0, 255), "byte")
    (folder / "y.safetensors").write_bytes(damaged)
    other = made()
    try:
        rows = import_safetensors(folder / "y.safetensors", other.table("a"))
    except ShoalError:
        assert len(other.table("a")) == 0
    else:
        assert rows == len(other.table("a"))
