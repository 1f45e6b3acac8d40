"""What goes wrong on the device: it is counted there, other rows are right, and a later call or `check` raises."""

from itertools import pairwise

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, Twins, here, in_hbm, on_device, placed, train
from support.inside import device_rows_of, group_of

import shoal
from shoal import Clip, Table
from shoal.errors import CapacityError, InputError, NonFiniteError, OutOfMemoryError
from shoal.index.device import DeviceIndex
from shoal.storage.hbm import HbmStorage
from shoal.table import Batch, Each, Pooled, Request, Update

# What numpy says where Triton interprets: infinities less infinities, and squares of what is large.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def sgd(**settings):
    return Table("a", 4, optimizer=shoal.SGD(lr=1.0, **settings))


# ---- room


def limited(size):
    return on_device(in_hbm(sgd(), size), Table("b", 4, optimizer=shoal.SGD(lr=1.0)))


@pytest.mark.slow
def test_keys_beyond_the_budget_have_no_row_and_the_others_are_right():
    bags, host = limited("4KiB"), shoal.EmbeddingBagCollection([sgd(), Table("b", 4)], seed=7)
    keys = list(range(120))
    out = bags(kjt({"a": [[key] for key in keys], "b": [[key] for key in keys]}).to(DEVICE))
    first = host.table("a").lookup(keys)
    assert torch.equal(out["a"].detach().cpu(), first)  # also of those without a row: as they would be born
    out.values().sum().backward()
    with pytest.raises(CapacityError, match="of 'a'"):
        bags.check()
    bags.check()  # it is said once
    kept = bags.table("a").contains(keys).cpu()
    assert 0 < int(kept.sum()) == len(bags.table("a")) < 120
    assert bags.table("a").stats().bytes <= 4 * 1024
    wanted = torch.where(kept[:, None], first - 1, first)
    assert torch.equal(bags.table("a").lookup(keys).cpu(), wanted)
    assert len(bags.table("b")) == 120


def test_the_next_forward_hears_that_there_was_no_room():
    bags = limited("4KiB")
    batch = kjt({"a": [list(range(120))], "b": [[1]]}).to(DEVICE)
    bags(batch).values().sum().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(CapacityError, match="Raise Hbm"):
        bags(batch)


def test_a_full_table_has_room_again_after_an_erase():
    bags = limited("4KiB")
    bags(kjt({"a": [list(range(120))], "b": [[1]]}).to(DEVICE)).values().sum().backward()
    with pytest.raises(CapacityError):
        bags.check()
    kept = bags.table("a").keys()
    bags.table("a").erase(kept[:10])
    bags(kjt({"a": [list(range(1000, 1010))], "b": [[1]]}).to(DEVICE)).values().sum().backward()
    bags.check()
    assert bags.table("a").contains(list(range(1000, 1010))).all()
    assert len(bags.table("a")) == len(kept)


