"""Where torch has the same optimizer, rows that get a gradient in every step move as its parameters do."""

from functools import partial

import pytest
import torch
from support.batches import kjt
from torch import optim

import shoal

PAIRS = {
    "sgd": (shoal.SGD(lr=0.3), partial(optim.SGD, lr=0.3)),
    "sgd-l2": (shoal.SGD(lr=0.3, weight_decay=0.1), partial(optim.SGD, lr=0.3, weight_decay=0.1)),
    "momentum": (shoal.SGD(lr=0.3, momentum=0.9), partial(optim.SGD, lr=0.3, momentum=0.9)),
    "nesterov": (
        shoal.SGD(lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (
        shoal.Adagrad(lr=0.3, initial=0.1, eps=1e-6, weight_decay=0.1),
        partial(optim.Adagrad, lr=0.3, initial_accumulator_value=0.1, eps=1e-6, weight_decay=0.1),
    ),
    "adam": (shoal.Adam(lr=0.1, weight_decay=0.05), partial(optim.Adam, lr=0.1, weight_decay=0.05)),
    "adam-global": (
        shoal.Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3, bias_correction="global"),
        partial(optim.Adam, lr=0.1, betas=(0.8, 0.9), eps=1e-3),
    ),
    "adamw": (shoal.AdamW(lr=0.1, weight_decay=0.1), partial(optim.AdamW, lr=0.1, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_rows_move_as_torchs_parameters_do(name):
    ours, theirs = PAIRS[name]
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 19, optimizer=ours, init=shoal.Normal(0.0, 1.0))])
    keys = torch.tensor([3, -1, 2**63 - 1, 0])
    batch = kjt({"t": [[key] for key in keys.tolist()]})
    parameter = torch.nn.Parameter(bags.table("t").lookup(keys))
    optimizer = theirs([parameter])
    for _ in range(6):
        parameter.grad = torch.randn(4, 19)
        bags(batch).values().backward(parameter.grad)
        optimizer.step()
        torch.testing.assert_close(bags.table("t").lookup(keys), parameter.detach(), rtol=1e-5, atol=1e-6)
