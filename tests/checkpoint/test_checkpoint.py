"""Tables that are saved, and loaded into others."""

import errno
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.batches import train_step
from support.inside import tables_of
from support.logged import FEATURES, assert_rows, batch, made, rows_of, tables, train
from torch import nn

import shoal
from shoal import _native
from shoal.errors import CheckpointError, InputError, NotFoundError, StorageError
from shoal.log.commit import TableCommit


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    _native.clear_faults()


@pytest.fixture
def bags():
    made_bags = made()
    train(made_bags, range(6))
    return made_bags


@pytest.mark.parametrize("source", ["memory", "ssd"])
@pytest.mark.parametrize("target", ["memory", "ssd"])
def test_from_and_to_any_tiers(tmp_path, source, target):
    """FBGEMM's load drops the weights of tables that are larger than memory."""
    bags = made(source, tmp_path / "one")
    train(bags, range(6))
    assert shoal.save(tmp_path / "saved", bags, step=6, metadata={"x": 1}) == 1
    other = made(target, tmp_path / "two")
    train(other, range(50, 53))  # is replaced
    commit = shoal.load(tmp_path / "saved", other)
    assert (commit.step, commit.metadata) == (6, {"x": 1})
    assert_rows(other, rows_of(bags))
    train(bags, range(6, 9))
    train(other, range(6, 9))
    assert_rows(other, rows_of(bags))


def test_rows_that_changed_in_memory_are_saved_in_eval_mode_too(tmp_path):
    """FBGEMM's checkpoint after eval() leaves out what its cache had not written."""
    bags = made("ssd", tmp_path / "rows")
    train(bags, range(4))
    bags.eval()
    assert any(tier.dirty for stats in bags.stats().values() for tier in stats.tiers)
    shoal.save(tmp_path / "saved", bags)
    again = made()
    shoal.load(tmp_path / "saved", again)
    assert_rows(again, rows_of(bags))


def test_empty_tables(tmp_path):
    bags, other = made(), made()
    shoal.save(tmp_path / "saved", bags)
    train(other, [1])
    shoal.load(tmp_path / "saved", other)
    assert_rows(other, rows_of(bags))


