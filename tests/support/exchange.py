"""Logs to export and tables to import into, for tests of interop and of the commands."""

import torch

import shoal
from support.logged import made, train


def committed(path):
    """A collection, and a log of it with three versions, a snapshot behind the second, and deletes."""
    bags = made()
    with shoal.ChangeLog(path) as log:
        train(bags, range(3))
        log.commit(bags, step=1)
        train(bags, range(3, 5))
        for name in "abc":
            bags.table(name).erase(bags.table(name).keys()[:7])
        log.commit(bags, step=2, metadata={"day": "monday"})
        log.compact()
        train(bags, [8])
        bags.table("a").erase(bags.table("a").keys()[-5:])
        log.commit(bags, step=3, event_time=7.5)
    return bags


def assert_same_table(found, wanted):
    """Two tables have the same rows, state and scores, bit for bit."""
    keys = wanted.keys()
    assert torch.equal(found.keys(), keys)
    assert torch.equal(found.lookup(keys), wanted.lookup(keys))
    assert torch.equal(found.scores(keys), wanted.scores(keys))
    state = wanted.state(keys)
    assert list(found.state(keys)) == list(state)
    for name, values in state.items():
        assert torch.equal(found.state(keys)[name], values), name
