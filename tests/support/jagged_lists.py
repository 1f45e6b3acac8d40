"""Jagged tensors from lists of lists, their plain definition, and back."""

import torch
from hypothesis import strategies as st

from shoal.modules.jagged import JaggedTensor, KeyedJaggedTensor

INDEX_DTYPES = [torch.int32, torch.int64]
# Three values in four bags.
VALUES, FOUR = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1])

bags_of_ids = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=5)


@st.composite
def batches(draw):
    """Key -> bags of ids, the same number of bags for every key."""
    keys = draw(st.lists(st.text(min_size=1, max_size=3), max_size=4, unique=True))
    stride = draw(st.integers(0, 4))
    bag = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
    return {key: draw(st.lists(bag, min_size=stride, max_size=stride)) for key in keys}, stride


def flat(bags):
    return [element for bag in bags for element in bag]


def jagged(bags, dtype=torch.int64, by="lengths"):
    lengths = torch.tensor([len(bag) for bag in bags], dtype=dtype)
    values = torch.tensor(flat(bags), dtype=torch.int64)
    if by == "lengths":
        return JaggedTensor(values, lengths=lengths)
    offsets = torch.tensor([sum(len(bag) for bag in bags[:i]) for i in range(len(bags) + 1)], dtype=dtype)
    return JaggedTensor(values, offsets=offsets)


def keyed(batch, stride, dtype=torch.int64, by="lengths", weighted=False):
    one = jagged([bag for bags in batch.values() for bag in bags], dtype, by)
    return KeyedJaggedTensor(
        list(batch),
        one.values(),
        torch.arange(float(one.values().numel())) if weighted else None,
        one.lengths() if by == "lengths" else None,
        one.offsets() if by == "offsets" else None,
        stride=stride,
    )


def lists(one: JaggedTensor) -> list[list[int]]:
    return [bag.tolist() for bag in one.to_dense()]
