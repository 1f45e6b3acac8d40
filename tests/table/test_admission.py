"""Policies that say which keys get a row: the seam, with policies of the tests."""

import pytest
import torch
from support.batches import kjt
from support.inside import group_of
from support.tiered import below, collection

import shoal
from shoal.errors import InputError
from shoal.table.host import missing as bringing
from shoal.table.lifecycle.admission import Candidates

# Where rows are: memory alone, memory above a tier, and memory that does not hold the rows of a batch.
TIERS = {
    "memory": lambda _folder: None,
    "tier": lambda folder: [shoal.Dram("1MiB"), below("memory", folder)],
    "ssd": lambda folder: [shoal.Dram("1MiB"), below("ssd", folder)],
    "pieces": lambda folder: [shoal.Dram("8KiB"), below("memory", folder)],
}
MANY = [[*range(-400, 400), 2, 3], [3, 3, 5, 1000], [4, 5], []]
FEW = [[2, 3, 4], [3, 3, 5], [], [4, 4]]


class Even:
    """Admits even keys."""

    def __init__(self):
        self.asked = []

    def admits(self, candidates):
        self.asked.append(candidates.keys.tolist())
        return candidates.keys % 2 == 0


class Twice:
    """Admits keys that come at least twice in a batch."""

    def admits(self, candidates):
        return candidates.times() >= 2


def made(where, folder, policy=None, **settings):
    given = {"name": "t", "dim": 8, "optimizer": shoal.Adagrad(lr=0.1), **settings}
    bags = collection([given], TIERS[where](folder))
    if policy is not None:
        group_of(bags).admit_by(0, policy)
    return bags


def rows(keys):
    return kjt({"t": keys})


def step(bags, keys):
    """A step whose gradient depends on the bag alone."""
    out = bags(rows(keys)).values()
    out.backward(torch.arange(1.0, out.numel() + 1).view_as(out) / 100)
    return out.detach()


def counted(bags):
    counters = bags.stats()["t"].counters
    return counters["births"], counters.get("dropped_gradients", 0)


def distinct(keys):
    return sorted({key for bag in keys for key in bag})


@pytest.mark.parametrize("missing", ["init", "zero"])
@pytest.mark.parametrize("where", TIERS)
def test_a_key_that_is_not_admitted_gets_no_row(where, missing, tmp_path):
    keys = MANY if where == "pieces" else FEW
    bags = made(where, tmp_path / "one", Even(), missing=missing)
    fresh = made(where, tmp_path / "two", missing=missing)
    plain = made(where, tmp_path / "three", missing=missing)
    before = fresh.eval()(rows([[key] for key in distinct(keys)])).values()
    step(bags, keys)
    step(plain, keys)
    even = [key for key in distinct(keys) if key % 2 == 0]
    odd = [key for key in distinct(keys) if key % 2]
    assert bags.table("t").keys().tolist() == even
    assert counted(bags) == (len(even), len(odd))
    assert counted(plain) == (len(even) + len(odd), 0)
    # Those that are admitted are trained as without a policy; the others read as they did.
    assert torch.equal(bags.table("t").lookup(even), plain.table("t").lookup(even))
    assert torch.equal(bags.table("t").lookup(odd), before[[key % 2 == 1 for key in distinct(keys)]])
    step(bags, keys)
    step(plain, keys)
    assert torch.equal(bags.table("t").lookup(even), plain.table("t").lookup(even))
    assert counted(bags) == (len(even), 2 * len(odd))


@pytest.mark.parametrize("where", TIERS)
def test_the_output_of_the_forward_has_the_missing_row(where, tmp_path):
    keys = MANY if where == "pieces" else FEW
    bags = made(where, tmp_path, Even(), missing="zero", init=shoal.Constant(1.0))
    wanted = torch.tensor([float(sum(key % 2 == 0 for key in bag)) for bag in keys])
    assert torch.equal(step(bags, keys), wanted[:, None].expand(-1, 8))


@pytest.mark.parametrize("where", TIERS)
def test_a_policy_sees_how_often_keys_come_in_the_batch(where, tmp_path):
    keys = MANY if where == "pieces" else FEW
    bags = made(where, tmp_path, Twice())
    step(bags, keys)
    flat = [key for bag in keys for key in bag]
    assert bags.table("t").keys().tolist() == [key for key in distinct(keys) if flat.count(key) >= 2]