def test_assign_and_load_are_refused_where_there_is_no_room():
    bags, host = limited("4KiB"), shoal.EmbeddingBagCollection([sgd(), Table("b", 4, optimizer=shoal.SGD())], seed=7)
    bags.table("a").assign([1, 2], torch.ones(2, 4, device=DEVICE))
    before = bags.state_dict()
    with pytest.raises(CapacityError, match="'a'"):
        bags.table("a").assign(range(1000), torch.ones(1000, 4, device=DEVICE))
    host.table("a").assign(range(1000), torch.ones(1000, 4))
    host.table("b").assign([5], torch.ones(1, 4))
    with pytest.raises(CapacityError, match="'a'"):
        bags.load_state_dict(host.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


@pytest.mark.parametrize("size", ["4KiB", "8KiB", "40KiB"])
def test_a_full_table_keeps_to_its_budget_and_can_be_loaded_again(size):
    def made():
        return on_device(in_hbm(sgd(), size))

    bags = made()
    with pytest.raises(CapacityError):
        for first in range(0, 10_000, 90):
            train(bags, kjt({"a": [list(range(first, first + 90))]}))
            bags.check()
    rows = device_rows_of(bags)
    budget = shoal.Hbm(size).bytes
    assert rows.storage.bytes + rows.index.bytes(0) <= budget
    assert len(bags.table("a")) * 32 >= budget // 2 - 1024  # rows take 32 bytes, their index about 20
    state = bags.state_dict()
    for again in (bags, made()):
        again.load_state_dict(state)
        assert torch.equal(again.table("a").keys(), bags.table("a").keys())
        assert device_rows_of(again).storage.bytes + device_rows_of(again).index.bytes(0) <= budget
    train(bags, kjt({"a": [bags.table("a").keys()[:5].tolist() * 50]}))  # no new key
    bags.check()


def test_memory_grows_with_the_rows():
    bags = on_device(Table("a", 128, optimizer=shoal.Adam()))
    train(bags, kjt({"a": [[1, 2, 3]]}))
    assert device_rows_of(bags).storage.bytes < 2**21


def test_a_budget_below_one_row_is_refused():
    bags = on_device(in_hbm(sgd(), 16))
    with pytest.raises(CapacityError):
        train(bags, kjt({"a": [[1]]}))
        bags.check()


# ---- bags


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    "offsets", [[0, 3, 2, 4], [0, 2, 9, 4], [0, 2, -1, 4]], ids=["decreasing", "beyond the values", "negative"]
)
def test_bags_whose_offsets_make_no_sense_read_as_empty(offsets, training):
    bags = on_device(sgd()).train(training)
    values, starts = torch.tensor([1, 2, 3, 4], device=DEVICE), torch.tensor(offsets, device=DEVICE)
    out, _lease = group_of(bags).lookup(
        Request(Batch(["a"], values, starts), Pooled(4), torch.float32, training, False)
    )
    wanted = torch.zeros(3, 4)
    for bag, (begin, end) in enumerate(pairwise(offsets)):
        if 0 <= begin <= end <= 4:
            wanted[bag] = bags.table("a").lookup(values[begin:end]).sum(0).cpu()
    torch.testing.assert_close(out.cpu(), wanted)
    with pytest.raises(InputError, match="must not decrease"):
        bags.check()
    bags.check()


# ---- per-sample weights


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weights_that_are_not_finite_read_as_0_and_are_an_error(pooling, training):
    tables = [Table("a", 4, pooling=pooling, optimizer=shoal.SGD(lr=1.0)), Table("b", 3)]
    bags, other = on_device(*tables).train(training), on_device(*tables).train(training)
    given = [1.0, float("nan"), 2.0, float("inf"), -float("inf"), 0.5]
    batch = {"a": [[1, 2], [3]], "b": [[4, 5], [6]]}

    def looked_up(bags, weights):
        made = kjt(batch, weights=1.0)
        made = shoal.KeyedJaggedTensor(made.keys(), made.values(), torch.tensor(weights), lengths=made.lengths())
        out = bags(made.to(DEVICE)).values()
        if training:
            out.sum().backward()
        return out.detach().cpu()

    wanted = looked_up(other, [one if abs(one) < float("inf") else 0.0 for one in given])
    got = looked_up(bags, given)
    assert torch.equal(got, wanted)
    with pytest.raises(InputError, match="weights must be finite; 3 of an earlier batch"):
        bags.check()
    bags.check()
    for name, keys in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        assert torch.equal(bags.table(name).lookup(keys).cpu(), other.table(name).lookup(keys).cpu())


def test_weights_of_ignored_features_may_be_anything():
    bags = on_device(sgd())
    weights = torch.tensor([float("nan"), 1.0])
    batch = shoal.KeyedJaggedTensor(["x", "a"], torch.tensor([9, 1]), weights, lengths=torch.tensor([1, 1]))
    bags(batch.to(DEVICE)).values().sum().backward()
    with shoal.debug():
        bags(batch.to(DEVICE))
    bags.check()


def test_debug_refuses_weights_that_are_not_finite():
    bags = on_device(sgd())
    batch = shoal.KeyedJaggedTensor(
        ["a"], here(9, 1), torch.tensor([1.0, float("nan")], device=DEVICE), lengths=here(2)
    )
    with shoal.debug(), pytest.raises(InputError, match="got nan for value 1"):
        bags(batch)
    assert len(bags.table("a")) == 0


# ---- gradients


