"""After fork: batches are built in DataLoader workers, tables stay with the process that made them."""

import functools
import os
import subprocess
import sys
import warnings

import pytest
import torch
from support.batches import kjt, train_step
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.errors import ForkError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def collection(threads_used=True):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 16)])
    keys = list(range(20_000 if threads_used else 10))  # enough for the pool's threads to have started
    train_step(bags, kjt({"a": [keys, keys]}))
    return bags


def in_child(work):
    """Run `work` in a forked child; what it returned, or the name of what it raised."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork while threads run
        child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = repr(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def without_gpu(test):
    """Where torch sees a GPU, run the test in a process where it sees none.

    From the first backward on autograd has a thread for every GPU, and refuses every backward of a forked child itself,
    before the tables are asked.
    """
    if not torch.cuda.is_available():
        return test

    @functools.wraps(test)
    def elsewhere():
        alone = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"]
        command = [sys.executable, "-m", "pytest", *alone, f"{__file__}::{test.__name__}"]
        done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout, done.stdout

    return elsewhere


BATCH = {"a": [[1, 2], [3]]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "use",
    [
        lambda bags: bags(kjt(BATCH)),
        lambda bags: bags.eval()(kjt(BATCH)),
        lambda bags: len(bags.table("a")),
        lambda bags: bags.table("a").lookup([1]),
        lambda bags: bags.table("a").assign([1], torch.zeros(1, 16)),
        lambda bags: bags.table("a").erase([1]),
        lambda bags: bags.table("a").stats(),
        lambda bags: bags.state_dict(),
    ],
    ids=["train", "eval", "len", "lookup", "assign", "erase", "stats", "state_dict"],
)
def test_a_forked_child_is_told_that_the_tables_are_not_its_own(use):
    bags = collection()
    said = in_child(lambda: use(bags))
    assert said.startswith("ForkError")
    assert "main process" in said
    assert str(os.getpid()) in said
    train_step(bags, kjt(BATCH))


@pytest.mark.timeout(600)
@without_gpu
def test_a_backward_that_waits_is_refused_in_the_child():
    bags = collection()
    out = bags(kjt(BATCH)).values()
    assert in_child(lambda: out.sum().backward()).startswith("ForkError")
    out.sum().backward()


@pytest.mark.timeout(600)
@without_gpu
def test_a_collection_made_in_the_child_works_there():
    bags = collection()
    torch.set_num_threads(torch.get_num_threads())

    def work():
        shoal.set_num_threads(2)
        mine = collection()
        return len(mine.table("a")), mine.table("a").stats().step

    assert in_child(work) == "(20000, 1)"
    train_step(bags, kjt(BATCH))
    assert bags.table("a").stats().step == 2


class Clicks(Dataset):
    """Batches as KeyedJaggedTensors; keeps a collection that workers must not use."""

    def __init__(self, bags):
        self.bags = bags

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return number

    def collate(self, numbers):
        return kjt({"a": [[number, number + 1] for number in numbers]}, weights=0.5)


@pytest.mark.timeout(600)
def test_data_loader_workers_build_batches():
    bags, other = collection(threads_used=False), collection(threads_used=False)
    data = Clicks(bags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(data, batch_size=2, num_workers=2, collate_fn=data.collate, multiprocessing_context="fork")
        for batch, start in zip(loader, range(0, 8, 2), strict=True):
            assert isinstance(batch, shoal.KeyedJaggedTensor)
            same = data.collate([start, start + 1])
            assert torch.equal(train_step(bags, batch), train_step(other, same))


class UsesTables(Clicks):
    def __getitem__(self, number):
        return self.bags.eval()(kjt({"a": [[number]]})).values()


@pytest.mark.timeout(600)
def test_a_worker_that_looks_up_is_told():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(UsesTables(collection()), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ForkError, match="main process"):
            next(iter(loader))


def test_graphs_that_wait_in_the_parent_are_not_in_the_way_of_a_child():
    parents = collection(threads_used=False)
    batch = kjt({"a": [[1, 2]]})
    with torch.autograd.profiler.profile():  # lookups go by the tables' name, as those of compiled programs do
        loss = parents(batch).values().sum()

    def work():
        made = shoal.EmbeddingBagCollection([shoal.Table("a", 16)])
        train_step(made, batch)
        return len(made.table("a"))

    assert in_child(work) == "2"
    loss.backward()