def test_candidates_count_the_features_that_may_give_a_key_its_row():
    some = Candidates("t", 0, torch.tensor([7, -3, 5]), lambda: [torch.tensor([5, 5, 8, 7]), torch.tensor([-3, 5])])
    assert some.times().tolist() == [1, 1, 3]
    narrow = Candidates("t", 0, torch.tensor([7]), lambda: [torch.tensor([7, 7], dtype=torch.int32)])
    assert narrow.times().tolist() == [2]


@pytest.mark.parametrize("where", ["memory", "tier"])
def test_only_births_are_asked_about(where, tmp_path):
    policy = Even()
    bags = made(where, tmp_path, policy)
    bags.table("t").assign([1, 3], torch.ones(2, 8))  # an assign is no policy's business
    bags.eval()(rows([[1, 2, 5]]))
    assert policy.asked == []
    bags.train()
    step(bags, [[1, 2, 5, 2]])
    assert [sorted(asked) for asked in policy.asked] == [[2, 5]]
    step(bags, [[1, 2, 5]])
    assert [sorted(asked) for asked in policy.asked] == [[2, 5], [5]]
    assert bags.table("t").keys().tolist() == [1, 2, 3]


def test_features_that_read_are_not_asked_about(tmp_path):
    policy = Even()
    features = ["t", shoal.Feature("r", mode="read")]
    bags = made("tier", tmp_path, policy, features=features)
    out = bags(kjt({"t": [[1, 2]], "r": [[8, 1]]}))
    out.values().sum().backward()
    assert [sorted(asked) for asked in policy.asked] == [[1, 2]]
    assert bags.table("t").keys().tolist() == [2]


@pytest.mark.parametrize("where", TIERS)
def test_a_gradient_is_dropped_though_the_key_has_a_row_by_then(where, tmp_path):
    keys = MANY if where == "pieces" else FEW
    bags = made(where, tmp_path, Even(), optimizer=shoal.SGD(lr=1.0))
    out = bags(rows(keys)).values()
    bags.table("t").assign([3], torch.ones(1, 8))
    out.sum().backward()
    assert torch.equal(bags.table("t").lookup([3]), torch.ones(1, 8))
    assert counted(bags)[1] == sum(key % 2 for key in distinct(keys))


def test_the_gradient_of_weights_is_that_of_the_missing_row(tmp_path):
    bags = made("memory", tmp_path, Even(), missing="zero", init=shoal.Constant(2.0))
    weights = torch.ones(3, requires_grad=True)
    batch = shoal.KeyedJaggedTensor(["t"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([3]))
    bags(batch).values().sum().backward()
    assert weights.grad.tolist() == [0.0, 16.0, 0.0]


def test_a_batch_that_is_staged_asks_when_it_is_looked_up(tmp_path):
    policy = Even()
    bags = made("tier", tmp_path, policy)
    batch = rows(FEW)
    staging = bags.stage(batch)
    staging.read()
    staging.place(lambda: False)
    assert policy.asked == []
    bags(batch).values().sum().backward()
    staging.release()
    assert [sorted(asked) for asked in policy.asked] == [[2, 3, 4, 5]]
    assert bags.table("t").keys().tolist() == [2, 4]


@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("answer", [torch.ones(1), torch.ones(1, dtype=torch.bool), ValueError("no")])
def test_a_bad_answer_changes_nothing(answer, where, tmp_path):
    class Bad:
        def admits(self, candidates):
            if isinstance(answer, Exception):
                raise answer
            return answer

    keys = MANY if where == "pieces" else FEW
    bags = made(where, tmp_path, Bad())
    with pytest.raises(type(answer) if isinstance(answer, Exception) else InputError, match=r"no|one bool"):
        bags(rows(keys))
    assert len(bags.table("t")) == 0
    assert counted(bags) == (0, 0)
    group_of(bags).admit_by(0, None)
    step(bags, keys)
    assert bags.table("t").keys().tolist() == distinct(keys)


def test_without_a_policy_no_mask_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(bringing, "admitted", lambda *_: pytest.fail("nothing asks"))
    bags = made("tier", tmp_path)
    step(bags, FEW)
    assert bags.table("t").keys().tolist() == distinct(FEW)
