"""Counts of updates on a device are those of host memory, to the bit, beyond what a float32 counts to."""

import pytest
import torch
from support.batches import kjt
from support.device_tables import Twins

import shoal
from shoal.optim import counts_of
from shoal.optim.counts import MOST

NUMBERS = [0, 7, 2**24 - 2, 2**24 - 1, 2**24, 2**24 + 1, 2**28, 2**29, MOST - 1, MOST]


@pytest.mark.parametrize("betas", [(0.9, 1 - 2**-24), (0.9999999, 0.99999)])
@pytest.mark.parametrize("kind", [shoal.Adam, shoal.PartialRowwiseAdam])
def test_counts_and_steps_are_those_of_host_memory(kind, betas):
    twins = Twins(shoal.Table("t", 3, optimizer=kind(lr=0.1, betas=betas), init=shoal.Normal(0, 1)))
    keys = torch.arange(len(NUMBERS))
    batch = kjt({"t": [[key] for key in keys.tolist()]})
    twins.host.table("t").assign(keys, twins.host.table("t").lookup(keys))
    state = twins.host.state_dict()
    state["embedding_bags.t.state.count"] = counts_of(torch.tensor(NUMBERS))[:, None]
    for name in ("exp_avg", "exp_avg_sq"):
        state[f"embedding_bags.t.state.{name}"] += 1.0
    for module in (twins.host, twins.device):
        module.load_state_dict(state)
    for more in (1, 2):
        twins.step(batch, seed=more)
        twins.check()
        for counts in twins.each(lambda module: module.state_dict()["embedding_bags.t.state.count"]):
            assert torch.equal(counts, counts_of(torch.tensor(NUMBERS) + more)[:, None])
        for numbers in twins.each(lambda module: module.table("t").state(keys.to(module.device))["count"]):
            assert numbers.flatten().tolist() == [min(number + more, MOST) for number in NUMBERS]
