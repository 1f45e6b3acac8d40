"""The tensors of a batch, which the loop's streams have to have."""

from collections import namedtuple
from types import SimpleNamespace

import torch

import shoal
from shoal.prefetch.streams import _MOST_LOOKED_AT, tensors_of

Pair = namedtuple("Pair", "one two")


def same(found, wanted):
    assert sorted(map(id, found)) == sorted(map(id, wanted))


def test_tensors_of_containers_are_found_however_many():
    many = [torch.ones(1) for _ in range(2 * _MOST_LOOKED_AT)]
    same(tensors_of([{"a": many[:3]}, Pair(many[3], tuple(many[4:]))]), many)


def test_tensors_of_objects_are_found():
    tensors = [torch.ones(1) for _ in range(6)]
    inner = SimpleNamespace(deep=[{"x": tensors[0]}, Pair(tensors[1], None)], other=tensors[2])
    batch = SimpleNamespace(inner=inner, name="batch", dense=tensors[3])
    same(tensors_of((batch, tensors[4], {"more": SimpleNamespace(labels=tensors[5])})), tensors)


def test_tensors_of_features_in_an_object_are_found_however_many_features_there_are():
    names = [str(number) for number in range(_MOST_LOOKED_AT)]
    values, lengths, labels = torch.arange(len(names)), torch.ones(len(names), dtype=torch.int64), torch.ones(1)
    features = shoal.KeyedJaggedTensor(names, values, lengths=lengths)
    same(tensors_of(SimpleNamespace(features=features, labels=labels)), [values, lengths, labels])


def test_a_dataset_that_a_batch_knows_is_not_looked_through():
    looked_at = 0

    class Sample:
        def __getattribute__(self, name):
            nonlocal looked_at
            looked_at += name == "__dict__"
            return super().__getattribute__(name)

    dataset = SimpleNamespace(samples=[Sample() for _ in range(4 * _MOST_LOOKED_AT)])
    dataset.itself = dataset
    batch = SimpleNamespace(dataset=dataset, features=SimpleNamespace(ids=torch.ones(2)), labels=torch.ones(1))
    same(tensors_of(batch), [batch.features.ids, batch.labels])
    assert looked_at <= 2 * _MOST_LOOKED_AT