def nonfinite_step(bags, value, batch):
    out = bags(batch).values()
    gradient = torch.ones_like(out)
    gradient[1, 2] = value
    out.backward(gradient)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize(
    "optimizer",
    [shoal.SGD(lr=1.0), shoal.Adam(lr=0.1), shoal.RowwiseAdagrad(lr=0.1, max_norm=100.0)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_rows_whose_gradient_is_not_finite_are_left_as_they_were(value, optimizer):
    bags = on_device(Table("a", 4, optimizer=optimizer))
    batch = kjt({"a": [[1, 2], [3, 4], [5]]}).to(DEVICE)
    train(bags, batch)
    keys = [1, 2, 3, 4, 5]
    rows, state = bags.table("a").lookup(keys), bags.table("a").state(keys)
    nonfinite_step(bags, value, batch)
    with pytest.raises(NonFiniteError, match="2 of 'a'"):
        bags.check()
    bags.check()
    after = bags.table("a").lookup(keys)
    assert torch.equal(after[2:4], rows[2:4])
    assert not (after[[0, 1, 4]] == rows[[0, 1, 4]]).any()
    for name, column in bags.table("a").state(keys).items():
        assert torch.equal(column[2:4], state[name][2:4])
        assert torch.isfinite(column).all()
    assert bags.table("a").stats().counters["skipped_rows"] == 2


def test_a_key_whose_sum_over_many_chunks_is_not_finite_is_left_as_it_was():
    bags = on_device(sgd())
    batch = kjt({"a": [[7] * 150 + [8], [7, 9]]}).to(DEVICE)
    first = bags.table("a").lookup([7, 8, 9])
    nonfinite_step(bags, float("nan"), batch)
    with pytest.raises(NonFiniteError, match="2 of 'a'"):
        bags.check()
    assert torch.equal(bags.table("a").lookup([7, 9]), first[[0, 2]])
    assert torch.equal(bags.table("a").lookup([8]), first[[1]] - 1)


@pytest.mark.parametrize("clip", [Clip(value=1.0), Clip(norm=1.0)], ids=["value", "norm"])
def test_a_limit_makes_no_number_of_what_is_none(clip):
    bags = on_device(sgd(clip=clip))
    first = bags.table("a").lookup([3])
    nonfinite_step(bags, float("nan"), kjt({"a": [[1], [3]]}).to(DEVICE))
    with pytest.raises(NonFiniteError, match="1 of 'a'"):
        bags.check()
    assert torch.equal(bags.table("a").lookup([3]), first)


@pytest.mark.parametrize("huge", [1e20, 3e38])
def test_huge_gradients_are_clipped_before_they_are_squared(huge):
    twins = Twins(
        Table("a", 4, optimizer=shoal.Adagrad(lr=0.1, clip=Clip(value=1.0))),
        Table("b", 4, optimizer=shoal.SGD(lr=0.1, clip=Clip(norm=1.0))),
    )
    for module in (twins.host, twins.device):
        out = module(placed(kjt({"a": [[1], [2]], "b": [[1], [2]]}), module.device)).values()
        out.backward(torch.full_like(out, huge))
    twins.check()


def test_skip_counts_rows_and_raises_nothing():
    bags = on_device(sgd(clip=Clip(nonfinite="skip")), Table("b", 4, optimizer=shoal.SGD(lr=1.0)))
    batch = kjt({"a": [[1], [2]], "b": [[1], [2]]}).to(DEVICE)
    first = bags.table("a").lookup([1, 2])
    nonfinite_step(bags, float("nan"), batch)
    bags.check()
    assert torch.equal(bags.table("a").lookup([1, 2]), first - torch.tensor([[1.0], [0.0]], device=DEVICE))
    assert bags.table("a").stats().counters["skipped_rows"] == 1
    assert bags.table("b").stats().step == 1


# ---- when it is heard


def test_with_debug_the_call_itself_raises():
    bags = limited("4KiB")
    batch = kjt({"a": [list(range(120))], "b": [[1]]}).to(DEVICE)
    with shoal.debug():
        with pytest.raises(CapacityError):
            bags(batch)
        one, two = bags.table("a").keys()[:2].tolist()  # any of them may have been refused
        small = kjt({"a": [[one], [two]], "b": [[1], [1]]}).to(DEVICE)
        out = bags(small).values()
        with pytest.raises(NonFiniteError):
            out.backward(torch.full_like(out, torch.nan))
    bags.check()


def test_nothing_is_raised_where_nothing_went_wrong():
    bags = on_device(sgd())
    bags.check()
    with shoal.debug():
        train(bags, random_kjt(["a"]))
    bags.check()


def test_items_of_bad_bags_bring_no_gradient_to_their_rows(monkeypatch):
    bags = on_device(sgd())
    group, real = group_of(bags), torch.empty

    def dirty(*shape, **settings):
        made = real(*shape, **settings)
        return made.fill_(1 << 38) if made.dtype == torch.int64 else made

    monkeypatch.setattr(torch, "empty", dirty)
    values, offsets = here(1, 2, 3, 4), here(0, 2, 9, 4)  # 3 and 4 are in no bag that makes sense
    before = bags.table("a").lookup([3, 4])
    columns = before.shape[1]
    _, lease = group.lookup(Request(Batch(["a"], values, offsets), Pooled(columns), torch.float32, True, True))
    group.update(Update(lease, values, offsets, None, [torch.ones(3, columns, device=DEVICE)], False))
    with pytest.raises(InputError, match="2 bags"):
        bags.check()
    assert torch.equal(bags.table("a").lookup([3, 4]), before)


@pytest.mark.parametrize("offsets", [(1, 3, 5), (0, 2, 4), (2, 2, 2)])
def test_offsets_that_leave_values_out_are_an_error(offsets):
    bags = on_device(sgd())
    group_of(bags).lookup(
        Request(Batch(["a"], here(1, 2, 3, 4, 5), here(*offsets)), Pooled(4), torch.float32, False, False)
    )
    with pytest.raises(InputError, match="offsets"):
        bags.check()


def test_items_in_no_bag_are_their_own_tables():
    decaying = Table("a", 4, init=shoal.Constant(1.0), optimizer=shoal.AdamW(lr=0.5, weight_decay=1.0))
    plain = Table("b", 4, init=shoal.Constant(1.0), optimizer=shoal.AdamW(lr=0.5, weight_decay=0.0))
    bags = on_device(decaying, plain)
    values, offsets = here(1, 2, 9, 9), here(0, 1, 2, 9, 4)
    _, lease = group_of(bags).lookup(Request(Batch(["a", "b"], values, offsets), Pooled(8), torch.float32, True, True))
    group_of(bags).update(Update(lease, values, offsets, None, [torch.zeros(2, 8, device=DEVICE)], False))
    with pytest.raises(InputError):
        bags.check()
    assert bags.table("b").lookup(here(9)).tolist() == [[1.0] * 4]


def test_a_batch_of_2_to_the_30_values_is_refused():
    bags = on_device(sgd())
    values = here(1).expand(2**30)
    with pytest.raises(InputError, match="less than 2\\^30 values"):
        group_of(bags).lookup(Request(Batch(["a"], values, here(0, 2**30)), Pooled(4), torch.float32, False, False))


# ---- batches that contradict themselves


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("offsets", [(0, -(10**8), 4), (0, 9, 4), (0, 1, 4), (2, 2, 4)])
def test_sequences_stay_within_their_output_whatever_the_offsets_say(offsets, training):
    tables = [Table("a", 4, pooling="none"), Table("b", 16, pooling="none")]
    bags = on_device(*tables, kind=shoal.EmbeddingCollection)
    group, values = group_of(bags), here(1, 2, 3, 4)
    # The host was told two keys each, as offsets of (0, 2, 4) would say.
    batch = Batch(["a", "b"], values, here(*offsets), counts=[2, 2])
    _, lease = group.lookup(Request(batch, Each(40), torch.float32, training, training))
    if training:
        group.update(Update(lease, values, here(*offsets), None, [torch.zeros(40, device=DEVICE)], False))
    with pytest.raises(InputError, match="offsets"):
        bags.check()


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [0, 2, 9, 4], [0, 2, -1, 4]])
def test_offsets_of_sequences_that_make_no_sense_are_an_error(offsets):
    bags = on_device(Table("a", 4, pooling="none"), kind=shoal.EmbeddingCollection)
    bags(shoal.KeyedJaggedTensor(["a"], here(1, 2, 3, 4), offsets=here(*offsets)))
    with pytest.raises(InputError, match="did not keep to it"):
        bags.check()


