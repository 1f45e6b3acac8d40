"""Rows of Adam count their updates exactly, far beyond what a float32 counts to."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import kjt

import shoal
from shoal.interop import dcp
from shoal.interop.parquet import export_parquet, import_parquet
from shoal.interop.safetensors import export_safetensors, import_safetensors
from shoal.interop.torchrec import load_optimizer_state
from shoal.optim import counts_of, numbers_of
from shoal.optim.counts import MOST, count_update

EXACT = 2**24
NUMBERS = [0, 1, 999, EXACT - 2, EXACT - 1, EXACT, EXACT + 1, EXACT + 2, 2**25, 2**28, 2**29 + 1, MOST - 1, MOST, 2**30]
# The largest float32 below 1, and what rounds to it; between them what other rows are trained with.
BETAS = [(1 - 2**-24, 1 - 1.0000001 * 2**-25), (0.9999999, 1 - 2**-24), (0.9, 0.99999), (0.0, 0.999)]
ADAMS = [shoal.Adam, shoal.AdamW, shoal.PartialRowwiseAdam]


def made(optimizer, numbers=NUMBERS, dim=3):
    """A collection whose keys 0, 1, ... had that many updates, and the state dict it was made of."""
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", dim, optimizer=optimizer, init=shoal.Normal(0, 1))], seed=1)
    keys = torch.arange(len(numbers))
    bags.table("t").assign(keys, bags.table("t").lookup(keys))
    state = bags.state_dict()
    begin = "embedding_bags.t.state."
    generator = torch.Generator().manual_seed(0)
    for name in ("exp_avg", "exp_avg_sq"):
        state[begin + name] = torch.rand(state[begin + name].shape, generator=generator) + 0.5
    state[begin + "count"] = counts_of(torch.tensor(numbers))[:, None]
    bags.load_state_dict(state)
    return bags, state


def step(bags, gradient):
    keys = list(range(len(gradient)))
    bags(kjt({"t": [[key] for key in keys]})).values().backward(gradient)


def counted(bags):
    return bags.table("t").state(bags.table("t").keys())["count"].flatten().tolist()


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("kind", ADAMS)
def test_steps_are_those_of_an_oracle_in_float64(kind, betas):
    optimizer = kind(lr=0.5, betas=betas, eps=1e-3, weight_decay=0.0)
    bags, state = made(optimizer)
    old = bags.table("t").lookup(bags.table("t").keys()).double()
    gradient = torch.randn(old.shape)
    step(bags, gradient)
    first, second = betas
    mean = first * state["embedding_bags.t.state.exp_avg"].double() + (1 - first) * gradient.double()
    squares = gradient.double() ** 2
    if kind is shoal.PartialRowwiseAdam:
        squares = squares.mean(1, keepdim=True)
    square = second * state["embedding_bags.t.state.exp_avg_sq"].double() + (1 - second) * squares
    # 1 - beta^t, which float64 has no digits for where beta and t are near 1.
    t = torch.tensor(NUMBERS, dtype=torch.float64)[:, None] + 1
    corrected = [-torch.expm1(t * (math.log(beta) if beta else -math.inf)) for beta in betas]
    wanted = old - 0.5 * (mean / corrected[0]) / ((square / corrected[1]).sqrt() + 1e-3)
    found = bags.table("t").lookup(bags.table("t").keys()).double()
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
    assert counted(bags) == [min(number + 1, MOST) for number in NUMBERS]


@pytest.mark.parametrize("kind", ADAMS)
def test_every_update_counts_beyond_what_a_float32_counts_to(kind):
    begins = [EXACT - 3, EXACT, 2**28 - 2, MOST - 2]
    bags, _ = made(kind(lr=0.0), begins)
    for more in range(1, 7):
        step(bags, torch.randn(4, 3))
        assert counted(bags) == [min(number + more, MOST) for number in begins]
        assert bags.state_dict()["embedding_bags.t.state.count"].isfinite().all()


def test_beyond_the_largest_count_the_correction_is_one_for_every_beta():
    nearest = math.nextafter(1 - 2**-25, 0)
    shoal.Adam(betas=(nearest, nearest))
    with pytest.raises(shoal.errors.ConfigError):
        shoal.Adam(betas=(1 - 2**-25, 0.999))
    assert float(torch.tensor(1 - nearest**MOST).float()) == 1.0
    assert nearest ** (MOST + 1) <= nearest**MOST < 2**-25


@given(number=st.one_of(st.integers(0, MOST), st.integers(EXACT - 9, EXACT + 9), st.integers(MOST - 9, MOST)))
def test_numbers_and_counts_are_the_same_thing(number):
    count = counts_of(torch.tensor([number]))
    assert numbers_of(count).tolist() == [number]
    assert float(count) == number or number > EXACT
    assert 0 <= float(count) < math.inf
    before = count.clone()
    assert count_update(count) == min(number + 1, MOST)
    assert float(count) > float(before) or number == MOST


def test_numbers_beyond_the_largest_count_are_the_largest():
    assert numbers_of(counts_of(torch.tensor([MOST + 1, 2**62]))).tolist() == [MOST, MOST]


def test_state_shows_the_numbers_as_integers():
    bags, _ = made(shoal.Adam())
    state = bags.table("t").state([5, 7, 4, 99])
    assert state["count"].dtype == torch.int64
    assert state["count"].tolist() == [[EXACT], [EXACT + 2], [EXACT - 1], [0]]
    assert {name: values.dtype for name, values in state.items() if name != "count"} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }


def test_counts_of_earlier_versions_are_what_they_were():
    """They were float32 numbers, which stopped at 2^24."""
    bags, state = made(shoal.Adam(lr=0.0))
    earlier = torch.tensor([float(number) for number in range(len(NUMBERS) - 2)] + [2.0**24 - 1, 2.0**24])
    bags.load_state_dict({**state, "embedding_bags.t.state.count": earlier[:, None]})
    assert counted(bags) == [int(number) for number in earlier]
    step(bags, torch.ones(len(NUMBERS), 3))
    assert counted(bags) == [int(number) + 1 for number in earlier]


def files(bags, folder):
    """Collections that are what files of every kind make of this one."""
    with shoal.ChangeLog(folder / "log") as log:
        log.commit(bags)
        log.compact()
    export_parquet(folder / "log", folder / "t.parquet", table="t")
    export_safetensors(folder / "log", folder / "t.safetensors", table="t")
    shoal.save(folder / "saved", bags)
    dcp.save(bags, folder / "dcp")
    torch.save(bags.state_dict(), folder / "t.pt")
    reads = {
        "log": lambda other: shoal.recover(folder / "log", other),
        "save": lambda other: shoal.load(folder / "saved", other),
        "dcp": lambda other: dcp.load(other, folder / "dcp"),
        "state dict": lambda other: other.load_state_dict(torch.load(folder / "t.pt", weights_only=True)),
        "Parquet": lambda other: import_parquet(folder / "t.parquet", other.table("t")),
        "safetensors": lambda other: import_safetensors(folder / "t.safetensors", other.table("t")),
    }
    for name, read in reads.items():
        other, _ = made(shoal.Adam(), [])
        read(other)
        yield name, other


def test_counts_come_back_from_files_of_every_kind(tmp_path):
    bags, _ = made(shoal.Adam())
    step(bags, torch.randn(len(NUMBERS), 3))
    before = bags.state_dict()
    for name, other in files(bags, tmp_path):
        assert torch.equal(other.state_dict()["embedding_bags.t.state.count"], before["embedding_bags.t.state.count"])
        assert counted(other) == [min(number + 1, MOST) for number in NUMBERS], name
        step(other, torch.ones(len(NUMBERS), 3))
        assert counted(other) == [min(number + 2, MOST) for number in NUMBERS], name


def test_counts_go_below_memory_and_come_back(tmp_path):
    tiers = [shoal.Dram("16KiB"), shoal.Ssd(tmp_path, "16MiB")]
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 8, optimizer=shoal.Adam(), tiers=tiers)])
    keys = torch.arange(600)
    bags.table("t").assign(keys, torch.zeros(600, 8))
    numbers = EXACT + keys - 5
    bags.load_state_dict({**bags.state_dict(), "embedding_bags.t.state.count": counts_of(numbers)[:, None]})
    for part in keys.split(40):
        bags(kjt({"t": [[key] for key in part.tolist()]})).values().sum().backward()
    assert bags.stats()["t"].tiers[0].demotions > 0
    assert counted(bags) == (numbers + 1).tolist()


def test_steps_of_torchrec_become_counts():
    bags, _ = made(shoal.Adam(), [0, 0])
    moments = {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
    load_optimizer_state(bags, {"t.weight": {**moments, "step": EXACT + 3}})
    assert counted(bags) == [EXACT + 3] * 2
