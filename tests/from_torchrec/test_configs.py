"""TorchRec's own configs and KeyedJaggedTensors, where TorchRec is installed."""

import copy
from functools import partial

import pytest
import torch
from support.batches import kjt, train_step
from torch.nn import init

import shoal
from shoal.errors import ConfigError, InputError, WeightsWarning

from support.theirs import BATCH, bag_config, row_config, theirs, torchrec  # isort: skip (it skips this file without TorchRec)
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType

CPU = torch.device("cpu")
SGD = shoal.SGD(0.1)


def bags(**settings):
    return shoal.EmbeddingBagCollection(tables=[bag_config(**settings)], device=CPU, optimizer=SGD)


def test_a_bag_config_becomes_a_table():
    collection = shoal.EmbeddingBagCollection(
        tables=[
            bag_config(pooling=PoolingType.MEAN, data_type=DataType.BF16),
            bag_config("user", embedding_dim=7, feature_names=["a"], weight_init_min=0.5, weight_init_max=0.75),
        ],
        optimizer=SGD,
    )
    item, user = collection._configs
    assert (item.name, item.dim, item.pooling, item.dtype) == ("item", 4, "mean", "bfloat16")
    assert item.feature_names == ("a", "b")
    assert item.init == shoal.Uniform(-0.01, 0.01)  # sqrt(1 / num_embeddings), as TorchRec's
    assert (user.pooling, user.dtype, user.init) == ("sum", "float32", shoal.Uniform(0.5, 0.75))
    assert collection(theirs(BATCH)).keys() == ["a@item", "b", "a@user"]


def test_an_embedding_config_becomes_a_table_of_sequences():
    config = EmbeddingConfig(num_embeddings=100, embedding_dim=4, name="item", feature_names=["a", "b"])
    sequences = shoal.EmbeddingCollection(tables=[config], optimizer=SGD)
    assert sequences._configs[0].pooling == "none"
    out = sequences(theirs(BATCH))
    assert torch.equal(out["a"].values(), sequences.table("item").lookup([1, 2, 3]))
    assert out["b"].lengths().tolist() == [0, 2, 1]


@pytest.mark.parametrize("weights", [None, 0.5])
def test_their_batch_trains_as_ours_does(weights):
    config, is_weighted = [bag_config()], weights is not None
    one, other = (shoal.EmbeddingBagCollection(config, is_weighted, CPU, optimizer=SGD) for _ in range(2))
    for _ in range(3):
        assert torch.equal(
            train_step(one, theirs(BATCH, weights=weights)), train_step(other, kjt(BATCH, weights=weights))
        )
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_their_weights_are_ignored_by_default_as_theirs_are():
    theirs_made = torchrec.EmbeddingBagCollection(tables=[bag_config(num_embeddings=10)], device=CPU)
    ours = bags(num_embeddings=10)
    ours.table("item").assign(torch.arange(10), theirs_made.embedding_bags["item"].weight.detach())
    with pytest.warns(WeightsWarning):
        found = ours(theirs(BATCH, weights=0.5)).values()
    torch.testing.assert_close(found, theirs_made(theirs(BATCH, weights=0.5)).values())
    assert ours.is_weighted() == theirs_made.is_weighted()


@pytest.mark.parametrize("need_indices", [False, True])
def test_their_batch_trains_sequences_as_ours_does(need_indices):
    config = EmbeddingConfig(num_embeddings=100, embedding_dim=4, name="item", feature_names=["a", "b"])
    one, other = (
        shoal.EmbeddingCollection(tables=[config], need_indices=need_indices, optimizer=SGD) for _ in range(2)
    )
    assert torch.equal(train_step(one, theirs(BATCH)), train_step(other, kjt(BATCH)))
    if need_indices:
        assert one(theirs(BATCH))["b"].weights().tolist() == [5, 5, 1]


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_the_output_is_theirs_where_the_rows_are(pooling):
    config = bag_config(pooling=pooling, num_embeddings=10)
    reference = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    ours = shoal.EmbeddingBagCollection(tables=[config], optimizer=SGD)
    weight = reference.embedding_bags["item"].weight.detach()
    ours.table("item").assign(torch.arange(10), weight)
    wanted, got = reference(theirs(BATCH)), ours(theirs(BATCH))
    assert got.keys() == wanted.keys()
    assert got.length_per_key() == wanted.length_per_key()
    torch.testing.assert_close(got.values(), wanted.values())
    torch.testing.assert_close(got["b"], wanted["b"])


