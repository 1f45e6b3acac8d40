"""Stochastic rounding of 16-bit rows: exact draws, no bias."""

import pytest
import torch

import shoal
from shoal.ops.birth import reference as birth
from shoal.ops.update import reference

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_draws_what_the_reference_draws(dtype):
    keys = torch.tensor([5, -1, 2**63 - 1])
    bags = shoal.EmbeddingBagCollection(
        [shoal.Table("t", 70, dtype=dtype, optimizer=shoal.SGD(lr=1.0), init=shoal.Normal(0, 1.0))], seed=4
    )
    kjt = shoal.KeyedJaggedTensor(keys=["t"], values=keys, lengths=torch.ones(3, dtype=torch.int64))
    rows = birth.first_rows(shoal.Normal(0, 1.0), 4, "t", keys, 70).to(DTYPES[dtype]).float()
    for step in range(3):
        grad = torch.randn(3, 70) * torch.logspace(-9, 1, 70)
        bags(kjt).values().backward(grad)
        words = birth.words(birth.rounding_stream(4, "t"), keys, 70, step)
        rows = reference.stochastic_round(rows - 1.0 * grad, words, DTYPES[dtype]).float()
        assert torch.equal(bags.table("t").lookup(keys), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0001, -3.3333, 1e-3, 2e-7, -6e-8])
def test_rounding_has_no_bias(dtype, value):
    words = birth.words(7, torch.arange(4000), 64)
    rounded = reference.stochastic_round(torch.full((4000, 64), value), words, DTYPES[dtype]).double()
    step = (rounded.max() - rounded.min()).item()
    assert abs(rounded.mean().item() - torch.tensor(value).double().item()) <= 4 * step / (4000 * 64) ** 0.5 + 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_rows_stay_finite(dtype):
    top = torch.finfo(DTYPES[dtype]).max
    words = birth.words(7, torch.arange(50), 4)
    values = torch.tensor([top, -top, top * 1.0009, torch.finfo(torch.float32).max]).expand(50, 4)
    assert torch.isfinite(reference.stochastic_round(values, words, DTYPES[dtype])).all()
