"""A model with tables inside DistributedDataParallel: dense gradients are synchronised, tables are each rank's own."""

import gc
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from support.batches import random_kjt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.errors import RanksWarning

RANKS = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4), shoal.Table("b", 3)])
        self.sequences = shoal.EmbeddingCollection([shoal.Table("a", 2, pooling="none")])
        self.dense = nn.Linear(7, 1)
        self.unused = nn.Linear(1, 1)

    def forward(self, batch):
        only = shoal.KeyedJaggedTensor.from_jt_dict({"a": batch["a"]})
        return self.dense(self.bags(batch).values()).sum() + self.sequences(only)["a"].values().sum()


def warnings_of(bags):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            bags(random_kjt(["a"]))
    return [warning.filename for warning in told if warning.category is RanksWarning]


def run(rank, init_file):
    early = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    assert warnings_of(early) == []
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    assert warnings_of(early) == [__file__]
    assert warnings_of(shoal.EmbeddingBagCollection([shoal.Table("a", 4, optimizer=None)])) == []
    assert warnings_of(shoal.EmbeddingBagCollection([shoal.Table("a", 4)]).eval()) == []
    state_dicts_are_warned_of_once(early)
    train(rank, find_unused=False)
    train(rank, find_unused=True)
    dist.barrier()  # gloo aborts a rank whose peer leaves early
    # DistributedDataParallel is in cycles and keeps the group's threads, which must not outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()


def state_dicts_are_warned_of_once(bags):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            nn.ModuleDict({"bags": bags}).state_dict()
    (only,) = told
    assert only.category is RanksWarning
    assert "torch.distributed.checkpoint" in str(only.message)


def train(rank, find_unused):
    model = Model()
    if not find_unused:
        del model.unused
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            parallel(random_kjt(["a", "b"], seed=10 * rank + step)).backward()
            optimizer.step()
    told = [str(warning.message) for warning in told if warning.category is RanksWarning]
    assert [text.split()[0] for text in told] == [f"[{bags.name}]" for bags in (model.bags, model.sequences)]
    assert all("one of 2 ranks" in text for text in told)
    weights = [torch.empty_like(model.dense.weight) for _ in range(RANKS)]
    dist.all_gather(weights, model.dense.weight.detach())
    assert torch.equal(*weights)
    assert model.bags.table("a").stats().step == 3
    assert model.sequences.table("a").stats().step == 3
    # The rows are those of this rank's own batches.
    keys = torch.cat([random_kjt(["a", "b"], seed=10 * rank + step)["a"].values() for step in range(3)]).unique()
    assert torch.equal(model.bags.table("a").keys(), keys)
    assert {"module.bags.embedding_bags.a.weight", "module.dense.weight"} <= set(parallel.state_dict())


def test_the_dense_part_is_synchronised_and_each_rank_has_its_tables(tmp_path):
    multiprocessing.spawn(run, (tmp_path / "init",), nprocs=RANKS)
