"""First rows, bit for bit as docs/formats.md specifies them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import table_of

import shoal
from shoal import _native
from shoal.ops.birth import reference

KEYS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234, -987654321])
INITS = [shoal.Uniform(-0.3, 0.7), shoal.Normal(0.5, 2.0), shoal.Zeros(), shoal.Constant(-0.125)]


@pytest.mark.parametrize("init", INITS, ids=lambda init: type(init).__name__)
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 16, 63, 64, 65, 200])
def test_first_rows_are_the_references_bits(isa, init, dim):
    bags = shoal.EmbeddingBagCollection([shoal.Table("née", dim, init=init)], seed=42)
    unborn = bags.table("née").lookup(KEYS)
    table_of(bags)._with_rows(KEYS.sort().values, lambda _slots: None)
    wanted = reference.first_rows(init, 42, "née", KEYS, dim)
    assert torch.equal(bags.table("née").lookup(KEYS), wanted)
    assert torch.equal(unborn, wanted)


@given(seed=st.integers(0, 2**64 - 1), name=st.text(min_size=1), key=st.integers(-(2**63), 2**63 - 1))
def test_hashes_and_streams_agree_with_the_reference(seed, name, key):
    hashed = _native.name_hash(name)
    assert hashed == reference.name_hash(name)
    assert _native.birth_stream(seed, hashed) == reference.birth_stream(seed, name)
    assert _native.rounding_stream(seed, hashed) == reference.rounding_stream(seed, name)
    bucket = torch.empty(1, dtype=torch.int64)
    _native.buckets(torch.tensor([key]), 4096, bucket)
    assert int(bucket) == reference.bucket_of(key, 4096)


@pytest.mark.parametrize(
    ("counter", "stream", "words"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_reference_philox_gives_the_published_vectors(counter, stream, words):
    assert reference.philox(stream, torch.tensor([counter])).tolist() == [words]


def test_rows_do_not_depend_on_order_batch_threads_or_capacity():
    keys = torch.randperm(3000) * 7919 - 10**6
    one = shoal.EmbeddingBagCollection([shoal.Table("t", 24, init=shoal.Normal())], seed=9)
    two = shoal.EmbeddingBagCollection([shoal.Table("t", 24, init=shoal.Normal(), tiers=[shoal.Dram("64MiB")])], seed=9)
    lengths = torch.ones(len(keys), dtype=torch.int64)
    one(shoal.KeyedJaggedTensor(keys=["t"], values=keys, lengths=lengths))
    shoal.set_num_threads(3)
    try:
        for part in keys.flip(0).split(170):
            two(shoal.KeyedJaggedTensor(keys=["t"], values=part, lengths=lengths[: len(part)]))
    finally:
        shoal.set_num_threads(None)
    assert torch.equal(one.table("t").lookup(keys), two.table("t").lookup(keys))


def test_normal_rows_are_normal():
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 64, init=shoal.Normal(0.0, 1.0))])
    rows = bags.table("t").lookup(torch.arange(20000)).double()
    assert abs(rows.mean()) < 3e-3
    assert abs(rows.std() - 1) < 3e-3
    assert abs((rows**4).mean() - 3) < 0.05
    for point in (-2.5, -1.0, 0.0, 0.7, 3.0):
        wanted = 0.5 * (1 + torch.erf(torch.tensor(point / 2**0.5, dtype=torch.float64)))
        assert abs((rows < point).double().mean() - wanted) < 2e-3
