"""Tables whose rows spill out of memory, and the same ones with all the memory they want."""

import torch

import shoal
from shoal.storage import MemoryStorage

# Rows of a few dims in this much memory: a few hundred, so that every batch makes some leave.
SMALL = "24KiB"
KINDS = ("ssd", "memory")


def below(kind, folder):
    """The lowest tier of that kind."""
    return {"ssd": lambda: shoal.Ssd(folder, "16MiB"), "memory": lambda: MemoryStorage}[kind]()


def collection(tables, tiers=None, which="bags", seed=3):
    """A collection of Table(**settings), each with these tiers."""
    made = [shoal.Table(**{"tiers": tiers, **settings}) for settings in tables]
    return (shoal.EmbeddingBagCollection if which == "bags" else shoal.EmbeddingCollection)(made, seed=seed)


def pair(kind, folder, tables, memory=SMALL, **settings):
    """The same collection with and without enough memory."""
    return collection(tables, **settings), collection(tables, [shoal.Dram(memory), below(kind, folder)], **settings)


def tier(bags, number, table="t"):
    """The statistics of one of a table's tiers."""
    return bags.stats()[table].tiers[number]


def skewed_kjt(features, generator, bags=24, keys=2000, longest=5):
    """Bags whose keys are often small, sometimes large, and the extreme ones now and then."""
    lengths = torch.randint(0, longest + 1, (len(features) * bags,), generator=generator)
    values = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * keys).long()
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    odd = torch.rand(len(values), generator=generator) < 0.02
    values[odd] = extremes[torch.randint(0, 4, (int(odd.sum()),), generator=generator)]
    return shoal.KeyedJaggedTensor(list(features), values, lengths=lengths)


def outputs(out):
    """The output tensors of a collection."""
    return [out.values()] if isinstance(out, shoal.KeyedTensor) else [jagged.values() for jagged in out.values()]


def backward(out, seed):
    """A backward with a gradient that depends on nothing but the seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = outputs(out)
    torch.autograd.backward(tensors, [torch.randn(tensor.shape, generator=generator) for tensor in tensors])


def train(collections, generator, steps, features=("t",), first=0):
    """Trains collections on the same batches, and compares their outputs."""
    for step in range(first, first + steps):
        batch = skewed_kjt(features, generator)
        outs = [bags(batch) for bags in collections]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)


def assert_equal_outputs(outs, step=None):
    first = [tensor.detach() for tensor in outputs(outs[0])]
    for other in outs[1:]:
        for one, two in zip(first, outputs(other), strict=True):
            assert torch.equal(one, two.detach()), step


def fetched_by_lookups(bags):
    """Returns how many positions of batches had their row read from below memory by the lookup itself."""
    return sum(one.counters["hits"] - one.tiers[0].hits for one in bags.stats().values())
