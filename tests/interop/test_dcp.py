"""torch.distributed.checkpoint and models that hold tables."""

import copy
import pickle
import random
import re
import subprocess
import sys
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.batches import assert_same_rows, assert_unchanged, kjt, memory, random_kjt, train_step
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

import shoal
from shoal.errors import CapacityError, CheckpointError, InputError, StateDictError
from shoal.interop import dcp


class Model(nn.Module):
    def __init__(self, dim=4, dtype="float32", tiers=None, hidden=8, optimizer=None):
        super().__init__()
        item = {} if tiers is None else {"tiers": tiers}
        optimizer = shoal.Adam(lr=0.1) if optimizer is None else optimizer
        self.bags = shoal.EmbeddingBagCollection(
            [
                shoal.Table("item", dim, optimizer=optimizer, dtype=dtype, **item),
                shoal.Table("user", 3, optimizer=shoal.RowwiseAdagrad(lr=0.1)),
            ]
        )
        self.words = shoal.EmbeddingCollection(
            [shoal.Table("word", 2, pooling="none", optimizer=shoal.SGD(lr=0.1, momentum=0.9))]
        )
        self.norm = nn.BatchNorm1d(dim + 5)
        self.top = nn.Sequential(nn.Linear(dim + 5, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch, words):
        summed = torch.stack([row.sum(0) for row in self.words(words)["word"].to_dense()])
        return self.top(self.norm(torch.cat([self.bags(batch).values(), summed], dim=1)))


class Training:
    """A model with its optimizer, and schedulers for the dense part and for the rows."""

    def __init__(self, **settings):
        torch.manual_seed(0)
        self.model = Model(**settings)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.adam, [2, 4, 6])
        self.rows = self.model.bags.optimizer
        self.row_schedule = torch.optim.lr_scheduler.ExponentialLR(self.rows, 0.9)

    def steps(self, begin, end, keys=40):
        losses = []
        for step in range(begin, end):
            self.adam.zero_grad()
            batch = random_kjt(["item", "user"], keys=keys, seed=step)
            out = self.model(batch, random_kjt(["word"], keys=keys, seed=100 + step))
            loss = (out * out).mean()
            loss.backward()
            self.adam.step()
            self.schedule.step()
            self.row_schedule.step()
            losses.append(loss.item())
        return losses

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.adam,
            "schedule": self.schedule,
            "rows": self.rows,
            "row_schedule": self.row_schedule,
        }