def test_keys_of_a_table_that_was_to_have_none_are_refused():
    bags = on_device(Table("a", 4), Table("b", 4))
    group_of(bags).lookup(
        Request(
            Batch(["a", "b"], here(*range(10)), here(0, 0, 10), counts=[10, 0]), Pooled(8), torch.float32, True, False
        )
    )
    with pytest.raises(CapacityError, match="10 of 'b'"):
        bags.check()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_items_in_no_bag_bring_no_gradient(pooling):
    bags = on_device(Table("a", 4, pooling=pooling, optimizer=shoal.SGD(lr=1.0)))
    group, values, offsets = group_of(bags), here(1, 2, 1, 1), here(0, 2)
    before = bags.table("a").lookup([1, 2])
    torch.use_deterministic_algorithms(True)  # what is not written is NaN then
    try:
        _, lease = group.lookup(Request(Batch(["a"], values, offsets), Pooled(4), torch.float32, True, True))
        group.update(Update(lease, values, offsets, None, [torch.ones(1, 4, device=DEVICE)], False))
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = 1.0 if pooling == "sum" else 0.5
    assert torch.allclose(bags.table("a").lookup([1, 2]), before - wanted)


def test_two_kinds_of_errors_are_both_raised():
    bags = on_device(in_hbm(sgd(), "4KiB"))
    group_of(bags).lookup(Request(Batch(["a"], here(*range(120)), here(0, 119)), Pooled(4), torch.float32, True, False))
    with pytest.raises(InputError, match="offsets"):
        bags.check()
    with pytest.raises(CapacityError, match="no room"):
        bags.check()
    bags.check()


