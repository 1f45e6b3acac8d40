"""One table in device memory, as its handle shows it; and state dicts between device and host memory."""

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, Twins, assert_alike, assert_close, here, on_device, train
from support.inside import device_rows_of

import shoal
from shoal import Table
from shoal.errors import InputError

KEYS = [3, -5, 2**63 - 1, 400, 3, 7]


def trained(**settings):
    twins = Twins(
        Table("a", 5, init=shoal.Normal(0, 1), optimizer=shoal.Adagrad(lr=0.1), **settings),
        Table("b", 3, optimizer=shoal.Adam(lr=0.1)),
        Table("c", 5, optimizer=shoal.Adagrad(lr=0.1)),
    )
    for step in range(2):
        twins.step(random_kjt(["a", "b", "c"], keys=8, seed=step), seed=step)
    return twins


def test_it_answers_as_a_table_in_host_memory_does():
    twins = trained(missing="zero")
    for name in "abc":
        for ask in (
            lambda module, name=name: len(module.table(name)),
            lambda module, name=name: module.table(name).keys().tolist(),
            lambda module, name=name: module.table(name).contains(torch.tensor(KEYS, device=module.device)).tolist(),
            lambda module, name=name: module.table(name).contains(KEYS).tolist(),
            lambda module, name=name: repr(module.table(name)),
        ):
            host, device = twins.each(ask)
            assert host == device
        host, device = twins.each(lambda module, name=name: module.table(name).lookup(KEYS))
        assert_close(device, host)
        host, device = twins.each(lambda module, name=name: module.table(name).state(KEYS))
        assert list(host) == list(device)
        for column, value in host.items():
            assert_close(device[column], value, column)
        host, device = twins.each(lambda module, name=name: module.table(name).scores(KEYS))
        assert host.dtype == device.dtype
        torch.testing.assert_close(host, device, rtol=0, atol=0, equal_nan=True)


def test_an_empty_table_answers_too():
    twins = Twins(Table("a", 5, optimizer=shoal.Adam()), Table("b", 3, dtype="bfloat16"))
    twins.check(exact=True)
    for name in "ab":
        table = twins.device.table(name)
        assert (len(table), table.keys().tolist(), table.contains([1, 2]).tolist()) == (0, [], [False, False])
        assert table.erase([1]) == 0
        assert table.scores([1]).isnan().all()
        assert table.lookup([]).shape == (0, 5 if name == "a" else 3)
        assert torch.equal(*twins.each(lambda module, name=name: module.table(name).lookup([1, -1])))
        assert table.contains(here(dtype=torch.int32)).tolist() == []


def test_assign_takes_the_last_of_duplicates_and_keeps_the_state():
    twins = trained()
    keys, rows = [3, 100, 3, 101, 100, -7, 3], torch.randn(7, 5)
    for module in (twins.host, twins.device):
        module.table("a").assign(keys, rows.to(module.device))
    assert torch.equal(twins.device.table("a").lookup([3, 100]).cpu(), rows[[6, 4]])
    twins.check()
    twins.step(random_kjt(["a", "b", "c"], keys=8, seed=9))
    twins.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_assign_rounds_as_host_memory_does(dtype):
    twins = Twins(Table("a", 5, dtype=dtype, optimizer=None))
    rows = torch.randn(4, 5)
    for module in (twins.host, twins.device):
        module.table("a").assign([1, 2, 3, 4], rows.to(module.device))
    twins.check(exact=True)


def test_what_is_no_row_is_refused_and_nothing_changes():
    twins = trained()
    before = twins.device.state_dict()
    for keys, rows in (([1], torch.full((1, 5), torch.nan)), ([1], torch.ones(1, 4)), ([1.5], torch.ones(1, 5))):
        with pytest.raises(InputError):
            twins.device.table("a").assign(keys, rows.to(DEVICE))
    assert all(torch.equal(value, before[name]) for name, value in twins.device.state_dict().items())


def test_erase_counts_forgets_and_makes_room():
    twins = trained()
    for module in (twins.host, twins.device):
        module.table("a").assign(range(50), torch.ones(50, 5, device=module.device))
        assert module.table("a").erase([3, 3, 4, 1000, -1, *range(20, 40)]) == 22
        assert len(module.table("a")) == 28
    twins.check()
    twins.step(kjt({"a": [[3, 4, 21], [1000]], "b": [[1], []], "c": [[], [2]]}))
    twins.check()
    assert twins.device.table("a").stats().counters["erased"] == 22


def test_stats_tell_rows_bytes_and_counts():
    bags = on_device(Table("a", 4, tiers=[shoal.Hbm("1MiB")]), Table("b", 3))
    empty = bags.table("a").stats()
    assert (empty.rows, empty.storage_bytes, empty.step) == (0, 0, 0)
    train(bags, kjt({"a": [[1, 2], [2]], "b": [[], []]}))
    stats = bags.table("a").stats()
    assert (stats.rows, stats.step, stats.budget_bytes) == (2, 1, 2**20)
    assert stats.storage_bytes >= 2 * Table("a", 4).row_bytes
    assert stats.bytes == stats.index_bytes + stats.storage_bytes
    assert stats.counters["births"] == 2
    assert stats.counters["steps"] == 1
    assert bags.table("b").stats().budget_bytes is None


# ---- state dicts


def alone(twins, device):
    """A fresh collection like one of the twins."""
    tables = twins.host._configs
    return on_device(*tables) if device else shoal.EmbeddingBagCollection(tables, seed=7)


@pytest.mark.parametrize("to_device", [True, False], ids=["host to device", "device to host"])
def test_a_state_dict_goes_from_memory_to_memory(to_device):
    twins = trained(dtype="bfloat16")
    source, other = (twins.host, alone(twins, True)) if to_device else (twins.device, alone(twins, False))
    train(other, random_kjt(["a", "b", "c"], keys=90, seed=5))  # rows that a load takes away
    state = source.state_dict()
    other.load_state_dict(state if to_device else {name: value.cpu() for name, value in state.items()})
    for name, value in other.state_dict().items():
        assert torch.equal(value.cpu(), state[name].cpu()), name
    batch = random_kjt(["a", "b", "c"], keys=16, seed=7)
    train(source, batch), train(other, batch)
    ours, host = (other, source) if to_device else (source, other)
    assert_alike(ours, host)


def test_a_state_dict_of_the_device_is_loaded_as_it_comes():
    twins = trained()
    other = alone(twins, True)
    other.load_state_dict(twins.device.state_dict())
    wanted = twins.device.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def test_an_empty_state_dict_empties_the_tables():
    twins = trained()
    twins.device.load_state_dict(alone(twins, False).state_dict())
    assert [len(twins.device.table(name)) for name in "abc"] == [0, 0, 0]
    assert twins.device.table("a").stats().step == 0
    train(twins.device, random_kjt(["a", "b", "c"]))
    twins.device.check()


def test_slots_of_erased_rows_come_back_when_tables_are_loaded():
    bags = on_device(Table("a", 4))
    state = bags.state_dict()
    held = device_rows_of(bags).storage.families[0]
    for _ in range(3):
        out = bags(kjt({"a": [list(range(40))]}).to(DEVICE))
        bags.table("a").erase(here(*range(40)))
        bags.load_state_dict(state)
        del out
        free = len(held.free) - int(device_rows_of(bags).ledger.taken[0])
        assert free == held.slots