def saved_by_torch(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        torch_dcp.save({name: one.state_dict() for name, one in state.items()}, checkpoint_id=path)


def saved_by_torch_as_objects(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(dict(state), checkpoint_id=path)


@pytest.mark.parametrize("save", [dcp.save, saved_by_torch, saved_by_torch_as_objects])
@pytest.mark.parametrize("before", [0, 2, 9], ids=["into none", "into fewer", "into more"])
def test_training_goes_on_bit_for_bit(tmp_path, save, before):
    one = Training()
    one.steps(0, 3)
    save(one.state, tmp_path / "saved")
    other = Training()
    other.steps(50, 50 + before, keys=1000)
    dcp.load(other.state, tmp_path / "saved")
    assert_same_rows(one.model, other.model)
    assert one.steps(3, 8) == other.steps(3, 8)
    assert_same_rows(one.model, other.model)
    assert one.adam.param_groups[0]["lr"] == other.adam.param_groups[0]["lr"] < 0.01
    assert [group["lr"] for group in one.rows.param_groups] == [group["lr"] for group in other.rows.param_groups]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    [shoal.SGD(lr=0.1), shoal.Adagrad(lr=0.1), shoal.AdamW(lr=0.1), shoal.Ftrl(lr=0.1), shoal.PartialRowwiseAdam()],
    ids=repr,
)
def test_every_kind_of_row(tmp_path, optimizer, dtype):
    one, other = (Training(optimizer=optimizer, dtype=dtype) for _ in range(2))
    one.steps(0, 2)
    dcp.save(one.state, tmp_path)
    dcp.load(other.state, tmp_path)
    assert one.steps(2, 4) == other.steps(2, 4)
    assert_same_rows(one.model, other.model)


def test_tables_without_rows(tmp_path):
    one, other = Training(), Training()
    dcp.save({"model": one.model}, tmp_path)
    other.steps(0, 3)
    dcp.load({"model": other.model}, tmp_path)
    assert_same_rows(one.model, other.model)
    assert len(other.model.bags.table("item")) == 0


def test_a_collection_alone_and_under_any_name(tmp_path):
    one, other = (shoal.EmbeddingBagCollection([shoal.Table("a", 3), shoal.Table("b", 2)]) for _ in range(2))
    train_step(one, random_kjt(["a", "b"]))
    dcp.save({"some.name": one}, tmp_path)
    dcp.load({"some.name": other}, tmp_path)
    assert_same_rows(one, other)


def test_one_of_several_is_loaded_alone(tmp_path):
    one, other = Training(), Training()
    one.steps(0, 3)
    dcp.save(one.state, tmp_path)
    dcp.load({"model": other.model}, tmp_path)
    assert_same_rows(one.model, other.model)
    assert not other.adam.state


def test_an_optimizer_without_state_empties_the_one_it_is_loaded_into(tmp_path):
    one, other = Training(), Training()
    other.steps(0, 2)
    dcp.save({"optimizer": one.adam}, tmp_path)
    dcp.load({"optimizer": other.adam}, tmp_path)
    assert not other.adam.state


def test_tables_with_a_disk_below(tmp_path):
    tiers = [shoal.Dram("64KiB"), shoal.Ssd(tmp_path / "scratch", "64MiB")]
    one, other = Training(), Training(tiers=tiers)
    one.steps(0, 3)
    dcp.save(one.state, tmp_path / "saved")
    dcp.load(other.state, tmp_path / "saved")
    assert one.steps(3, 5) == other.steps(3, 5)
    assert_same_rows(one.model, other.model)


@pytest.mark.parametrize("with_rows", [True, False])
def test_one_object_is_the_whole_checkpoint(tmp_path, with_rows):
    one, other = Training(), Training()
    if with_rows:
        one.steps(0, 3)
    other.steps(50, 52)
    dcp.save(one.model, tmp_path / "model")
    dcp.save(one.adam, tmp_path / "adam")
    dcp.load(other.model, tmp_path / "model")
    dcp.load(other.adam, tmp_path / "adam")
    dcp.load(
        {"schedule": other.schedule, "row_schedule": other.row_schedule, "rows": other.rows}, others_of(one, tmp_path)
    )
    assert_same_rows(one.model, other.model)
    assert one.steps(3, 5) == other.steps(3, 5)


def others_of(training, folder):
    dcp.save({name: training.state[name] for name in ("schedule", "row_schedule", "rows")}, folder / "others")
    return folder / "others"


def test_a_flat_state_dict_that_torch_saved(tmp_path):
    one, other = Training(), Training()
    one.steps(0, 3)
    other.steps(50, 52, keys=1000)
    torch_saves(one.model.state_dict(), tmp_path)
    dcp.load(other.model, tmp_path)
    assert_same_rows(one.model, other.model)


def torch_saves(state, path, save=torch_dcp.save):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        return save(state, checkpoint_id=path)


def test_torch_reads_what_save_wrote_of_one_object(tmp_path):
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    dcp.save(one, tmp_path)
    state = other.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # comes from another thread
def test_a_checkpoint_of_async_save(tmp_path):
    one, other = Training(), Training()
    one.steps(0, 3)
    as_it_was = copy.deepcopy(one.model)
    saving = torch_saves({"model": one.model, "optimizer": one.adam}, tmp_path, torch_dcp.async_save)
    saving.result()
    one.steps(3, 5)
    dcp.load({"model": other.model, "optimizer": other.adam}, tmp_path)
    assert_same_rows(as_it_was, other.model)


def test_a_state_dict_that_is_empty(tmp_path):
    one, other = (
        {"scaler": torch.amp.GradScaler("cpu", enabled=False), "none": nn.Identity(), "top": nn.Linear(1, 1)}
        for _ in range(2)
    )
    dcp.save(one, tmp_path)
    dcp.load(other, tmp_path)
    assert torch.equal(one["top"].weight, other["top"].weight)


# ---- models in DistributedDataParallel and torch.compile


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(tmp_path, process_group):
    one, plain = Training(), Training()
    one.steps(0, 2)
    wrapped, other = (nn.parallel.DistributedDataParallel(part.model) for part in (one, Training()))
    dcp.save({"model": wrapped}, tmp_path / "wrapped")
    dcp.save({"model": one.model}, tmp_path / "plain")
    dcp.load({"model": other}, tmp_path / "wrapped")
    assert_same_rows(one.model, other.module)
    refuses(
        {"model": plain.model},
        tmp_path / "wrapped",
        StateDictError,
        r"differ by 'module\.' of torch\.nn\.parallel\.DistributedDataParallel\. Nothing was loaded\. "
        r"Load into torch\.nn\.ModuleDict\(\{'module': model\}\), and save the model inside, model\.module",
    )
    dcp.load({"model": nn.ModuleDict({"module": plain.model})}, tmp_path / "wrapped")
    assert_same_rows(one.model, plain.model)
    refuses({"model": other}, tmp_path / "plain", StateDictError, r"Load into the model inside: model\.module\.")
    dcp.load({"model": other.module}, tmp_path / "plain")


def test_compiled_models(tmp_path):
    one, other = Training(), Training()
    one.steps(0, 2)
    compiled = torch.compile(one.model, backend="eager")
    dcp.save(compiled, tmp_path / "compiled")
    dcp.save(one.model, tmp_path / "plain")
    refuses(
        {"model": other.model},
        saved_under("model", compiled, tmp_path / "named"),
        StateDictError,
        r"'_orig_mod\.' of torch\.compile\. .* Load into torch\.nn\.ModuleDict\(\{'_orig_mod': model\}\)",
    )
    dcp.load(nn.ModuleDict({"_orig_mod": other.model}), tmp_path / "compiled")
    assert_same_rows(one.model, other.model)
    with pytest.raises(StateDictError, match=r"Load into the model inside: model\._orig_mod\."):
        dcp.load(torch.compile(other.model, backend="eager"), tmp_path / "plain")


def saved_under(name, one, path):
    dcp.save({name: one}, path)
    return path


def test_a_compiled_part_of_a_model(tmp_path):
    one, other = Training(), Training()
    one.model.top = torch.compile(one.model.top, backend="eager")
    dcp.save(one.model, tmp_path)
    with pytest.raises(
        StateDictError, match=r"'_orig_mod\.' of torch\.compile.* Wrap the model as it was when it was saved"
    ):
        dcp.load(other.model, tmp_path)


# ---- torch's own functions for state dicts


def test_get_and_set_model_state_dict():
    one, other = Training(), Training()
    one.steps(0, 3)
    state = get_model_state_dict(one.model)
    assert set(state) == set(one.model.state_dict())
    assert set_model_state_dict(other.model, state) == ([], [])
    assert_same_rows(one.model, other.model)


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}])
def test_get_and_set_model_state_dict_in_full(options):
    one, other = Training(), Training()
    one.steps(0, 3)
    state = get_model_state_dict(one.model, options=StateDictOptions(**options))
    set_model_state_dict(other.model, state, options=StateDictOptions(**options))
    assert_same_rows(one.model, other.model)


