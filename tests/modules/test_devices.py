"""Moving and casting a model that holds tables."""

import pytest
import torch
from support.batches import kjt, train_step
from torch import nn

import shoal
from shoal.errors import ConfigError, DeviceError


def collection():
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)], name=None)
    train_step(bags, kjt({"a": [[1, 2]]}))
    return bags


def assert_alive(bags, before):
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    train_step(bags, kjt({"a": [[1, 2]]}))


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda(), lambda m: m.to("meta")])
def test_other_devices_are_refused_and_the_tables_stay(move):
    bags = collection()
    before = bags.state_dict()
    for module in (bags, nn.Sequential(bags)):
        with pytest.raises(DeviceError, match="tables live on cpu"):
            move(module)
    assert_alive(bags, before)


def test_the_message_says_what_to_do():
    with pytest.raises(DeviceError, match=r"got cuda. .*keep it here.*\.to\('cuda'\)"):
        collection()._require_stay(torch.device("cuda"))  # what to("cuda") comes to where there is a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_install():
    with pytest.raises(DeviceError, match=r"wanted a GPU for cuda.* sees none. Install a CUDA build of torch"):
        shoal.EmbeddingBagCollection([shoal.Table("a", 4)], device="cuda")


def test_no_other_device_holds_tables():
    with pytest.raises(DeviceError, match="tables live on cpu or cuda; got xpu"):
        shoal.EmbeddingBagCollection([shoal.Table("a", 4)], device="xpu")


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.bfloat16()]
)
def test_other_types_are_refused_and_say_where_they_are_set(cast):
    bags = collection()
    before = bags.state_dict()
    for module in (bags, nn.Sequential(bags)):
        with pytest.raises(ConfigError, match=r"Table\(dtype=\.\.\.\).*output_dtype="):
            cast(module)
    assert_alive(bags, before)


def test_freezing_by_requires_grad_is_refused_and_says_how_to():
    with pytest.raises(ConfigError, match=r"Call eval\(\)"):
        collection().requires_grad_(False)


@pytest.mark.parametrize(
    "stay",
    [
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to(torch.float32),
        lambda m: m.to(torch.device("cpu"), torch.float32, non_blocking=True),
        lambda m: m.to(torch.ones(1)),
        lambda m: m.requires_grad_(True),
        lambda m: m.train().eval().train(),
        lambda m: m.apply(lambda part: None),
        lambda m: m.zero_grad(),
    ],
)
def test_what_changes_nothing_is_fine(stay):
    bags = collection()
    before = bags.state_dict()
    stay(nn.Sequential(bags))
    assert_alive(bags, before)
