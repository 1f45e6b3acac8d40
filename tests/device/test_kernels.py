"""The small functions of the kernels against plain torch, to the bit."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.device_tables import DEVICE

from shoal.index.device import steps_of
from shoal.ops.birth import reference as birth
from shoal.ops.library.items import feature_of_run
from shoal.ops.library.random import philox
from shoal.ops.library.rows import nearest
from shoal.ops.update import reference as updating
from shoal.ops.update.apply import stochastic_bf16, stochastic_f16
from shoal.table.device.rows import signed

N = 64
EDGES = [0.0, -0.0, 1.0, -1.0, 1e-45, 6e-8, 5.9e-8, 2**-14, 2**-14 * 0.999, 65504.0, 65519.9, 65520.0, 1e5, 3e38, -3e38]
THREE = [Phase.explicit, Phase.reuse, Phase.generate]


@triton.jit
def words_of(streams, keys, out, word3, N: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, N)
    element = tl.arange(0, D)
    stream = tl.load(streams + row).to(tl.uint64)
    key = tl.load(keys + row)
    word = philox(stream[:, None], key[:, None], element[None, :], (key * 0 + word3)[:, None])
    tl.store(out + row[:, None] * D + element[None, :], word.to(tl.int64))


@triton.jit
def rounded_to(values, words, out, BF16: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(values + at)
    word = tl.load(words + at).to(tl.uint32)
    if BF16:
        tl.store(out + at, stochastic_bf16(x, word))
    else:
        tl.store(out + at, stochastic_f16(x, word))


@triton.jit
def nearest_to(values, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, nearest(tl.load(values + at), out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "batch", "features"])
def features_of(offsets, out, n, batch, features, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    tl.store(out + at, feature_of_run(offsets, first, at, batch, features, BLOCK, STEPS), mask=at < n)


def bits(tensor):
    return tensor.cpu().view(torch.int16).tolist()


@settings(max_examples=10, phases=THREE)
@given(
    stream=st.integers(0, 2**64 - 1),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
    word3=st.sampled_from([0, 1, 77, 2**31 - 1, 2**32 - 1]),
)
def test_random_words_are_those_of_the_reference(stream, keys, word3):
    out = torch.empty(4, 16, dtype=torch.int64, device=DEVICE)
    streams = torch.full((4,), signed(stream), device=DEVICE)
    words_of[(1,)](streams, torch.tensor(keys, device=DEVICE), out, word3, N=4, D=16)
    assert torch.equal(out.cpu(), birth.words(stream, torch.tensor(keys), 16, word3))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=10, phases=THREE)
@given(
    values=st.lists(st.one_of(st.sampled_from(EDGES), st.floats(width=32, allow_nan=False)), min_size=N, max_size=N),
    words=st.lists(st.one_of(st.sampled_from([0, 2**32 - 1, 0xFFFF, 0x1FFF]), st.integers(0, 2**32 - 1)), min_size=N,
                   max_size=N),
)  # fmt: skip
def test_stochastic_rounding_is_that_of_the_reference(dtype, values, words):
    given, word = torch.tensor(values, dtype=torch.float32), torch.tensor(words)
    out = torch.empty(N, dtype=dtype, device=DEVICE)
    rounded_to[(1,)](given.to(DEVICE), word.to(DEVICE), out, BF16=dtype == torch.bfloat16, N=N)
    assert bits(out) == bits(updating.stochastic_round(given, word, dtype))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=10, phases=THREE)
@given(st.lists(st.one_of(st.sampled_from(EDGES), st.floats(width=32, allow_nan=False)), min_size=N, max_size=N))
def test_rounding_to_the_nearest_is_torchs(dtype, values):
    given = torch.tensor(values, dtype=torch.float32)
    out = torch.empty(N, dtype=dtype, device=DEVICE)
    nearest_to[(1,)](given.to(DEVICE), out, N=N)
    assert bits(out) == bits(given.to(dtype))


@pytest.mark.parametrize("features", [1, 2, 31, 32, 33, 65, 1024, 1025, 1500])
@pytest.mark.parametrize("lengths", ["alike", "any", "mostly none"])
def test_positions_are_of_the_feature_they_lie_in(features, lengths):
    generator = torch.Generator().manual_seed(features)
    batch, most = 3, {"alike": 2, "any": 5, "mostly none": 300}[lengths]
    each = torch.randint(0, most, (features * batch,), generator=generator)
    if lengths == "alike":
        each = torch.ones_like(each)
    if lengths == "mostly none":
        each = torch.where(torch.rand(features * batch, generator=generator) < 0.003, each, 0)
    each[-1] += 1
    offsets = torch.cat([each.new_zeros(1), each.cumsum(0)])
    n = int(offsets[-1])
    wanted = torch.arange(features).repeat_interleave(each.view(features, batch).sum(1))
    out = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    shape = {"BLOCK": 32, "STEPS": steps_of(features)}
    features_of[(-(-n // 32),)](offsets.to(DEVICE), out, n, batch, features, **shape)
    assert out.tolist() == wanted.tolist()
