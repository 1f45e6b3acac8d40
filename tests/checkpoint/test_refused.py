"""Loads, recoveries and saves that are refused, or fail in the middle, leave things as they were."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.batches import kjt, train_step
from support.inside import table_of
from support.logged import assert_rows, made, rows_of, tables, train
from torch import nn

import shoal
from shoal import _native
from shoal.errors import CapacityError, CheckpointError, DeviceError, InputError, ShoalError, StorageError
from shoal.interop import dcp
from shoal.interop.parquet import parquet_to_log


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


WRITES = {
    "save": lambda path, bags: shoal.save(path, bags),
    "commit": lambda path, bags: shoal.ChangeLog(path).commit(bags),
    "rewrite": lambda path, bags: shoal.ChangeLog(path).rewrite(bags),
}


@pytest.mark.parametrize("write", WRITES)
def test_tables_on_meta_do_not_replace_what_was_saved(tmp_path, write):
    bags = made()
    train(bags, range(2))
    shoal.save(tmp_path, bags)
    version = shoal.open_log(tmp_path).version
    empty = shoal.EmbeddingBagCollection(tables(), device="meta", seed=3)
    for given in (empty, nn.Sequential(empty), [nn.Sequential(empty)]):
        with pytest.raises(DeviceError, match=r"got 'a' on meta, which has none. Call to_empty\(device='cpu'\)"):
            WRITES[write](tmp_path, given)
    assert shoal.open_log(tmp_path).version == version
    other = made()
    shoal.load(tmp_path, other)
    assert_rows(other, rows_of(bags))


@pytest.mark.parametrize("call", [shoal.load, shoal.recover])
def test_tables_on_meta_are_not_loaded_into(tmp_path, call):
    bags = made()
    train(bags, range(2))
    shoal.save(tmp_path, bags)
    empty = shoal.EmbeddingBagCollection(tables(), device="meta", seed=3)
    with pytest.raises(DeviceError, match="on meta"):
        call(tmp_path, empty)
    call(tmp_path, empty.to_empty(device="cpu"))
    assert_rows(empty, rows_of(bags))


@pytest.mark.parametrize("call", [shoal.save, shoal.load, shoal.recover])
def test_one_table_is_no_collection_and_the_error_says_what_to_give(tmp_path, call):
    bags = made()
    shoal.save(tmp_path, bags)
    for given in (bags.table("a"), [bags, bags.table("a")], bags.tables()["b"]):
        with pytest.raises(InputError, match="got TableHandle, one table: give the collection that has it"):
            call(tmp_path, given)


class Dense(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    @property
    def value(self):
        (value,) = {one for parameter in self.parameters() for one in parameter.flatten().tolist()}
        return value


def adam(model, groups=1):
    each = [model.parameters()] if groups == 1 else [model.one.parameters(), model.two.parameters()]
    return torch.optim.Adam([{"params": list(some)} for some in each])


@pytest.mark.parametrize("call", [shoal.load, shoal.recover])
def test_an_optimizer_of_other_groups_changes_nothing(tmp_path, call):
    bags, model = made(), Dense(1.0)
    train(bags, range(2))
    shoal.save(tmp_path, bags, dense=model, optimizer=adam(model))
    other, another = made(), Dense(2.0)
    train(other, [5])
    before = rows_of(other)
    with pytest.raises(CheckpointError, match=r"optimizer: it has groups of \[2, 2\] parameters; .* had \[4\]"):
        call(tmp_path, other, dense=another, optimizer=adam(another, groups=2))
    assert_rows(other, before)
    assert another.value == 2.0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (lambda one: {"adam": one, "other": one}, r"a dict of \['adam', 'more'\]; got \['adam', 'other'\]"),
        (lambda one: {"adam": one}, r"a dict of \['adam', 'more'\]; got \['adam'\]"),
    ],
)
def test_the_error_for_other_optimizers_names_those_that_were_committed(tmp_path, given, wanted):
    model = Dense(1.0)
    shoal.save(tmp_path, made(), optimizer={"adam": adam(model), "more": adam(model)})
    with pytest.raises(CheckpointError, match=f"optimizer: wanted {wanted}"):
        shoal.load(tmp_path, made(), optimizer=given(adam(model)))


def test_the_error_for_several_optimizers_in_place_of_one_says_so(tmp_path):
    model = Dense(1.0)
    shoal.save(tmp_path, made(), optimizer=adam(model))
    with pytest.raises(CheckpointError, match=r"wanted the one that was committed; got \['adam'\]"):
        shoal.load(tmp_path, made(), optimizer={"adam": adam(model)})


def test_the_error_for_one_optimizer_in_place_of_several_says_so(tmp_path):
    model = Dense(1.0)
    shoal.save(tmp_path, made(), optimizer={"adam": adam(model)})
    with pytest.raises(CheckpointError, match=r"wanted a dict of \['adam'\]; got Adam with other entries"):
        shoal.load(tmp_path, made(), optimizer=adam(model))


class Picky(Dense):
    """Takes one layer, and then thinks better of it."""

    def load_state_dict(self, state_dict, *arguments, **others):
        answer = super().load_state_dict(state_dict, *arguments, **others)
        if float(state_dict["one.bias"][0]) == 1.0:
            raise KeyError("two")
        return answer


@pytest.mark.parametrize("call", [shoal.load, shoal.recover])
def test_a_model_that_does_not_take_its_weights_is_as_before(tmp_path, call):
    bags, model = made(), Dense(1.0)
    train(bags, range(2))
    shoal.save(tmp_path, bags, dense=model)
    other, another = made(), Picky(2.0)
    train(other, [5])
    before = rows_of(other)
    with pytest.raises(CheckpointError, match="does not take what was committed: 'two'"):
        call(tmp_path, other, dense=another)
    assert_rows(other, before)
    assert another.value == 2.0


@pytest.mark.parametrize("call", [shoal.load, shoal.recover])
def test_dense_weights_are_as_before_where_rows_are_damaged(tmp_path, call):
    bags, model = made(), Dense(1.0)
    train(bags, range(2))
    shoal.save(tmp_path, bags, dense=model)
    (file,) = (tmp_path / "snapshots").glob("*/00001.arrow")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    other, another = made(), Dense(2.0)
    with pytest.raises(StorageError, match="checksum"):
        call(tmp_path, other, dense=another)
    assert another.value == 2.0


@pytest.mark.parametrize("call", [shoal.load, shoal.recover])
@pytest.mark.parametrize("kind", ["memory", "ssd"])
def test_a_table_without_room_is_as_before(tmp_path, kind, call):
    def table(tiers=None):
        return shoal.EmbeddingBagCollection([shoal.Table("t", 8, tiers=tiers)])

    bags = table()
    bags.table("t").assign(torch.arange(50_000), torch.ones(50_000, 8))
    shoal.save(tmp_path / "saved", bags)
    small = table([shoal.Dram("256KiB")] + ([shoal.Ssd(str(tmp_path), "1MiB")] if kind == "ssd" else []))
    small.table("t").assign([1, 2], torch.ones(2, 8))
    before = rows_of(small)
    with pytest.raises(CapacityError, match=r"50000 rows .* Nothing was loaded"):
        call(tmp_path / "saved", small)
    assert_rows(small, before)


def test_ranks_of_which_one_did_not_save_a_step_again_are_not_mixed(tmp_path):
    bags = made()
    for rank in range(3):
        shoal.save(tmp_path, bags, rank=rank, ranks=3, step=7, save_id="first")
    train(bags, range(2))
    for rank in range(2):  # and the third dies
        shoal.save(tmp_path, bags, rank=rank, ranks=3, step=7, save_id="second")
    with pytest.raises(CheckpointError, match="rank 0 saved step 7 with the id second and rank 2 with first"):
        shoal.load(tmp_path, made())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_ranks_come_together_again_with_the_next_step(tmp_path, order):
    def part(rank, value):
        bags = made()
        for name in ("a", "b", "c"):
            handle = bags.table(name)
            handle.assign([rank * 10 + 1], torch.full_like(handle.lookup([0]), value))
        return bags

    for rank in range(3):
        shoal.save(tmp_path, part(rank, 1.0), rank=rank, ranks=3, step=7, save_id="7")
    for rank in order[:2]:
        shoal.save(tmp_path, part(rank, 2.0), rank=rank, ranks=3, step=8, save_id="8")
    with pytest.raises(CheckpointError, match="A save was interrupted"):
        shoal.load(tmp_path, made())
    for rank in order:
        shoal.save(tmp_path, part(rank, 3.0), rank=rank, ranks=3, step=9, save_id="9")
    whole = made()
    assert shoal.load(tmp_path, whole).step == 9
    assert whole.table("a").lookup([1, 11, 21])[:, 0].tolist() == [3.0, 3.0, 3.0]


def test_a_key_that_two_ranks_saved_is_noticed(tmp_path):
    bags = made()
    train(bags, range(2))
    for rank in range(2):
        shoal.save(tmp_path, bags, rank=rank, ranks=2, step=1, save_id="x")
    with pytest.raises(CheckpointError, match="Were keys saved by several ranks"):
        shoal.load(tmp_path, made())


def one_table(optimizer):
    return shoal.EmbeddingBagCollection([shoal.Table("t", 4, optimizer=optimizer)])


# Rows that one trained, and a table of the other: its state is other columns, or of another class.
OTHERWISE = {
    "another class": (shoal.Adam(lr=0.001), shoal.SGD(lr=1.0), r"by Adam.* \(exp_avg\[4\].*has SGD \(no state\)"),
    "momentum, and none": (
        shoal.SGD(lr=0.1, momentum=0.9),
        shoal.SGD(lr=1.0),
        r"by SGD with momentum.* \(momentum\[4\]\), and has SGD \(no state\)",
    ),
    "none, and momentum": (
        shoal.SGD(lr=0.1),
        shoal.SGD(lr=1.0, momentum=0.9),
        r"by SGD.* \(no state\), and has SGD with momentum \(momentum\[4\]\)",
    ),
    "counts of rows, and one of the table": (
        shoal.Adam(lr=0.1),
        shoal.Adam(lr=1.0, bias_correction="global"),
        r'by Adam.* \(.*count\[1\]\), and has Adam with bias_correction="global" \(exp_avg\[4\], exp_avg_sq\[4\]\)',
    ),
    "one count, and one for each row": (
        shoal.PartialRowwiseAdam(lr=0.1, bias_correction="global"),
        shoal.PartialRowwiseAdam(lr=1.0),
        r'by PartialRowwiseAdam with bias_correction="global".* \(.*has PartialRowwiseAdam \(.*count\[1\]\)',
    ),
    "the same columns of another class": (
        shoal.Adam(lr=0.1),
        shoal.AdamW(lr=1.0),
        r"by Adam.* \(.*count\[1\]\), and has AdamW \(.*count\[1\]\)",
    ),
    "a sum of another width": (
        shoal.Adagrad(lr=0.1),
        shoal.RowwiseAdagrad(lr=1.0),
        r"by Adagrad.* \(sum\[4\]\), and has RowwiseAdagrad \(sum\[1\]\)",
    ),
}


def rolled_back(path, bags):
    with shoal.ChangeLog(path) as log:
        log.rollback(1, bags)


@pytest.mark.parametrize(("was", "has", "message"), OTHERWISE.values(), ids=OTHERWISE)
@pytest.mark.parametrize("call", ["load", "recover", "rollback", "load_state_dict", "dcp.load"])
def test_state_of_other_optimizers_is_not_left_out_without_a_word(tmp_path, call, was, has, message):
    bags, other = one_table(was), one_table(has)
    train_step(bags, kjt({"t": [[1, 2, 3]]}))
    train_step(other, kjt({"t": [[7]]}))
    before = rows_of(other)
    # A state dict does not say which class trained the rows.
    is_seen = was.columns(4) != has.columns(4) or call in ("load", "recover", "rollback")
    if call == "rollback":
        shoal.save(tmp_path / "log", bags)
        act = lambda: rolled_back(tmp_path / "log", other)  # noqa: E731
    elif call == "load_state_dict":
        act = lambda: other.load_state_dict(bags.state_dict())  # noqa: E731
    elif call == "dcp.load":
        dcp.save(bags, tmp_path / "saved")
        act = lambda: dcp.load(other, tmp_path / "saved")  # noqa: E731
    else:
        shoal.save(tmp_path / "saved", bags)
        act = lambda: getattr(shoal, call)(tmp_path / "saved", other)  # noqa: E731
    if not is_seen:
        act()
        return
    with pytest.raises(ShoalError, match=f"table 't' was trained {message}"):
        act()
    assert_rows(other, before)
    assert other.optimizer.param_groups[0]["lr"] == 1.0
    if call == "load":
        shoal.load(tmp_path / "saved", other, state=False)
        assert torch.equal(other.table("t").lookup([1, 2, 3]), bags.table("t").lookup([1, 2, 3]))
        assert other.optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("has", [shoal.SGD(lr=1.0), shoal.Assign(), None], ids=repr)
def test_rows_that_no_optimizer_trained_load_where_there_is_no_state(tmp_path, has):
    bags, other = one_table(None), one_table(has)
    bags.table("t").assign([1, 2], torch.ones(2, 4))
    shoal.save(tmp_path, bags)
    shoal.load(tmp_path, other)
    assert torch.equal(other.table("t").lookup([1, 2]), torch.ones(2, 4))


def test_state_that_no_optimizer_of_the_table_has_is_not_left_out_of_what_was_imported(tmp_path):
    """A log that was imported does not say which optimizer trained its rows."""
    file = {"key": [1], "row": [[1.0] * 4], "state.momentum": [[0.5] * 4]}
    pq.write_table(pa.table(file), tmp_path / "x.parquet")
    parquet_to_log(tmp_path / "x.parquet", tmp_path / "log", table="t")
    other = one_table(shoal.SGD(lr=1.0))
    with pytest.raises(CheckpointError, match=r"by SGD with momentum \(momentum\[4\]\), and has SGD \(no state\)"):
        shoal.load(tmp_path / "log", other)
    shoal.load(tmp_path / "log", other, state=False)
    own = one_table(shoal.SGD(lr=1.0, momentum=0.9))
    shoal.load(tmp_path / "log", own)
    assert own.table("t").state([1])["momentum"].tolist() == [[0.5] * 4]


def test_a_table_that_was_renamed_is_not_recovered_empty(tmp_path):
    def two(*names):
        return shoal.EmbeddingBagCollection([shoal.Table(name, 4) for name in names])

    bags = two("a", "b")
    train_step(bags, kjt({"a": [[1]], "b": [[2]]}))
    with shoal.ChangeLog(tmp_path) as log:
        log.commit(bags)
    renamed = two("a", "c")
    train_step(renamed, kjt({"a": [[1]], "c": [[2]]}))
    before = rows_of(renamed)
    with pytest.raises(CheckpointError, match="Were they renamed"):
        shoal.recover(tmp_path, renamed)
    assert_rows(renamed, before)
    more = two("a", "b", "new")
    shoal.recover(tmp_path, more)
    assert [len(more.table(name)) for name in ("a", "b", "new")] == [1, 1, 0]


@pytest.mark.parametrize("write", ["commit", "save"])
def test_a_step_that_no_reader_takes_is_not_written(tmp_path, write):
    bags = made()
    train(bags, range(2))
    shoal.save(tmp_path / "log", bags)
    before = rows_of(bags)
    table_of(bags).step = 2**63
    with pytest.raises(InputError, match="its step is 9223372036854775808"):
        if write == "save":
            shoal.save(tmp_path / "log", bags)
        else:
            with shoal.ChangeLog(tmp_path / "log") as log:
                log.commit(bags)
    again = made()
    assert shoal.load(tmp_path / "log", again).version == 1
    assert_rows(again, before)


@pytest.mark.parametrize("call", [shoal.load, shoal.recover, shoal.save])
def test_a_name_that_is_too_long_is_an_error_of_ours(tmp_path, call):
    with pytest.raises(shoal.errors.ShoalError, match="File name too long"):
        call(tmp_path / ("x" * 300), made())