# ---- room, once more


def test_slots_that_a_lease_holds_count_against_the_budget():
    bags = on_device(in_hbm(sgd(), "8KiB"))
    rows = device_rows_of(bags)
    many = rows._within[0]
    keys = torch.arange(many, device=DEVICE)
    bags.table("a").assign(keys, torch.zeros(many, 4, device=DEVICE))
    used = rows.storage.bytes + rows.index.bytes(0)
    out = bags(kjt({"a": [[0]]}).to(DEVICE)).values()
    assert bags.table("a").erase(keys) == many
    with pytest.raises(CapacityError):
        bags.table("a").assign(keys + many, torch.zeros(many, 4, device=DEVICE))
    assert rows.storage.bytes + rows.index.bytes(0) == used <= shoal.Hbm("8KiB").bytes
    del out  # and the lease
    bags.table("a").assign(keys + many, torch.zeros(many, 4, device=DEVICE))
    assert len(bags.table("a")) == many and rows.storage.bytes + rows.index.bytes(0) == used


@pytest.mark.slow
def test_keys_erased_under_a_lease_leave_room_for_others():
    bags = on_device(in_hbm(sgd(), "156KiB"))
    rows = device_rows_of(bags)
    for first in range(0, 1600, 100):
        bags.table("a").assign(torch.arange(first, first + 100, device=DEVICE), torch.zeros(100, 4, device=DEVICE))
    out = bags(kjt({"a": [[0, 1]]}).to(DEVICE)).values()
    assert bags.table("a").erase(torch.arange(1600, device=DEVICE)) == 1600
    assert rows._within[0] - rows._held[0] >= 1000
    bags(kjt({"a": [[10_000 + key] for key in range(1000)]}).to(DEVICE)).values().sum().backward()
    bags.check()
    assert len(bags.table("a")) == 1000
    del out


def test_a_load_has_the_room_of_what_it_replaces():
    bags = on_device(in_hbm(sgd(), 6000))
    many = device_rows_of(bags)._within[0]
    bags.table("a").assign(torch.arange(many, device=DEVICE), torch.ones(many, 4, device=DEVICE))
    saved = {name: value.clone() for name, value in bags.state_dict().items()}
    out = bags(kjt({"a": [[0, 1]]}).to(DEVICE)).values()
    bags.table("a").erase(torch.arange(many, device=DEVICE))
    bags.load_state_dict(saved)
    assert len(bags.table("a")) == many
    del out


