"""Small batches, and what a collection remembers, for tests."""

import torch

import shoal
from shoal.modules.collection import Collection


def kjt(bags, *, weights=None, dtype=torch.int64, lengths_dtype=torch.int64, by="lengths"):
    """A KeyedJaggedTensor from {feature: [bag, ...]}; weights in the same form, or one number for all."""
    flat = [key for one in bags.values() for bag in one for key in bag]
    lengths = torch.tensor([len(bag) for one in bags.values() for bag in one], dtype=lengths_dtype)
    if isinstance(weights, dict):
        weights = torch.tensor([weight for name in bags for bag in weights[name] for weight in bag])
    elif weights is not None:
        weights = torch.full((len(flat),), float(weights))
    sizes = (
        {"lengths": lengths}
        if by == "lengths"
        else {"offsets": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(lengths_dtype)}
    )
    return shoal.KeyedJaggedTensor(list(bags), torch.tensor(flat, dtype=dtype), weights, **sizes)


def random_kjt(features, bags=4, keys=20, seed=0, weighted=False):
    """Bags of 0 to 4 keys below `keys`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(features) * bags,), generator=generator)
    values = torch.randint(0, keys, (int(lengths.sum()),), generator=generator)
    weights = torch.randn(len(values), generator=generator) if weighted else None
    return shoal.KeyedJaggedTensor(list(features), values, weights, lengths=lengths)


def train_step(bags, batch, seed=0):
    """A forward and a backward with a fixed gradient; returns the output."""
    out = bags(batch)
    tensors = [out.values()] if isinstance(out, shoal.KeyedTensor) else [jagged.values() for jagged in out.values()]
    generator = torch.Generator().manual_seed(seed)
    torch.autograd.backward(tensors, [torch.randn(tensor.shape, generator=generator) for tensor in tensors])
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def memory(module):
    """All that must not change where nothing may change: the state dict, and the stats of every table."""
    stats = {
        (name, table): handle.stats()
        for name, part in module.named_modules()
        if isinstance(part, Collection)
        for table, handle in part.tables().items()
    }
    return {name: value.clone() for name, value in module.state_dict().items()}, stats


def assert_same_rows(one, other):
    """Two modules' state dicts are equal, bit for bit."""
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def assert_unchanged(module, before):
    """`before` is memory(module) of an earlier moment."""
    rows, stats = memory(module)
    assert list(rows) == list(before[0])
    for name, value in rows.items():
        assert torch.equal(value, before[0][name]), name
    assert stats == before[1]
