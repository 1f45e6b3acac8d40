"""TorchRec's batches and configs, for the tests that need it; where it is not installed these are skipped."""

import logging
import warnings

import pytest
import torch

from support.batches import kjt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM's and tensordict's, on import
    torchrec = pytest.importorskip("torchrec")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

logging.getLogger("torchrec").setLevel(logging.ERROR)

BATCH = {"a": [[1, 2], [3], []], "b": [[], [5, 5], [1]]}


def theirs(batch, **settings):
    """TorchRec's KeyedJaggedTensor."""
    ours = kjt(batch, **settings)
    return torchrec.KeyedJaggedTensor(
        keys=ours.keys(), values=ours.values(), weights=ours.weights_or_none(), lengths=ours.lengths()
    )


def bag_config(name="item", **settings):
    return EmbeddingBagConfig(
        **{"num_embeddings": 10_000, "embedding_dim": 4, "name": name, "feature_names": ["a", "b"], **settings}
    )


def row_config(name="item", **settings):
    return EmbeddingConfig(
        **{"num_embeddings": 100, "embedding_dim": 4, "name": name, "feature_names": ["a", "b"], **settings}
    )


def their_bags(*configs):
    return torchrec.EmbeddingBagCollection(tables=list(configs), device=torch.device("cpu"))