def test_a_checkpoint_is_replaced_once_the_next_is_complete(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    before = rows_of(bags)
    for call in (_native.FileCall.write, _native.FileCall.sync, _native.FileCall.rename):
        for after in range(0, 12, 3):
            train(bags, [after], keys=50)
            _native.inject_fault(call, "saved", errno.ENOSPC, after=after, times=1)
            version = shoal.load(tmp_path / "saved", made()).version
            try:
                shoal.save(tmp_path / "saved", bags)
            except StorageError:
                pass
            finally:
                _native.clear_faults()
            other = made()
            if shoal.load(tmp_path / "saved", other).version > version:
                before = rows_of(bags)
            assert_rows(other, before)
    shoal.save(tmp_path / "saved", bags)
    other = made()
    shoal.load(tmp_path / "saved", other)
    assert_rows(other, rows_of(bags))
    assert len(list((tmp_path / "saved" / "snapshots").iterdir())) == 1


def test_a_log_goes_on_from_a_checkpoint(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    with shoal.ChangeLog(tmp_path / "saved") as log:
        train(bags, [9])
        assert log.commit(bags) == 2
    other = made()
    assert shoal.recover(tmp_path / "saved", other).version == 2
    assert_rows(other, rows_of(bags))


def test_some_tables(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    other = made()
    train(other, range(30, 33))
    before = rows_of(other)
    shoal.load(tmp_path / "saved", other, tables=["b"])
    wanted = {name: rows_of(bags)[name] if ".b." in name else value for name, value in before.items()}
    assert_rows(other, wanted)
    with pytest.raises(NotFoundError, match="got 'x'"):
        shoal.load(tmp_path / "saved", other, tables=["x"])
    more = shoal.EmbeddingBagCollection([*tables(), shoal.Table("d", 4)])
    with pytest.raises(CheckpointError, match=r"wanted a table 'd'.*tables="):
        shoal.load(tmp_path / "saved", more)
    shoal.load(tmp_path / "saved", more, tables=["a"])
    assert torch.equal(more.table("a").keys(), bags.table("a").keys())


def test_without_optimizers(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    serving = shoal.EmbeddingBagCollection(
        [
            shoal.Table("a", 5, optimizer=None),
            shoal.Table("b", 16, optimizer=None, dtype="bfloat16", pooling="mean"),
            shoal.Table("c", 3, optimizer=None, dtype="float16"),
        ],
        seed=3,
    ).eval()
    shoal.load(tmp_path / "saved", serving)
    for name in "abc":
        keys = bags.table(name).keys()
        assert torch.equal(serving.table(name).lookup(keys), bags.table(name).lookup(keys))
    shoal.save(tmp_path / "served", serving)
    with pytest.raises(CheckpointError, match="state=False"):
        shoal.load(tmp_path / "served", bags)
    before = bags.table("a").lookup(bags.table("a").keys())
    shoal.load(tmp_path / "served", bags, state=False)
    assert torch.equal(before, bags.table("a").lookup(bags.table("a").keys()))
    assert float(bags.table("a").state(bags.table("a").keys())["sum"].sum()) == 0


def test_another_type(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    other = shoal.EmbeddingBagCollection(
        [shoal.Table("a", 5, dtype="bfloat16", optimizer=shoal.RowwiseAdagrad(lr=0.1))], seed=3
    )
    with pytest.raises(CheckpointError, match="cast=True"):
        shoal.load(tmp_path / "saved", other)
    shoal.load(tmp_path / "saved", other, cast=True)
    keys = bags.table("a").keys()
    assert torch.equal(other.table("a").lookup(keys), bags.table("a").lookup(keys).bfloat16().float())


def test_weights_that_another_type_does_not_have(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
    bags.table("t").assign([1, 2], torch.tensor([[1.0] * 4, [1.0, -1e6, 1.0, 1.0]]))
    shoal.save(tmp_path / "saved", bags)
    half = shoal.EmbeddingBagCollection([shoal.Table("t", 4, dtype="float16")])
    with pytest.raises(CheckpointError, match=r"key 2: its weight 1e\+06 is more than float16 has"):
        shoal.load(tmp_path / "saved", half, cast=True)
    assert len(half.table("t")) == 0


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (3, 1), (3, 2), (2, 3), (3, 3)])
def test_another_number_of_ranks(tmp_path, saving, loading):
    """dynamicemb's load drops rows at another world size."""
    whole = made()
    train(whole, range(6))
    shoal.save(tmp_path / "whole", whole)
    for rank in range(saving):
        part = made()
        shoal.load(tmp_path / "whole", part, rank=rank, ranks=saving)
        shoal.save(tmp_path / "parts", part, rank=rank, ranks=saving, save_id="x")
    found = {name: [] for name in FEATURES}
    for rank in range(loading):
        part = made()
        shoal.load(tmp_path / "parts", part, rank=rank, ranks=loading)
        for name in FEATURES:
            keys = part.table(name).keys()
            out = torch.empty_like(keys)
            _native.buckets(keys, 4096, out)
            assert bool(((out >= 4096 * rank // loading) & (out < 4096 * (rank + 1) // loading)).all())
            assert torch.equal(part.table(name).lookup(keys), whole.table(name).lookup(keys))
            for column, values in part.table(name).state(keys).items():
                assert torch.equal(values, whole.table(name).state(keys)[column])
            found[name].append(keys)
    for name in FEATURES:
        assert torch.equal(torch.cat(found[name]).sort().values, whole.table(name).keys())


def test_a_rank_that_is_missing(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags, rank=0, ranks=2, save_id="x")
    with pytest.raises(CheckpointError, match="rank-00001-of-00002"):
        shoal.load(tmp_path / "saved", made())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = made()
        self.dense = nn.Sequential(nn.Linear(24, 4), nn.BatchNorm1d(4))

    def forward(self, features):
        return self.dense(self.bags(features).values())


def run(model, optimizer, scheduler, steps):
    for step in steps:
        optimizer.zero_grad()
        noise = torch.rand(())  # draws from torch's own generator
        (model(batch(step)) * noise).square().sum().backward()
        optimizer.step()
        scheduler.step()
        model.bags.optimizer.param_groups[0]["lr"] *= 0.9


def trained():
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_a_model_that_died_goes_on_bit_for_bit(tmp_path):
    model, optimizer, scheduler = trained()
    both = {"adam": optimizer, "steps": scheduler}
    with shoal.ChangeLog(tmp_path / "log") as log:
        run(model, optimizer, scheduler, range(5))
        log.commit(model.bags, dense=model, optimizer=both, step=5)
    files = list((tmp_path / "log" / "dense").iterdir())
    assert sum(file.stat().st_size for file in files) < 100_000, "rows were written twice"
    run(model, optimizer, scheduler, range(5, 9))
    again, other, third = trained()
    torch.rand(100)
    commit = shoal.recover(tmp_path / "log", again.bags, dense=again, optimizer={"adam": other, "steps": third})
    assert commit.step == 5
    run(again, other, third, range(5, 9))
    assert_rows(again.bags, rows_of(model.bags))
    for name, value in model.dense.state_dict().items():
        assert torch.equal(value, again.dense.state_dict()[name]), name
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert third.state_dict() == scheduler.state_dict()


def test_a_model_that_is_loaded_with_its_generators_goes_on_bit_for_bit(tmp_path):
    model, optimizer, scheduler = trained()
    run(model, optimizer, scheduler, range(5))
    shoal.save(tmp_path / "saved", model.bags, dense=model, optimizer={"adam": optimizer, "steps": scheduler})
    run(model, optimizer, scheduler, range(5, 9))
    again, other, third = trained()
    before = torch.get_rng_state()
    shoal.load(tmp_path / "saved", again.bags)
    assert torch.equal(torch.get_rng_state(), before), "who serves draws as before"
    shoal.load(tmp_path / "saved", again.bags, dense=again, optimizer={"adam": other, "steps": third}, rng=True)
    run(again, other, third, range(5, 9))
    assert_rows(again.bags, rows_of(model.bags))
    for name, value in model.dense.state_dict().items():
        assert torch.equal(value, again.dense.state_dict()[name]), name


def test_prefetch_and_recovery(tmp_path):
    def loop(bags, log, begin, end):
        for step, one in enumerate(shoal.prefetch([batch(step) for step in range(begin, end)], bags), begin):
            train_step(bags, one, seed=step)
            if log is not None:
                log.commit(bags, step=step + 1)

    bags = made("ssd", tmp_path / "one")
    with shoal.ChangeLog(tmp_path / "log") as log:
        loop(bags, log, 0, 8)
    again = made("ssd", tmp_path / "two")
    assert shoal.recover(tmp_path / "log", again).step == 8
    loop(bags, None, 8, 14)
    loop(again, None, 8, 14)
    assert_rows(again, rows_of(bags))


def test_a_damaged_block_leaves_tables_empty_and_says_so(tmp_path, bags):
    shoal.save(tmp_path / "saved", bags)
    file = next((tmp_path / "saved" / "snapshots").rglob("00001.arrow"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    other = made()
    train(other, [3])
    with pytest.raises(StorageError, match="checksum") as raised:
        shoal.load(tmp_path / "saved", other)
    assert "are empty now" in raised.value.__notes__[0]
    assert [len(table) for table in other.tables().values()] == [0, 0, 0]
    train(other, range(3))


def test_checkpoints_of_other_numbers_of_ranks_do_not_stand_in_one_folder(tmp_path):
    bags = made()
    train(bags, range(2))
    shoal.save(tmp_path / "one", bags)
    with pytest.raises(CheckpointError, match="Name another path"):
        shoal.save(tmp_path / "one", bags, rank=0, ranks=2, save_id="x")
    for rank in range(2):
        shoal.save(tmp_path / "two", bags, rank=rank, ranks=2, save_id="x")
    for ranks in (1, 3):
        with pytest.raises(CheckpointError, match="Name another path"):
            shoal.save(tmp_path / "two", bags, ranks=ranks, save_id="y")
    (tmp_path / "two" / "MANIFEST.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="of one process and parts of several"):
        shoal.load(tmp_path / "two", made())


def test_ranks_that_stand_at_different_saves_are_not_mixed(tmp_path):
    bags = made()
    for rank in range(2):
        shoal.save(tmp_path, bags, rank=rank, ranks=2, step=1, save_id="x")
    shoal.save(tmp_path, bags, rank=0, ranks=2, step=2, save_id="y")
    other = made()
    train(other, range(2))
    before = rows_of(other)
    with pytest.raises(CheckpointError, match=r"rank 0 saved step 2 .* rank 1 step 1"):
        shoal.load(tmp_path, other)
    assert_rows(other, before)


def test_recover_of_what_is_no_log(tmp_path):
    bags = made()
    shoal.save(tmp_path, bags, rank=0, ranks=2, save_id="x")
    with pytest.raises(CheckpointError, match=r"shoal\.load"):
        shoal.recover(tmp_path, bags)
    for path in (None, 3):
        with pytest.raises(InputError, match="the path of a folder"):
            shoal.recover(path, bags)
        with pytest.raises(InputError, match="the path of a folder"):
            shoal.load(path, bags)
    with pytest.raises(InputError, match="a list of names"):
        shoal.load(tmp_path, bags, tables="a")


def test_recover_into_tables_that_are_others(tmp_path):
    def bags(name, optimizer):
        made = shoal.EmbeddingBagCollection([shoal.Table(name, 4, optimizer=optimizer)])
        made.table(name).assign([1], torch.ones(1, 4))
        return made

    shoal.save(tmp_path / "saved", bags("t", shoal.AdamW(lr=0.1, weight_decay=0.3)))
    for other, message in (
        (bags("renamed", shoal.AdamW()), "which has 't'; got 'renamed'"),
        (bags("t", shoal.Adam()), r"trained by AdamW \(.*\), and has Adam \("),
    ):
        with pytest.raises(CheckpointError, match=message):
            shoal.recover(tmp_path / "saved", other)
        assert [len(table) for table in other.tables().values()] == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"event_time": float("nan")}, "event_time: wanted seconds; got nan"),
        ({"metadata": {"x": "\ud800"}}, "metadata: wanted a dict of what JSON has"),
        ({"metadata": {"x": 10**5000}}, "metadata: wanted a dict of what JSON has"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, settings, message):
    for call in (shoal.save, lambda path, *bags, **settings: shoal.ChangeLog(path).commit(*bags, **settings)):
        with pytest.raises(InputError, match=message):
            call(tmp_path / "saved", made(), **settings)
        assert shoal.recover(tmp_path / "saved", made()) is None
    for path in (None, "", "a\0b"):
        with pytest.raises(InputError, match="the path of a folder"):
            shoal.save(path, made())


def test_weights_alone_leave_the_optimizers_settings(tmp_path):
    saved = shoal.EmbeddingBagCollection([shoal.Table("t", 4, optimizer=shoal.Adagrad(lr=0.5))])
    saved.table("t").assign([1], torch.ones(1, 4))
    shoal.save(tmp_path, saved)
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4, optimizer=shoal.Adam(lr=0.001))])
    shoal.load(tmp_path, bags, state=False)
    assert bags.optimizer.param_groups[0]["lr"] == 0.001
    assert torch.equal(bags.table("t").lookup([1]), torch.ones(1, 4))


def test_what_a_checkpoint_lacks_changes_no_dense_weights(tmp_path):
    bags, model = made(), torch.nn.Linear(2, 2)
    shoal.save(tmp_path, bags, dense=model)
    other = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="no optimizer's state"):
        shoal.load(tmp_path, bags, dense=other, optimizer=torch.optim.SGD(other.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match="has the shape"):
        shoal.load(tmp_path, bags, dense=torch.nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match="differ in 'bias'"):
        shoal.load(tmp_path, bags, dense=torch.nn.Linear(2, 2, bias=False))


def test_room_is_made_for_as_many_rows_as_the_files_can_hold(tmp_path, monkeypatch):
    bags = made()
    train(bags, range(2))
    shoal.save(tmp_path, bags)
    original, asked = TableCommit.from_json, []
    monkeypatch.setattr(TableCommit, "from_json", staticmethod(lambda *given: replace(original(*given), rows=2**40)))
    other = made()
    for table in tables_of(other):
        monkeypatch.setattr(table, "expect", asked.append)
    with pytest.raises(CheckpointError, match="its parts have 1099511627776 rows, of 94 keys"):
        shoal.load(tmp_path, other)
    assert 0 < sum(asked) < 100_000


def test_loads_beside_a_process_that_saves_again_and_again(tmp_path):
    """Its files are removed while they are read."""
    program = """
import sys, torch, shoal
bags = shoal.EmbeddingBagCollection([shoal.Table("t", 64)])
bags.table("t").assign(range(20_000), torch.zeros(20_000, 64))
for step in range(10**9):
    shoal.save(sys.argv[1], bags, step=step)
    if step == 0:
        print("saved", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline() == b"saved\n"
            bags = shoal.EmbeddingBagCollection([shoal.Table("t", 64)])
            steps = [shoal.load(tmp_path, bags).step for _ in range(60)]
            assert steps == sorted(steps)
            assert len(bags.table("t")) == 20_000
        finally:
            writer.kill()