@pytest.mark.slow
def test_refused_memory_loses_no_other(monkeypatch):
    bags = on_device(sgd())
    storage, cat = device_rows_of(bags).storage, torch.cat
    bags(kjt({"a": [[1, 2, 3]]}).to(DEVICE)).values().sum().backward()
    used, slots = storage.bytes, storage.families[0].slots

    def refuse(*_arguments, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    many = kjt({"a": [[key] for key in range(100, 3000)]}).to(DEVICE)
    for _ in range(2):
        monkeypatch.setattr(torch, "cat", refuse)
        with pytest.raises(OutOfMemoryError):
            bags(many)
        monkeypatch.setattr(torch, "cat", cat)
        assert (storage.bytes, storage.families[0].slots) == (used, slots)
    bags(many).values().sum().backward()
    grown = storage.bytes
    monkeypatch.setattr(torch, "cat", refuse)
    assert bags.table("a").erase(torch.arange(3000, device=DEVICE)) == 2903  # its slots wait for memory
    monkeypatch.setattr(torch, "cat", cat)
    bags(many).values().sum().backward()
    bags.check()
    assert len(bags.table("a")) == 2900 and storage.bytes == grown


@pytest.mark.slow
def test_many_tables_grow_in_as_many_launches_as_one(monkeypatch):
    tables = [Table(f"t{number}", 2, optimizer=shoal.SGD()) for number in range(30)]
    bags = on_device(*tables)
    moves, move = [], DeviceIndex._move
    monkeypatch.setattr(DeviceIndex, "_move", lambda self, sizes: (moves.append(len(sizes)), move(self, sizes)))
    for step in range(8):
        before = len(moves)
        new = [[100 * step + key for key in range(6)]]
        bags(kjt({table.name: new for table in tables}).to(DEVICE)).values().sum().backward()
        assert len(moves) <= before + 1
    bags.check()
    assert max(moves) == 30 and all(len(bags.table(table.name)) == 48 for table in tables)


class Late:
    """An event that is over some steps after it was recorded, and knows who waited for it."""

    def __init__(self, clock, waited):
        self.clock, self.waited, self.at = clock, waited, clock[0]

    def query(self):
        return self.clock[0] >= self.at + 3

    def synchronize(self):
        self.waited.append(self.clock[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="its events are its own")
@pytest.mark.parametrize("size", [None, "8KiB"])
def test_nobody_waits_for_the_device_in_a_table_that_is_full_or_has_room(size):
    bags = on_device(in_hbm(sgd(), size))
    ledger, clock, waited = device_rows_of(bags).ledger, [0], []
    bags.table("a").assign(torch.arange(150), torch.zeros(150, 4))
    for step in range(14):
        clock[0] = step
        out = bags(kjt({"a": [[key] for key in range(100)]})).values()
        out.sum().backward()
        ledger._events[(ledger.sent - 1) % ledger.copies] = Late(clock, waited)
    assert [step for step in waited if step > 4] == []  # what comes first may wait


@pytest.mark.slow
def test_batches_that_are_alike_still_find_room():
    bags = on_device(sgd(), Table("b", 4, optimizer=shoal.SGD(lr=1.0)))
    for step in range(12):
        new = [[100 * step + key] for key in range(60)]
        bags(kjt({"a": new, "b": new}).to(DEVICE)).values().sum().backward()
    bags.check()
    assert len(bags.table("a")) == len(bags.table("b")) == 12 * 60


@pytest.mark.slow
def test_where_memory_ends_batches_that_still_fit_are_trained(monkeypatch):
    bags = on_device(sgd())
    bags(kjt({"a": [[key] for key in range(100)]}).to(DEVICE)).values().sum().backward()
    rows, grow = device_rows_of(bags), HbmStorage.grow
    left = rows.storage.supply(0) - len(bags.table("a"))

    def refuse(*_arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(HbmStorage, "grow", refuse)
    for step in range(1, left // 100 + 1):
        bags(kjt({"a": [[100 * step + key] for key in range(100)]}).to(DEVICE)).values().sum().backward()
    with pytest.raises(OutOfMemoryError, match="memory"):
        bags(kjt({"a": [[-key] for key in range(1, 101)]}).to(DEVICE))
    bags.check()
    assert len(bags.table("a")) == 100 * (left // 100 + 1)
    monkeypatch.setattr(HbmStorage, "grow", grow)
    bags(kjt({"a": [[-key] for key in range(1, 101)]}).to(DEVICE)).values().sum().backward()
    assert len(bags.table("a")) == 100 * (left // 100 + 2)


def test_a_large_batch_behind_small_ones_is_updated_whole():
    twins = Twins(Table("a", 4, optimizer=shoal.Adam(lr=0.1)))
    for step in range(9):
        twins.step(random_kjt(["a"], 2 if step < 8 else 300, keys=2000, seed=step), seed=step)
    twins.check()


def test_slots_of_minus_one_may_come_last(monkeypatch):
    def last(self, slots, ordered, order):
        order.copy_(torch.sort(torch.where(slots < 0, 2**31 - 1, slots), stable=True).indices)
        ordered.copy_(slots[order])

    monkeypatch.setattr("shoal.ops.sort.Sorter.sort", last)
    tables = [Table("a", 4, optimizer=None), Table("b", 5), Table("c", 8, pooling="mean", optimizer=shoal.Adam(lr=0.1))]
    twins = Twins(*tables)
    for step in range(3):
        twins.step(random_kjt(["a", "b", "c"], 30, keys=40, seed=step), seed=step)
    twins.check()
