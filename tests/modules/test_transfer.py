"""Batches of the host that are moved to a device in place, and back. The device is meta, which every machine has."""

import gc
import weakref

import pytest
import torch
from support.batches import kjt

import shoal
from shoal.errors import InputError
from shoal.modules import transfer
from shoal.modules.transfer import move_in_place

THERE = torch.device("meta")


@pytest.fixture(autouse=True)
def no_pages_are_locked(monkeypatch):
    monkeypatch.setattr(shoal.KeyedJaggedTensor, "pin_memory", lambda self: self)
    yield
    assert not transfer._moved


def batch():
    return shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), torch.ones(3), lengths=torch.tensor([1, 2]))


def tensors(features):
    return features.values(), features.weights(), features.lengths(), features.offsets()


def are_on(features, kind):
    return {tensor.device.type for tensor in tensors(features)} == {kind}


def test_a_batch_is_moved_and_goes_back_to_the_same_tensors():
    features = batch()
    before = tensors(features)
    let_go = move_in_place(features, THERE)
    assert are_on(features, "meta") and features.length_per_key_or_none() == [3]
    let_go()
    assert all(one is two for one, two in zip(tensors(features), before, strict=True))


def test_a_batch_that_is_there_is_left_alone():
    features = batch().to(THERE)
    assert move_in_place(features, THERE) is None
    assert are_on(features, "meta")


def test_a_batch_goes_back_once_nobody_needs_it_there():
    features = batch()
    both = [move_in_place(features, THERE) for _ in range(2)]
    both[1]()
    assert are_on(features, "meta")
    both[0]()
    assert are_on(features, "cpu")


@pytest.mark.parametrize("change", ["other values", "written to", "wants a gradient"])
def test_a_batch_that_was_changed_there_stays(change):
    features = batch()
    let_go = move_in_place(features, THERE)
    if change == "other values":
        features._values = torch.zeros(3, dtype=torch.int64, device=THERE)
    elif change == "written to":
        features.values().add_(1)
    else:
        features.weights().requires_grad_()
    let_go()
    assert are_on(features, "meta")


def test_what_was_moved_is_not_kept():
    features = batch()
    move_in_place(features, THERE)()
    known = weakref.ref(features)
    del features
    gc.collect()
    assert known() is None


class Bags:
    """A collection on a device, as prefetch sees it. `device` is not a GPU: there are no streams."""

    def __init__(self, device=THERE, error_at=None):
        self.device = torch.device(device)
        self.staged, self.error_at = 0, error_at

    def move_here(self, features):
        return move_in_place(features, self.device) if self.device.type != "cpu" else None

    def stage(self, features):
        assert features.values().device.type == self.device.type
        self.staged += 1
        if self.staged == self.error_at:
            raise ValueError("told to fail")


@pytest.mark.parametrize("depth", [1, 3])
def test_a_list_of_batches_is_on_the_host_after_an_epoch_and_each_on_the_device_in_its_turn(depth):
    loader = [kjt({"a": [[step, 1], []]}) for step in range(7)]
    before = [tensors_of(features) for features in loader]
    for _epoch in range(2):
        for step, features in enumerate(shoal.prefetch(loader, Bags(), depth=depth)):
            assert features is loader[step] and features.values().device == THERE
            assert all(done.values().device.type == "cpu" for done in loader[:step])
    assert all(
        one is two
        for features, wanted in zip(loader, before, strict=True)
        for one, two in zip(tensors_of(features), wanted, strict=True)
    )


def tensors_of(features):
    return features.values(), features.lengths()


def test_a_batch_that_comes_twice_is_on_the_device_both_times():
    features = kjt({"a": [[1]]})
    for given in shoal.prefetch([features] * 5, [Bags(), Bags()], depth=2):
        assert given.values().device == THERE
    assert features.values().device.type == "cpu"


@pytest.mark.parametrize("how", ["break", "the loop raises", "staging raises"])
def test_batches_go_back_however_the_loop_is_left(how):
    loader = [kjt({"a": [[step]]}) for step in range(6)]

    def run():
        for step, _features in enumerate(shoal.prefetch(loader, Bags(error_at=4 if how == "staging raises" else None))):
            if step == 1 and how == "break":
                return
            if step == 1 and how == "the loop raises":
                raise ValueError("told to fail")

    if how == "break":
        run()
    else:
        with pytest.raises(ValueError, match="told to fail"):
            run()
    gc.collect()
    assert all(features.values().device.type == "cpu" for features in loader)


def test_collections_on_different_devices_want_a_batch_each():
    loader = [kjt({"a": [[step]]}) for step in range(2)]
    bags = [Bags(), Bags("cpu"), Bags()]
    with pytest.raises(
        InputError, match=r"for each device; got one for collections on cpu and meta\. .* returns a list"
    ):
        list(shoal.prefetch(loader, bags))
    both = [kjt({"a": [[7]]}), kjt({"a": [[7]]})]
    for _batch in shoal.prefetch([both], bags, features=lambda batch: [batch[0], batch[1], batch[0]]):
        assert [features.values().device.type for features in both] == ["meta", "cpu"]
    assert all(features.values().device.type == "cpu" for features in (*both, *loader))
