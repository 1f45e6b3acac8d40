"""TorchRec's modules and functions that look into a batch take our KeyedJaggedTensor."""

import os

import pytest
import torch
from support.batches import kjt, random_kjt

import shoal
from shoal.errors import InputError

from support.theirs import BATCH, bag_config, theirs, torchrec  # isort: skip (it skips this file)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.dist_data import _get_recat
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules import mc_modules
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.sparse.jagged_tensor import ComputeKJTToJTDict, kjt_is_equal

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own

CONFIGS = [bag_config("item", feature_names=["a"]), bag_config("user", feature_names=["b"])]
CPU = torch.device("cpu")
WEIGHTS = {"a": [[1.0, 0.5], [2.0], []], "b": [[], [1.0, 3.0], [0.25]]}


def both(make):
    """What it makes of our batch and of theirs."""
    return make(kjt(BATCH)), make(theirs(BATCH))


def assert_same(one, other):
    """KeyedJaggedTensors, ours or theirs."""
    assert one.keys() == other.keys()
    assert one.stride() == other.stride()
    assert one.length_per_key() == other.length_per_key()
    for name in ("values", "lengths", "offsets", "weights_or_none"):
        left, right = getattr(one, name)(), getattr(other, name)()
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.fixture
def one_rank():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


SHARDINGS = {"table-wise": lambda: table_wise(rank=0), "row-wise": row_wise, "data-parallel": data_parallel}


def sharded(how):
    """TorchRec's DLRM with TorchRec's tables, sharded."""
    torch.manual_seed(0)
    tables = torchrec.EmbeddingBagCollection(tables=CONFIGS, device=CPU)
    model = DLRMTrain(DLRM(tables, 3, [5, 4], [6, 1]))
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        tables, {one.name: SHARDINGS[how]() for one in CONFIGS}, sharder=sharder, world_size=1, local_size=1,
        device_type="cpu",
    )  # fmt: skip
    plan = ShardingPlan(plan={"model.sparse_arch.embedding_bag_collection": plan})
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def batches(batch):
    made = torch.Generator().manual_seed(1)
    return [Batch(torch.rand(3, 3, generator=made), batch(BATCH), torch.tensor([0, 1, 1])) for _ in range(4)]


@pytest.mark.parametrize("how", SHARDINGS)
def test_their_sharded_tables_train_with_our_batch(how, one_rank):
    losses = []
    for batch in (kjt, theirs):
        model = sharded(how)
        step = torch.optim.SGD(model.parameters(), 0.1)
        for one in batches(batch):
            step.zero_grad()
            loss, _ = model(one)
            loss.backward()
            step.step()
            losses.append(float(loss))
    assert losses[:4] == losses[4:]
    assert losses[0] != losses[3]


@pytest.mark.parametrize("how", SHARDINGS)
def test_their_pipeline_trains_their_sharded_tables_with_our_batch(how, one_rank):
    losses = []
    for batch in (kjt, theirs):
        model = sharded(how)
        pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), 0.1), CPU)
        loader = iter(batches(batch))
        for _ in range(4):
            _, logits, _ = pipeline.progress(loader)
            losses.append(logits.tolist())
    assert losses[:4] == losses[4:]


def test_their_quantized_tables_take_our_batch():
    torch.manual_seed(0)
    tables = quantize_inference_model(torch.nn.Sequential(torchrec.EmbeddingBagCollection(tables=CONFIGS, device=CPU)))
    ours, others = both(lambda batch: tables(batch))
    assert torch.equal(ours.values(), others.values())


def test_their_managed_collisions_take_our_batch():
    def remapped(batch):
        modules = {
            config.name: mc_modules.MCHManagedCollisionModule(
                zch_size=config.num_embeddings,
                device=CPU,
                eviction_policy=mc_modules.LFU_EvictionPolicy(),
                eviction_interval=1,
            )
            for config in CONFIGS
        }
        return mc_modules.ManagedCollisionCollection(modules, CONFIGS)(batch)

    assert_same(*both(remapped))