def test_get_state_dict_of_a_collection_and_of_a_model_with_its_optimizer():
    one, other = (shoal.EmbeddingCollection([shoal.Table("weight", 3, pooling="none")]) for _ in range(2))
    train_step(one, random_kjt(["weight"]))
    set_model_state_dict(other, get_model_state_dict(one))
    assert_same_rows(one, other)
    training = Training()
    training.steps(0, 2)
    model, optimizer = get_state_dict(training.model, training.adam)
    assert set(model) == set(training.model.state_dict())
    assert optimizer["state"]["top.0.weight"]["exp_avg"].shape == (8, 9)


def test_entries_are_attributes_and_nothing_else_is():
    bags = Model().bags
    assert hasattr(bags.embedding_bags.item.state, "exp_avg")
    assert not hasattr(bags.embedding_bags, "other")
    assert not hasattr(bags, "embeddings")


# ---- what is refused


def refuses(state, path, kind, match):
    """The load raises, and nothing is another than before."""
    before = {name: memory(one) for name, one in state.items() if isinstance(one, nn.Module)}
    others = {name: pickle.dumps(one.state_dict()) for name, one in state.items() if name not in before}
    with pytest.raises(kind, match=match):
        dcp.load(state, path)
    for name, known in before.items():
        assert_unchanged(state[name], known)
    assert {name: pickle.dumps(state[name].state_dict()) for name in others} == others


