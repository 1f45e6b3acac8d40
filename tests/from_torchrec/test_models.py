"""TorchRec's models, modules and pipelines take our collections and batches."""

import os
import warnings

import pytest
import torch
from support.batches import kjt

import shoal
from shoal.errors import InputError

from support.theirs import BATCH, bag_config, row_config, their_bags, theirs, torchrec  # isort: skip (it skips this file)
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.regroup import KTRegroupAsDict

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own

CONFIGS = [bag_config("item", feature_names=["a"]), bag_config("user", feature_names=["b"])]
TABLES = [shoal.Table("item", 4, features=["a"]), shoal.Table("user", 4, features=["b"])]
BATCHES = pytest.mark.parametrize("batch", [kjt, theirs])


def bags(tables=CONFIGS, **settings):
    if tables is CONFIGS:
        settings["optimizer"] = shoal.SGD(0.1)
    return shoal.EmbeddingBagCollection(tables, **settings)


MODELS = {
    "DLRM": lambda bags: DLRM(bags, 3, [32, 4], [32, 1]),
    "DLRM_DCN": lambda bags: DLRM_DCN(bags, 3, [5, 4], [6, 1], 2, 3),
    "DLRM_Projection": lambda bags: DLRM_Projection(bags, 3, [5, 4], [6, 1], [8, 4], [8, 4]),
    "SimpleDeepFMNN": lambda bags: SimpleDeepFMNN(3, bags, 5, 3),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tables", [CONFIGS, TABLES], ids=["configs", "tables"])
@BATCHES
def test_models_train_with_our_collection(model, tables, batch):
    collection = bags(tables)
    made = MODELS[model](collection)
    made(torch.rand(3, 3), batch(BATCH)).sum().backward()
    before = collection.table("item").lookup([1])
    made(torch.rand(3, 3), batch(BATCH)).sum().backward()
    assert not torch.equal(collection.table("item").lookup([1]), before)


def test_a_collection_returns_the_configs_it_was_given():
    assert all(one is other for one, other in zip(bags().embedding_bag_configs(), CONFIGS, strict=True))
    rows = row_config()
    assert shoal.EmbeddingCollection([rows], optimizer=None).embedding_configs() == [rows]


def test_the_config_of_a_table_answers_to_what_their_code_asks():
    collection = bags(TABLES)
    made = collection.embedding_bag_configs()
    assert made == TABLES
    assert [one.num_embeddings for one in made] == [0, 0]
    collection(kjt(BATCH)).values().sum().backward()
    asked = [(one.name, one.embedding_dim, one.num_embeddings, one.feature_names, one.pooling) for one in made]
    assert asked == [("item", 4, len(collection.table("item")), ("a",), "sum"), ("user", 4, 2, ("b",), "sum")]
    bags(made)


def test_their_modules_take_our_batch():
    reference = their_bags(*CONFIGS)
    assert torch.equal(reference(kjt(BATCH)).values(), reference(theirs(BATCH)).values())
    rows = torchrec.EmbeddingCollection([row_config()])
    assert torch.equal(rows(kjt(BATCH))["a"].values(), rows(theirs(BATCH))["a"].values())


INVERSE = (["a", "b"], torch.tensor([[2, 0, 1], [2, 0, 1]]))


def deduplicated():
    whole = theirs(BATCH)
    return torchrec.KeyedJaggedTensor(whole.keys(), whole.values(), lengths=whole.lengths(), inverse_indices=INVERSE)


def test_deduplicated_samples_are_refused_and_their_expanded_output_is_what_the_error_says():
    collection, reference = bags(), their_bags(*CONFIGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collection.load_state_dict(reference.state_dict())
    for training in (True, False):
        collection.train(training)
        for lookup in (collection, collection.lookup):
            with pytest.raises(InputError, match=r"wanted a batch with every sample; .* inverse_indices= out of"):
                lookup(deduplicated())
    assert collection.table("item").stats().step == 0
    expanded = collection(theirs(BATCH)).values()[INVERSE[1][0]]
    assert torch.equal(reference(deduplicated()).values(), expanded)


def test_rows_of_deduplicated_samples_are_those_of_the_batch_as_in_torchrec():
    reference = torchrec.EmbeddingCollection([row_config()])
    rows = shoal.EmbeddingCollection([row_config()], optimizer=None).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows.load_state_dict(reference.state_dict())
    for name, wanted in reference(deduplicated()).items():
        assert torch.equal(rows(deduplicated())[name].values(), wanted.values())
        assert torch.equal(rows(deduplicated())[name].lengths(), wanted.lengths())


def test_their_regroup_takes_our_output():
    ours, others = bags()(kjt(BATCH)), their_bags(bag_config("third", feature_names=["c"]))
    third = others(theirs({"c": [[1], [2], [3]]}))
    wanted = [ours["a"], torch.cat([third["c"], ours["b"]], dim=1)]
    groups = [["a"], ["c", "b"]]
    for got in (
        torchrec.KeyedTensor.regroup([ours, third], groups),
        list(torchrec.KeyedTensor.regroup_as_dict([ours, third], groups, ["x", "y"]).values()),
        list(KTRegroupAsDict(groups, ["x", "y"])([ours, third]).values()),
        shoal.KeyedTensor.regroup([ours, third], groups),
    ):
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    (twice,) = torchrec.KeyedTensor.regroup([ours], [["a", "b", "a"]])  # TorchRec's slow path
    assert torch.equal(twice, torch.cat([ours["a"], ours["b"], ours["a"]], dim=1))


@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
@BATCHES
def test_their_pipelines_train_our_collection(pipeline, batch):
    torch.manual_seed(0)
    collection, other = bags(), bags()
    model, plain = DLRMTrain(MODELS["DLRM"](collection)), DLRMTrain(MODELS["DLRM"](other))
    plain.model.dense_arch.load_state_dict(model.model.dense_arch.state_dict())
    plain.model.over_arch.load_state_dict(model.model.over_arch.state_dict())
    batches = [Batch(torch.rand(3, 3), batch(BATCH), torch.tensor([0, 1, 1])) for _ in range(4)]
    stepper, running = (torch.optim.SGD(one.parameters(), 0.1) for one in (plain, model))
    for one in batches:
        stepper.zero_grad()
        plain(one)[0].backward()
        stepper.step()
    made, loader = pipeline(model, running, torch.device("cpu")), iter(batches)
    with pytest.raises(StopIteration):
        while True:
            made.progress(loader)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(collection.state_dict()[name], value)


def test_a_bare_batch_of_ours_goes_through_their_pipeline():
    from shoal.interop.torchrec import take_batches

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.top = bags(), torch.nn.Linear(8, 1)

        def forward(self, batch):
            out = self.top(self.bags(batch).values())
            return out.sum(), out

    take_batches()
    model = Model()
    made = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"))
    made.progress(iter([kjt(BATCH), kjt(BATCH)]))
    assert len(model.bags.table("item")) == 3


def test_a_batch_of_a_class_of_both_goes_through_their_pipeline():
    from torchrec.streamable import Pipelineable

    class Both(shoal.KeyedJaggedTensor, Pipelineable):
        pass

    ours = kjt(BATCH)
    assert isinstance(Both(ours.keys(), ours.values(), lengths=ours.lengths()), Pipelineable)


def test_a_traced_model_has_the_collection_as_one_call():
    model = MODELS["DLRM"](bags())
    dense = torch.rand(3, 3)
    for trace in (torch.fx.symbolic_trace, torchrec.fx.symbolic_trace):
        traced = trace(model)
        calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert "sparse_arch.embedding_bag_collection" in calls
        assert torch.equal(traced(dense, kjt(BATCH)), model(dense, kjt(BATCH)))


def test_a_model_made_on_meta_is_made_real_by_their_wrapper():
    from torchrec.distributed import DistributedModelParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        collection = bags(device=torch.device("meta"))
        model = DLRMTrain(DLRM(collection, 3, [5, 4], [6, 1], dense_device=torch.device("meta")))
        wrapped = DistributedModelParallel(model, device=torch.device("cpu"))
        wrapped(Batch(torch.rand(3, 3), theirs(BATCH), torch.tensor([0, 1, 1])))[0].backward()
        assert len(collection.table("item")) == 3
    finally:
        torch.distributed.destroy_process_group()


def test_the_example_learns():
    from examples import from_torchrec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = from_torchrec.main(["--steps", "60"])
    assert report.loss_after < report.loss_before
    assert report.same_after_loading
