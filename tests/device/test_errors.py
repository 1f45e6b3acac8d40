"""What goes wrong on the device: it is counted there, other rows are right, and a later call or `check` raises."""

from itertools import pairwise

import pytest
import torch
from batches import kjt, random_kjt
from device_tables import DEVICE, Twins, here, in_hbm, on_device, placed, train

import shoal
from shoal import Clip, Table
from shoal.errors import CapacityError, InputError, NonFiniteError

# What numpy says where Triton interprets: infinities less infinities, and squares of what is large.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def sgd(**settings):
    return Table("a", 4, optimizer=shoal.SGD(lr=1.0, **settings))


# ---- room


def limited(size):
    return on_device(in_hbm(sgd(), size), Table("b", 4, optimizer=shoal.SGD(lr=1.0)))


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
    rows = bags._group._rows
    budget = shoal.Hbm(size).bytes
    assert rows.storage.bytes + rows.index.bytes(0) <= budget
    assert len(bags.table("a")) * 32 >= budget // 2 - 1024  # rows take 32 bytes, their index about 22
    state = bags.state_dict()
    for again in (bags, made()):
        again.load_state_dict(state)
        assert torch.equal(again.table("a").keys(), bags.table("a").keys())
        assert again._group._rows.storage.bytes + again._group._rows.index.bytes(0) <= budget
    train(bags, kjt({"a": [bags.table("a").keys()[:5].tolist() * 50]}))  # no new key
    bags.check()


def test_memory_grows_with_the_rows():
    bags = on_device(Table("a", 128, optimizer=shoal.Adam()))
    train(bags, kjt({"a": [[1, 2, 3]]}))
    assert bags._group._rows.storage.bytes < 2**21


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
    out, _lease = bags._group.lookup(["a"], values, starts, None, 4, training, False, torch.float32)
    wanted = torch.zeros(3, 4)
    for bag, (begin, end) in enumerate(pairwise(offsets)):
        if 0 <= begin <= end <= 4:
            wanted[bag] = bags.table("a").lookup(values[begin:end]).sum(0).cpu()
    torch.testing.assert_close(out.cpu(), wanted)
    with pytest.raises(InputError, match="must not decrease"):
        bags.check()
    bags.check()


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
    group, real = bags._group, torch.empty

    def dirty(*shape, **settings):
        made = real(*shape, **settings)
        return made.fill_(1 << 38) if made.dtype == torch.int64 else made

    monkeypatch.setattr(torch, "empty", dirty)
    values, offsets = here(1, 2, 3, 4), here(0, 2, 9, 4)  # 3 and 4 are in no bag that makes sense
    before = bags.table("a").lookup([3, 4])
    columns = before.shape[1]
    _, lease = group.lookup(["a"], values, offsets, None, columns, True, True, torch.float32)
    group.update(lease, values, offsets, None, [torch.ones(3, columns, device=DEVICE)], False)
    with pytest.raises(InputError, match="2 bags"):
        bags.check()
    assert torch.equal(bags.table("a").lookup([3, 4]), before)


@pytest.mark.parametrize("offsets", [(1, 3, 5), (0, 2, 4), (2, 2, 2)])
def test_offsets_that_leave_values_out_are_an_error(offsets):
    bags = on_device(sgd())
    bags._group.lookup(["a"], here(1, 2, 3, 4, 5), here(*offsets), None, 4, False, False, torch.float32)
    with pytest.raises(InputError, match="offsets"):
        bags.check()


def test_items_in_no_bag_are_their_own_tables():
    decaying = Table("a", 4, init=shoal.Constant(1.0), optimizer=shoal.AdamW(lr=0.5, weight_decay=1.0))
    plain = Table("b", 4, init=shoal.Constant(1.0), optimizer=shoal.AdamW(lr=0.5, weight_decay=0.0))
    bags = on_device(decaying, plain)
    values, offsets = here(1, 2, 9, 9), here(0, 1, 2, 9, 4)
    _, lease = bags._group.lookup(["a", "b"], values, offsets, None, 8, True, True, torch.float32)
    bags._group.update(lease, values, offsets, None, [torch.zeros(2, 8, device=DEVICE)], False)
    with pytest.raises(InputError):
        bags.check()
    assert bags.table("b").lookup(here(9)).tolist() == [[1.0] * 4]


def test_a_batch_of_2_to_the_30_values_is_refused():
    bags = on_device(sgd())
    values = here(1).expand(2**30)
    with pytest.raises(InputError, match="less than 2\\^30 values"):
        bags._group.lookup(["a"], values, here(0, 2**30), None, 4, False, False, torch.float32)