@pytest.fixture
def saved(tmp_path):
    training = Training()
    training.steps(0, 3)
    dcp.save(training.state, tmp_path / "saved")
    return tmp_path / "saved"


def trained(**settings):
    made = Training(**settings)
    made.steps(20, 22)
    return made


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dim": 5}, r"model\] norm\.weight: wanted a tensor of shape \[10\]; got float32 of shape \[9\]"),
        ({"hidden": 7}, r"top\.0\.weight: wanted a tensor of shape \[7, 9\]"),
        ({"dtype": "float16"}, r"item\.weight: wanted float16 of shape \[\d+, 4\]; got float32"),
        (
            {"optimizer": shoal.SGD(lr=0.1)},
            r"model\] table 'item' was trained by Adam or AdamW \(.*\), and has SGD \(no state\)\. Nothing",
        ),
        (
            {"optimizer": shoal.Ftrl(lr=0.1)},
            r"table 'item' was trained by Adam or AdamW \(.*\), and has Ftrl \(.*\)\. Nothing",
        ),
        (
            {"optimizer": shoal.Adam(bias_correction="global")},
            r"Adam or AdamW \(.*\), and has Adam with bias_correction=.glob",
        ),
    ],
)
def test_another_model_is_refused(saved, settings, match):
    refuses(trained(**settings).state, saved, StateDictError, match)


def test_another_dim_of_a_table_is_refused(tmp_path):
    one, other = (shoal.EmbeddingBagCollection([shoal.Table("a", dim)]) for dim in (3, 4))
    train_step(one, random_kjt(["a"]))
    train_step(other, random_kjt(["a"]))
    dcp.save({"bags": one}, tmp_path)
    refuses({"bags": other}, tmp_path, StateDictError, r"a\.weight: wanted float32 of shape \[\d+, 4\]; got .*, 3\]")


def test_a_missing_table_and_an_unknown_one_are_refused(tmp_path):
    one = shoal.EmbeddingBagCollection([shoal.Table("a", 3)])
    two = shoal.EmbeddingBagCollection([shoal.Table("a", 3), shoal.Table("b", 3)])
    dcp.save({"bags": one}, tmp_path / "one")
    dcp.save({"bags": two}, tmp_path / "two")
    refuses({"bags": two}, tmp_path / "one", StateDictError, r"lacks \['embedding_bags\.b\.score'")
    refuses({"bags": one}, tmp_path / "two", StateDictError, r"unknown \['embedding_bags\.b\.score'")


def test_a_name_that_is_not_there_is_refused(saved):
    refuses({"modell": trained().model}, saved, CheckpointError, r"wanted an entry 'modell'; got \['model', 'opt")


def test_another_optimizer_is_refused(saved):
    training = trained()
    fewer = torch.optim.Adam(training.model.top.parameters())
    refuses(
        {"model": training.model, "optimizer": fewer}, saved, StateDictError, r"groups of \[4\] parameters; got \[6\]"
    )
    other = shoal.EmbeddingBagCollection([shoal.Table("other", 3)])
    refuses({"optimizer": training.adam, "rows": other.optimizer}, saved, StateDictError, "parameters")


def test_the_call_for_one_object_is_named(saved, tmp_path):
    training = trained()
    torch_saves(training.model.state_dict(), tmp_path / "flat")
    for state in ({"model": training.model}, {"bags": training.model.bags, "top": training.model.top}):
        refuses(state, tmp_path / "flat", CheckpointError, r"call shoal\.interop\.dcp\.load\(model, path\)")
    with pytest.raises(
        StateDictError, match=r"under \['model'\] only\. .* Call shoal\.interop\.dcp\.load\(\{'model': \.\.\.\}"
    ):
        dcp.load(training.model, saved)
    with pytest.raises(StateDictError, match=r"got such names under \['optimizer', 'rows'\] only"):
        dcp.load(training.adam, saved)
    with pytest.raises(InputError, match=r"got Tensor\. Give the model itself, not its state dict"):
        dcp.load(training.model.state_dict(), saved)