def test_their_feature_processors_take_our_batch():
    assert_same(*both(lambda batch: apply_feature_processors_to_kjt(batch, {"a": PositionWeightedModule(10)})))
    for processors in (
        PositionWeightedModuleCollection({"a": 10, "b": 10}),
        torch.nn.ModuleDict({"a": PositionWeightedModule(10), "b": PositionWeightedModule(10)}),
    ):
        tables = torchrec.EmbeddingBagCollection(tables=CONFIGS, device=CPU, is_weighted=True)
        module = FeatureProcessedEmbeddingBagCollection(tables, processors)
        ours, others = both(lambda batch, module=module: module(batch))
        assert torch.equal(ours.values(), others.values())


def test_their_dict_of_jagged_tensors_is_made_of_our_batch():
    ours, others = both(ComputeKJTToJTDict())
    assert list(ours) == list(others)
    for name, wanted in others.items():
        assert torch.equal(ours[name].values(), wanted.values())
        assert torch.equal(ours[name].offsets(), wanted.offsets())


def test_their_batch_copies_ours():
    into = theirs({"a": [[7, 7], [7], []], "b": [[], [7, 7], [7]]})
    assert_same(into.copy_(kjt(BATCH)), theirs(BATCH))
    given = kjt(BATCH).sync()
    assert_same(into.copy_(given), theirs(BATCH))


def test_their_comparison_asks_for_their_class():
    ours = kjt(BATCH)
    assert not kjt_is_equal(ours, ours)  # docs/from-torchrec.md says so
    made = torchrec.KeyedJaggedTensor(ours.keys(), ours.values(), ours.weights_or_none(), lengths=ours.lengths())
    assert kjt_is_equal(made, theirs(BATCH))


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_exchanged_is_what_they_exchange(weighted):
    settings = {"weights": WEIGHTS} if weighted else {}
    ours, others = kjt(BATCH, **settings), theirs(BATCH, **settings)
    assert ours.dist_labels() == others.dist_labels()
    for splits in ([2], [1, 1], [0, 2], [2, 0], [1, 0, 1]):
        assert ours.dist_splits(splits) == others.dist_splits(splits)
    assert all(torch.equal(*pair) for pair in zip(ours.dist_tensors(), others.dist_tensors(), strict=True))
    assert ours.size_in_bytes() == others.size_in_bytes()
    assert_same(ours.flatten_lengths(), others.flatten_lengths())
    with pytest.raises(InputError, match="inverse_indices_or_none"):
        ours.inverse_indices()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("keys", [1, 3])
@pytest.mark.parametrize(
    ("strides", "stagger"),
    [
        ([4], 1), ([3, 3], 1), ([3, 3], 2), ([5, 2], 1), ([0, 3], 2), ([0, 0], 1), ([1, 4, 2, 2], 2), ([2, 2, 2, 2], 2)
    ],
    ids=str,
)  # fmt: skip
def test_a_batch_of_what_ranks_sent_is_theirs(strides, stagger, keys, weighted):
    ranks = len(strides)
    names = [f"f{number}" for number in range(keys)]
    sent = [
        random_kjt(names, bags=stride, keys=50, weighted=weighted, seed=number) for number, stride in enumerate(strides)
    ]
    tensors = [torch.cat(parts) for parts in zip(*(one.dist_tensors() for one in sent), strict=True)]
    order = _get_recat(keys, ranks, stagger, CPU, strides)
    given = (names, tensors, False, ranks, order, strides, stagger)
    made = shoal.KeyedJaggedTensor.dist_init(*given)
    assert type(made) is shoal.KeyedJaggedTensor
    assert_same(made, torchrec.KeyedJaggedTensor.dist_init(*given))
    assert made.length_per_key_or_none() is not None
