"""A request is one value: an operator takes it apart and puts it together again, and nothing is lost."""

import pytest
import torch

from shoal.errors import DeviceError, InputError
from shoal.table import Batch, Each, Pooled, Request, Update, ops

CPU = torch.device("cpu")
VALUES, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3, 3, 3])
BATCH = Batch(["a", "b"], VALUES, OFFSETS, torch.ones(3), [3, 0])


@pytest.mark.parametrize(
    ("request_", "apart", "together"),
    [
        (Request(BATCH, Pooled(7), torch.float16, True, False), ops._of_pooled, ops._pooled),
        (Request(BATCH._replace(counts=None), Pooled(7), torch.float32, False, True), ops._of_pooled, ops._pooled),
        (Request(BATCH._replace(weights=None), Each(12), torch.float32, True, True), ops._of_each, ops._each),
    ],
)
def test_an_operators_arguments_are_the_request(request_, apart, together):
    again = together(*apart(request_, request_.output))
    assert type(again.output) is type(request_.output)
    assert again[1:] == request_[1:]
    assert all(one is two for one, two in zip(again.batch, request_.batch, strict=True))


def test_the_operators_schemas_have_the_requests_fields():
    schemas = {name: getattr(torch.ops.shoal, name).default._schema for name in ("lookup", "lookup_each", "update")}
    names = {name: [argument.name for argument in schema.arguments] for name, schema in schemas.items()}
    settings = {*Batch._fields, "training", "keep", "dtype", "group", "token"}
    assert set(names["lookup"]) == settings | set(Pooled._fields)
    assert set(names["lookup_each"]) == (settings - {"weights"}) | set(Each._fields)
    assert names["update"] == ["group", "token", *Update._fields]


def test_a_batch_for_kernels_is_contiguous_with_float32_weights():
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    batch = Batch(["a"], torch.arange(6)[::2], torch.arange(10)[::3], weights).for_kernels()
    assert batch.values.is_contiguous() and batch.offsets.is_contiguous()
    assert batch.values.tolist() == [0, 2, 4] and batch.offsets.tolist() == [0, 3, 6, 9]
    assert batch.weights.dtype == torch.float32 and not batch.weights.requires_grad
    assert BATCH.for_kernels().values is VALUES


def test_the_size_of_a_batch_is_the_bags_of_each_feature():
    assert BATCH.size == 2
    assert Batch([], VALUES, torch.tensor([0])).size == 0


def test_a_request_is_checked_with_its_batch():
    Request(BATCH, Pooled(7), torch.bfloat16, True, True).check("bags", CPU)
    with pytest.raises(InputError, match=r"\[bags\] outputs are float32, float16 or bfloat16; got torch.float64"):
        Request(BATCH, Pooled(7), torch.float64, True, True).check("bags", CPU)
    with pytest.raises(DeviceError, match=r"\[bags\] the tables are on meta; the batch's values are on cpu"):
        Request(BATCH, Pooled(7), torch.float32, True, True).check("bags", torch.device("meta"))