def test_an_optimizer_with_the_same_columns_of_another_width_is_refused(tmp_path):
    one, other = (
        shoal.EmbeddingBagCollection([shoal.Table("a", 3, optimizer=optimizer)])
        for optimizer in (shoal.Adagrad(), shoal.RowwiseAdagrad())
    )
    for bags in (one, other):
        train_step(bags, random_kjt(["a"]))
    dcp.save(one, tmp_path)
    refuses({"b": other}, saved_under("b", one, tmp_path / "b"), StateDictError, "by Adagrad .*has RowwiseAdagrad")


def test_weights_without_keys_are_refused_with_the_way_to_load_them(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 3), shoal.Table("b", 3)])
    weights = {f"embedding_bags.{name}.weight": torch.zeros(5, 3) for name in "ab"}
    torch_saves({"bags": weights}, tmp_path)
    refuses({"bags": bags}, tmp_path, StateDictError, "Load it into TorchRec's model, .* rows without keys")


def test_a_scheduler_and_an_optimizer_are_not_taken_for_each_other(saved):
    training = trained()
    refuses(
        {"optimizer": training.schedule}, saved, StateDictError, r"wanted names such as '_get_lr.* under \['row_sch"
    )
    refuses({"schedule": training.adam}, saved, StateDictError, r"under \['optimizer', 'rows'\] only")
    other = torch.optim.lr_scheduler.StepLR(training.adam, 2)
    refuses(
        {"schedule": other}, saved, StateDictError, r"of a StepLR, with \['step_size'\]; got one with \['milestones'\]"
    )


def test_a_kind_of_object_that_the_checkpoint_does_not_have_is_refused(tmp_path):
    training = trained()
    dcp.save({"optimizer": training.adam}, tmp_path)
    refuses({"optimizer": training.schedule}, tmp_path, StateDictError, "wanted the state dict of a MultiStepLR, with")


def test_damage_of_every_kind_is_noticed(tmp_path):
    one = Training()
    one.steps(0, 3)
    dcp.save(one.state, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    whole = data.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        data.write_bytes(damaged)
        other = Training()
        try:
            dcp.load(other.state, tmp_path)
        except CheckpointError as error:
            assert "wanted a checkpoint that can be read; got " in str(error)
            assert len(other.model.bags.table("item")) == 0
        else:  # in bytes that no record needs
            assert_same_rows(one.model, other.model)


def test_a_flipped_bit_of_a_weight_is_noticed_and_named(saved):
    (data,) = saved.glob("*.distcp")
    content = bytearray(data.read_bytes())
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    piece = next(one for index, one in metadata.storage_data.items() if index.fqn == ITEM + "weight")
    content[piece.offset + piece.length // 2] ^= 1
    data.write_bytes(content)
    refuses(
        trained().state,
        saved,
        CheckpointError,
        rf"got damage in the tensor '{re.escape(ITEM)}weight', in .*\.distcp from byte {piece.offset} on",
    )


def test_pieces_in_each_others_place_are_noticed(saved):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    pieces = sorted(metadata.storage_data.values(), key=lambda one: one.offset)
    pieces[3].offset = pieces[2].offset
    pieces[3].length += pieces[2].length
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(trained().state, saved, CheckpointError, "does not begin where a zip file does")


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    from torch.serialization import set_crc32_options

    one, other = Training(), Training()
    one.steps(0, 2)
    set_crc32_options(False)
    try:
        dcp.save(one.state, tmp_path)
    finally:
        set_crc32_options(True)
    dcp.load(other.state, tmp_path)
    assert_same_rows(one.model, other.model)


def test_damaged_metadata_raises_nothing_foreign(saved):
    path = saved / ".metadata"
    whole = path.read_bytes()
    generator = random.Random(1)
    for number in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged[: generator.randrange(len(whole))] if number % 10 == 0 else damaged)
        with suppress(CheckpointError, StateDictError):
            dcp.load(Training().state, saved)


def test_no_checkpoint_and_half_a_checkpoint(saved, tmp_path):
    state = trained().state
    refuses(
        state, tmp_path / "nowhere", CheckpointError, "wanted a checkpoint of torch.distributed.checkpoint; got File"
    )
    (tmp_path / "empty").mkdir()
    refuses(state, tmp_path / "empty", CheckpointError, "Nothing was loaded")
    (data,) = saved.glob("*.distcp")
    whole = data.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 100):
        data.write_bytes(whole[:size])
        refuses(state, saved, CheckpointError, "wanted a checkpoint that can be read; got ")
    data.unlink()
    refuses(state, saved, CheckpointError, "wanted a checkpoint that can be read; got File")
    (saved / ".metadata").write_bytes(b"no pickle")
    refuses(state, saved, CheckpointError, "Nothing was loaded")


