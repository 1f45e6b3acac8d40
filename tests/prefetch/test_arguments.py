"""What `prefetch` is given: a loader, collections, a depth, and a function that finds features in a batch."""

import numpy as np
import pytest
import torch
from support.prefetching import TABLE, batches, train
from support.tiered import collection

import shoal
from shoal.errors import ConfigError, InputError

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 0}, {"depth": "2"}, {"depth": True}, {"bags": torch.nn.Linear(1, 1)}, {"features": 3}, {"loader": 3}],
)
def test_wrong_arguments(wrong):
    settings = {"loader": [], "bags": collection([TABLE])} | wrong
    with pytest.raises(ConfigError, match=rf"\[prefetch\] {next(iter(wrong))}: wanted"):
        shoal.prefetch(**settings)


def test_any_integer_is_a_depth():
    bags = collection([TABLE])
    train(bags, shoal.prefetch(batches(3), bags, depth=np.int64(2)))


def test_a_batch_of_features_and_labels_is_told_of_features():
    bags = collection([TABLE])
    with pytest.raises(InputError, match=r"got a tuple of 2\. Pass prefetch\(\.\.\., features=a function"):
        list(shoal.prefetch([(batch, "labels") for batch in batches(2)], bags))


def test_what_the_users_function_raises_comes_to_the_loop():
    bags = collection([TABLE])
    with pytest.raises(KeyError, match="ids"):
        list(shoal.prefetch([{"id": batch} for batch in batches(2)], bags, features=lambda batch: batch["ids"]))
    with pytest.raises(InputError, match="one for each of the 1 collections; got a tuple of 2"):
        list(shoal.prefetch(batches(2), bags, features=lambda batch: (batch, "labels")))


@pytest.mark.parametrize("found", [None, {"t": 1}, torch.ones(3)], ids=["None", "dict", "tensor"])
def test_what_is_no_batch_of_features_is_said(found):
    bags = collection([TABLE])
    with pytest.raises(InputError, match=r"features: wanted the KeyedJaggedTensor .* got"):
        list(shoal.prefetch(batches(3), bags, features=lambda _batch: found))


def test_features_that_stop_an_iteration_do_not_end_the_loop_in_silence():
    with pytest.raises(RuntimeError, match="features raised StopIteration"):
        list(shoal.prefetch(batches(3), collection([TABLE]), features=lambda _batch: next(iter(()))))
