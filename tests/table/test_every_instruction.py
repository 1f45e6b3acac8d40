"""Calls that are interrupted at every instruction: they have happened or have not, and training goes on as it would."""

from functools import partial

import pytest
import torch
from support.batches import random_kjt
from support.interrupted_calls import FEATURES, SOME, TABLES, Case, batch_of, gradients, made, sweep, train
from support.tiered import outputs

import shoal

# ---- backward

CLIPPED = [
    {
        "name": "a",
        "dim": 3,
        "features": ["x", "y"],
        "optimizer": shoal.Adagrad(lr=0.1, max_norm=1.0, clip=shoal.Clip(norm=0.5, value=0.3)),
    },
    {
        "name": "b",
        "dim": 4,
        "features": ["z"],
        "optimizer": shoal.AdamW(lr=0.01, weight_decay=0.1, bias_correction="global"),
    },
]
SEQUENCES = [
    {"name": "a", "dim": 3, "features": ["x", "y"], "optimizer": shoal.SGD(lr=0.1, momentum=0.9), "pooling": "none"},
    {"name": "b", "dim": 8, "features": ["z"], "optimizer": shoal.Ftrl(lr=0.1), "pooling": "none"},
]


def backward(bags, batch=None, seed=9, factor=1.0, keep=True):
    tensors = outputs(bags(random_kjt(FEATURES, seed=seed) if batch is None else batch))
    grads = [grad * factor for grad in gradients(tensors, seed)]

    def call():
        torch.autograd.backward(tensors, grads, retain_graph=keep)

    return Case(bags, call, kept=tensors, happens_once=True)


def weighted(folder):
    batch = random_kjt(FEATURES, seed=9, weighted=True)
    batch.weights().requires_grad_()
    return backward(made(TABLES, folder), batch)


def scaled(folder, factor=1.0):
    bags = made(TABLES, folder)
    bags.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bags.scaler.scale(torch.ones(1))
    return backward(bags, factor=factor)


def skipping(folder):
    skip = shoal.Clip(nonfinite="skip")
    tables = [{**one, "optimizer": shoal.SGD(lr=0.1, clip=skip)} for one in TABLES]
    return backward(made(tables, folder), factor=float("nan"))


def erasing(folder):
    """Some rows are erased between forward and backward, and their slots wait for it."""
    case = backward(made(TABLES, folder))
    case.bags.table("a").erase(torch.arange(6))
    return case


def dropping(folder):
    """Another forward was dropped: the call raises its scores first."""
    bags = made(TABLES, folder)
    case = backward(bags)
    bags(random_kjt(FEATURES, seed=4))
    return case


def large(folder, tiers, weighted=False, erases=False):
    """Memory cannot hold the batch's rows: they are updated in pieces."""
    batch = random_kjt(FEATURES, 80, 1200, seed=9, weighted=weighted)
    bags = made(TABLES, folder, tiers)
    promotions = [table.tiers[0].promotions for table in bags.stats().values()]
    case = backward(bags, batch, keep=not erases)
    if erases:
        bags.table("a").erase(torch.arange(0, 1200, 3))
    assert promotions == [table.tiers[0].promotions for table in bags.stats().values()]
    return case


BACKWARDS = {
    "plain": lambda folder: backward(made(TABLES, folder)),
    "graph is not kept": lambda folder: backward(made(TABLES, folder), keep=False),
    "clip": lambda folder: backward(made(CLIPPED, folder)),
    "weighted": weighted,
    "sequences": lambda folder: backward(made(SEQUENCES, folder, kind=shoal.EmbeddingCollection)),
    "scaler": scaled,
    "overflow": lambda folder: scaled(folder, factor=float("inf")),
    "skip": skipping,
    "erased": erasing,
    "dropped": dropping,
    "memory below": lambda folder: backward(made(TABLES, folder, "memory"), batch_of(9, "memory")),
    "ssd below": lambda folder: backward(made(TABLES, folder, "ssd"), batch_of(9, "ssd")),
    "large, memory below": lambda folder: large(folder, "memory"),
    "large, ssd below": lambda folder: large(folder, "ssd", weighted=True),
    "large, erased": lambda folder: large(folder, "memory", erases=True),
}


@SOME
@pytest.mark.parametrize("which", BACKWARDS)
def test_a_backward_happens_once_or_not_at_all(which, most, tmp_path):
    sweep(BACKWARDS[which], tmp_path, most)


# ---- rows by key


def assigning(folder, tiers=None):
    bags = made(TABLES, folder, tiers)
    keys = torch.tensor([3, 1, -1, 2**63 - 1, 3, *range(15, 60 if tiers is None else 200)])
    rows = torch.arange(3.0 * len(keys)).view(-1, 3)
    return Case(bags, partial(bags.table("a").assign, keys, rows))


def erases(folder, tiers=None, waits=False):
    bags = made(TABLES, folder, tiers)
    kept = outputs(bags(batch_of(1, tiers))) if waits else []
    return Case(bags, partial(bags.table("a").erase, torch.tensor([3, 1, 3, 77, *range(8, 15)])), kept=kept)


def replacing(folder, tiers=None):
    other = made(TABLES, folder / "other")
    train(other, random_kjt(FEATURES, seed=8), 8)
    bags = made(TABLES, folder, tiers)
    state = other.state_dict()
    return Case(bags, partial(bags.load_state_dict, state))


BY_KEY = {
    "assign": assigning,
    "assign, memory below": partial(assigning, tiers="memory"),
    "assign, ssd below": partial(assigning, tiers="ssd"),
    "erase": erases,
    "erase with a lease": partial(erases, waits=True),
    "erase, memory below": partial(erases, tiers="memory"),
    "erase, ssd below": partial(erases, tiers="ssd"),
    "erase with a lease, ssd below": partial(erases, tiers="ssd", waits=True),
    "load_state_dict": replacing,
}


@SOME
@pytest.mark.parametrize("which", BY_KEY)
def test_rows_that_are_written_or_erased_are_all_or_none(which, most, tmp_path):
    sweep(BY_KEY[which], tmp_path, most)