def wrong_keys(state):
    state["model"]["bags.embedding_bags.user.weight_id"][1] = state["model"]["bags.embedding_bags.user.weight_id"][0]


def nan(state):
    state["model"]["words.embeddings.word.weight"][0, 0] = float("nan")


def negative(state):
    state["model"]["words.embeddings.word.step"].fill_(-1)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [(wrong_keys, "must hold each key once"), (nan, "must be finite"), (negative, "not negative")],
)
def test_wrong_contents_of_any_collection_are_refused_before_any_is_loaded(tmp_path, spoil, match):
    training = Training()
    training.steps(0, 3)
    state = {name: one.state_dict() for name, one in training.state.items()}
    spoil(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=tmp_path)
    refuses(trained().state, tmp_path, StateDictError, match)


ITEM = "model.bags.embedding_bags.item."


def change(name, **attributes):
    def apply(metadata):
        for attribute, value in attributes.items():
            setattr(metadata.state_dict_metadata[name], attribute, value)

    return apply


def chunks(*boxes):
    return [ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in boxes]


def huge(metadata):
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(ITEM) and len(entry.size):
            entry.size = torch.Size([2**50, *entry.size[1:]])
            entry.chunks = chunks(([0] * len(entry.size), entry.size))


def more_rows(metadata):
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(ITEM) and len(entry.size):
            entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])
            entry.chunks = chunks(([0] * len(entry.size), entry.size))


def without(name):
    return lambda metadata: metadata.state_dict_metadata.pop(name)


def bytes_for(name):
    return lambda metadata: metadata.state_dict_metadata.update({name: BytesStorageMetadata()})


def not_metadata(metadata):
    metadata.state_dict_metadata = [1, 2]


def no_paths(metadata):
    metadata.planner_data = None


def odd_path(metadata):
    metadata.planner_data[ITEM + "weight"] = ("model", 3.5)


def path_within(metadata):
    metadata.planner_data["model.top.0.bias"] = ("model", "top.0.weight", "x")


def other_path(metadata):
    metadata.planner_data["optimizer.state.0.exp_avg"] = ("optimizer", "state", "0", "exp_avh")


def unset(name, attribute):
    return lambda metadata: delattr(metadata.state_dict_metadata[name], attribute)


def no_storage(metadata):
    metadata.storage_data = {}