def test_a_state_dict_has_their_names():
    reference = torchrec.EmbeddingBagCollection(tables=[bag_config(num_embeddings=10)], device=torch.device("cpu"))
    assert set(reference.state_dict()) <= set(bags(num_embeddings=10).state_dict())


def test_their_outputs_can_be_regrouped_with_ours():
    reference = torchrec.EmbeddingBagCollection(
        tables=[bag_config("theirs", num_embeddings=10, feature_names=["b"])], device=torch.device("cpu")
    )
    ours = bags(feature_names=["a"])
    (side_by_side,) = shoal.KeyedTensor.regroup(
        [ours(theirs({"a": BATCH["a"]})), ours_of(reference(theirs(BATCH)))], [["a", "b"]]
    )
    assert side_by_side.shape == (3, 8)


def ours_of(keyed):
    return shoal.KeyedTensor(keyed.keys(), keyed.length_per_key(), keyed.values())


@pytest.mark.parametrize(
    ("fill", "wanted"),
    [
        (init.zeros_, shoal.Zeros()),
        (init.ones_, shoal.Constant(1.0)),
        (partial(init.constant_, val=0.5), shoal.Constant(0.5)),
        (partial(init.normal_, std=0.5), shoal.Normal(0.0, 0.5)),
        (init.uniform_, shoal.Uniform(0.0, 1.0)),
    ],
)
def test_fills_that_have_a_counterpart_are_taken(fill, wanted):
    assert bags(init_fn=fill)._configs[0].init == wanted


@pytest.mark.parametrize(
    "fill", [init.xavier_uniform_, lambda t: t.zero_(), partial(init.uniform_, None), partial(init.normal_, low=1)]
)
def test_other_fills_are_refused(fill):
    with pytest.raises(ConfigError, match="init_fn must"):
        bags(init_fn=fill)


def test_settings_without_a_counterpart_are_refused():
    with pytest.raises(ConfigError, match="need_pos has no counterpart"):
        bags(need_pos=True)
    with pytest.raises(ConfigError, match="data_type"):
        bags(data_type=DataType.INT8)
    with pytest.raises(ConfigError, match="EmbeddingCollection"):
        shoal.EmbeddingBagCollection(
            tables=[EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="item", feature_names=["a"])]
        )


def test_a_stride_of_its_own_for_each_key_is_refused():
    batch = torchrec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    collection = bags()
    with pytest.raises(InputError, match="same number of bags"):
        collection(batch)
    assert len(collection.table("item")) == 0


def test_their_malformed_batches_are_refused():
    for make in (
        bags,
        lambda: shoal.EmbeddingCollection([row_config()], optimizer=SGD),
    ):
        collection = make()
        for lengths in ([1, 1, 1, 5], [2, -1, 1, 1], [1, 1, 0, 0]):
            batch = torchrec.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor(lengths))
            with pytest.raises(InputError):
                collection(batch)
        assert len(collection.table("item")) == 0


def test_a_copy_and_a_new_optimizer_setting():
    collection = bags()
    train_step(collection, theirs(BATCH))
    other = copy.deepcopy(collection)
    assert torch.equal(train_step(collection, theirs(BATCH)), train_step(other, theirs(BATCH)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_their_batch_inside_a_compiled_model():
    one, other = bags(), bags()
    compiled = torch.compile(other, backend="aot_eager")
    for _ in range(2):
        one(theirs(BATCH)).values().sum().backward()
        compiled(theirs(BATCH)).values().sum().backward()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
