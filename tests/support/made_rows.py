"""Layouts and rows for the tests of records: any that a table could have."""

import torch
from hypothesis import strategies as st

from shoal.records import Layout, Rows, StateColumn

LAYOUT = Layout("item", 8, "float32", (StateColumn("sum", 1, 0.5), StateColumn("exp_avg", 8, 0.0)), 64, 7)

names = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="."), min_size=1, max_size=8)
columns = st.lists(
    st.builds(StateColumn, names, st.integers(1, 9), st.floats(-4, 4, width=32)),
    max_size=3,
    unique_by=lambda column: column.name,
).map(tuple)
layouts = st.builds(
    Layout,
    name=names,
    dim=st.integers(1, 33),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    columns=columns,
    buckets=st.integers(1, 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
)


def rows_of(layout: Layout, count: int, *, serving: bool = False) -> Rows:
    """Random rows, extreme keys among them."""
    keys = torch.randint(-(2**63), 2**63 - 1, (count,))
    keys[:1] = -(2**63)
    keys[1:2] = 2**63 - 1
    weights = torch.randn(count, layout.dim).to(layout.torch_dtype)
    if serving:
        return Rows(keys, weights)
    state = {name: torch.randn(count, width) for name, width, _ in layout.columns}
    return Rows(keys, weights, state, torch.randn(count, dtype=torch.float64))


def assert_same(found: Rows, wanted: Rows) -> None:
    """Bit for bit, dtypes and shapes too."""
    pairs = [(found.keys, wanted.keys), (found.weights, wanted.weights)]
    assert list(found.state) == list(wanted.state)
    pairs += [(found.state[name], wanted.state[name]) for name in wanted.state]
    assert (found.scores is None) == (wanted.scores is None)
    if found.scores is not None and wanted.scores is not None:
        pairs.append((found.scores, wanted.scores))
    for one, other in pairs:
        assert one.dtype == other.dtype and one.shape == other.shape
        assert bits_of(one).equal(bits_of(other))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals itself and -0.0 is not 0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