@pytest.mark.parametrize(
    ("spoil", "kind", "match"),
    [
        (huge, StateDictError, "state_dict_limit"),
        (more_rows, CheckpointError, "wanted a checkpoint that can be read"),
        (change(ITEM + "weight", size=torch.Size([2, 4])), CheckpointError, "pieces that are all of"),
        (change(ITEM + "weight", size=(-1, 4)), CheckpointError, "a shape and a type for"),
        (change(ITEM + "weight", size="many"), CheckpointError, "a shape and a type for"),
        (change(ITEM + "weight", properties=None), CheckpointError, "a shape and a type for"),
        (change(ITEM + "weight", chunks=[]), CheckpointError, "pieces that are all of"),
        (change(ITEM + "weight", chunks=None), CheckpointError, "pieces that are all of"),
        (change("model.top.2.weight", chunks=chunks(([0, 0], [1, 7]))), CheckpointError, "pieces"),
        (change("model.top.2.weight", chunks=chunks(([0, 0], [1, 9]))), CheckpointError, "pieces"),
        (change("model.top.2.weight", chunks=chunks(([0, 0], [1, 5]), ([0, 4], [1, 3]))), CheckpointError, "pieces"),
        (change("model.top.2.weight", chunks=chunks(([0], [8]))), CheckpointError, "pieces"),
        (without(ITEM + "weight_id"), StateDictError, r"lacks \['bags\.embedding_bags\.item\.weight_id'\]"),
        (without(ITEM + "state.exp_avg"), StateDictError, "lacks"),
        (without(ITEM + "state.count"), StateDictError, "was trained by Adam with bias_correction=.*and has Adam"),
        (bytes_for(ITEM + "weight_id"), StateDictError, "wanted a tensor of shape .* got another kind of value"),
        (bytes_for(ITEM + "step"), StateDictError, "got another kind of value"),
        (bytes_for("model.top.0.weight"), StateDictError, "got another kind of value"),
        (without("optimizer.param_groups.0.params"), StateDictError, r"groups of \[6\] parameters; got \[None\]"),
        (not_metadata, CheckpointError, "metadata with entries"),
        (no_paths, CheckpointError, "metadata with entries"),
        (odd_path, CheckpointError, "a path of names for"),
        (path_within, CheckpointError, "the path of 'model.top.0.bias'"),
        (other_path, CheckpointError, "the path of 'optimizer.state.0.exp_avg'"),
        (unset(ITEM + "weight", "size"), CheckpointError, "a shape and a type for"),
        (unset(ITEM + "weight", "properties"), CheckpointError, "a shape and a type for"),
        (unset(ITEM + "weight", "chunks"), CheckpointError, "pieces that are all of"),
        (no_storage, CheckpointError, "wanted a checkpoint that can be read"),
    ],
)
def test_hostile_metadata_is_refused(saved, spoil, kind, match):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    spoil(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(trained().state, saved, kind, match)


def test_objects_in_a_checkpoint_are_not_made(tmp_path):
    class Odd:
        def state_dict(self):
            return {"value": subprocess.Popen}

        def load_state_dict(self, state):
            raise AssertionError

    dcp.save({"odd": Odd()}, tmp_path)
    refuses({"odd": Odd()}, tmp_path, CheckpointError, "wanted a checkpoint that can be read")


def test_tables_without_room_are_refused_before_any_is_loaded(tmp_path):
    one, small = Training(), Training(tiers=[shoal.Dram("4KiB")])
    one.model.bags.table("item").assign(list(range(5000)), torch.zeros(5000, 4))
    one.steps(0, 2)
    dcp.save(one.state, tmp_path)
    refuses(small.state, tmp_path, CapacityError, "item")


def test_the_limit_of_state_dicts_holds(saved, tmp_path):
    training = trained()
    training.model.bags.state_dict_limit = 100
    with pytest.raises(StateDictError, match=r"rows of .* take .*; its state_dict_limit is"):
        dcp.load(training.state, saved)
    with pytest.raises(StateDictError, match="state_dict_limit"):
        dcp.save(training.state, tmp_path / "more")


def test_a_failure_of_a_later_part_puts_optimizers_back(saved, monkeypatch):
    training = trained()
    before = copy.deepcopy(training.adam.state_dict())

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(training.model, "load_state_dict", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        dcp.load(training.state, saved)
    after = training.adam.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in state.items())


@pytest.mark.parametrize("state", [{}, None, [1], {1: nn.Linear(1, 1)}, {"": nn.Linear(1, 1)}, {"a": 3}])
def test_wrong_arguments(tmp_path, state):
    for call in (dcp.save, dcp.load):
        with pytest.raises(InputError, match=r"\[dcp\.(save|load) .*state"):
            call(state, tmp_path)


@pytest.mark.parametrize("call", [dcp.save, dcp.load])
@pytest.mark.parametrize("path", [None, 3, b"folder"])
def test_wrong_paths(call, path):
    with pytest.raises(InputError, match=r"dcp\.(save|load)"):
        call({"model": nn.Linear(1, 1)}, path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"wanted a folder; 'file' is a file\. Name another path\."):
        dcp.save({"model": nn.Linear(1, 1)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="wanted a folder; 'file' is a file"):
        dcp.save({"model": nn.Linear(1, 1)}, tmp_path / "file" / "below")


def test_several_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for call in (dcp.save, dcp.load):
        with pytest.raises(CheckpointError, match="one process; got 2 ranks"):
            call({"model": nn.Linear(1, 1)}, tmp_path)


def test_import_shoal_does_not_import_it():
    code = "import sys, shoal; assert 'torch.distributed.checkpoint.filesystem' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkpoint_is_not_overwritten(saved):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(CheckpointError, match="wanted a new folder; got one with a checkpoint"):
        dcp.save(trained().state, saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_rows_are_born_and_trained_after_a_load(saved):
    other = trained()
    dcp.load(other.state, saved)
    train_step(other.model.bags, kjt({"item": [[10**12]], "user": [[5]]}))
    assert other.model.bags.table("item").contains([10**12]).all()
