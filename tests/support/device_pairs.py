"""A collection whose tables have tiers below device memory, and its equal without them, on the same batches."""

import pytest
import torch
from hypothesis import strategies as st

import shoal
from shoal.table.device.group import DeviceGroup
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, backward, here, outputs, placed
from support.inside import device_rows_of, table_of

EXTREME = [0, -1, 2**63 - 1, -(2**63)]


def slow(*values):
    """Values of parameters for GPUs and `scripts/test --all`: Triton's interpreter takes ten seconds for each."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def small_slabs(monkeypatch):
    """So that a few rows need several."""
    original = DeviceGroup.__init__

    def with_small_slabs(self, name, configs, seed, device, slab_bits=4):
        original(self, name, configs, seed, device, slab_bits)

    monkeypatch.setattr(DeviceGroup, "__init__", with_small_slabs)


def same(ours, wanted, what=""):
    """To the bit, also where there is no number."""
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape), what
    assert torch.equal(ours.nan_to_num(nan=77.0), wanted.nan_to_num(nan=77.0)), what


def adam(name="a", dim=4, **settings):
    """A table that trains with Adam."""
    return shoal.Table(name, dim, optimizer=shoal.Adam(lr=0.1), **settings)


def with_tiers(table, tiers):
    """The same table with other tiers."""
    return shoal.Table(
        table.name, table.dim, features=table.features, pooling=table.pooling, optimizer=table.optimizer,
        init=table.init, missing=table.missing, dtype=table.dtype, tiers=tiers,
    )  # fmt: skip


def below_of(rows, number):
    """By key of a table, the slot below and the number of its entry there."""
    buffer = rows.index._buffers[number]
    if buffer is None:
        return {}
    slots, keys = buffer[:, 16:24].flatten().tolist(), buffer.view(torch.int64)[:, :8].flatten().tolist()
    return {key: (slot, entry) for entry, (key, slot) in enumerate(zip(keys, slots, strict=True)) if slot >= 0}


def _assert_slots_below(bags):
    """Each key has a slot below of its own, and the others are free, or wait for a lease."""
    rows = device_rows_of(bags)
    for number, family in enumerate(rows.storage.families):
        if not family.below:
            continue
        tables = [table for table in sorted(rows.tiered) if rows.families[table] == number]
        owned = [slot for table in tables for slot, _entry in below_of(rows, table).values()]
        limbo = [slots.tolist() for table in tables for _lease, slots, _copies in table_of(bags, table)._limbo]
        free = family.free[int(rows.storage.taken[number]) :].tolist()
        all_slots = [*owned, *(slot for slots in limbo for slot in slots), *free]
        assert len(all_slots) == len(set(all_slots)) == family.slots


def assert_copies_sound(bags):
    """What is above is below too, where it says; what is clean is equal there; no slot is lost."""
    rows = device_rows_of(bags)
    above, storage = rows.above, rows.storage
    _assert_slots_below(bags)
    for number in sorted(rows.tiered):
        keys, slots = above.index.entries(number)
        assert torch.equal(above.index.find_keys(number, keys), slots)
        held = {}
        for some, theirs in zip(above._slots[number], above._homes[number], strict=True):
            held |= zip(some.tolist(), theirs.tolist(), strict=True)
        below = below_of(rows, number)
        wanted = [below[key] for key in keys.tolist()]
        assert [(held[slot] & 0xFFFFFFFF, held[slot] >> 32) for slot in slots.tolist()] == wanted
        homes = torch.tensor([slot for slot, _entry in wanted], dtype=torch.int32, device=slots.device)
        free = above._free(number).tolist()
        limbo = [slot for _lease, _slots, copies in table_of(bags, number)._limbo for slot in copies.tolist()]
        assert sorted([*free, *slots.tolist(), *limbo]) == sorted(held)
        assert all(held[slot] == -1 for slot in (*free, *limbo))
        family = rows.families[number]
        clean = (storage.read_flags(family, slots) & 2) == 0
        layout = storage.families[family].layout
        for read in (
            lambda at, family=family: storage.read(family, at),
            lambda at, family=family: storage.read_scores(family, at),
            *(lambda at, c=c, family=family: storage.read_state(family, c, at) for c in layout.columns),
        ):
            same(read(slots[clean]), read(homes[clean]), "a clean row")
        hbm = table_of(bags, number).config.tier(shoal.Hbm)
        assert above.bytes(number) <= (0 if hbm is None else hbm.bytes)


class Pair:
    """Both collections."""

    def __init__(self, tiers, whole, sound):
        """`sound`: raises where a collection with tiers contradicts itself."""
        self.tiers, self.whole, self.sound = tiers, whole, sound

    @property
    def both(self):
        return self.tiers, self.whole

    def forward(self, batch):
        """Both outputs, once they were compared, and both batches."""
        batches = [placed(batch), placed(batch)]
        outs = [module(one) for module, one in zip(self.both, batches, strict=True)]
        for ours, wanted in zip(*map(outputs, outs), strict=True):
            same(ours.detach(), wanted.detach(), "output")
        return outs, batches

    def step(self, batch, seed=0):
        """A step of both."""
        outs, batches = self.forward(batch)
        self.backward(outs, seed)
        if batches[0].weights_or_none() is not None:
            same(batches[0].weights().grad, batches[1].weights().grad, "the weights' gradient")

    def backward(self, outs, seed=0):
        """Both backwards."""
        for out in outs:
            backward(out, seed)

    def evaluate(self, batch):
        """Both outputs in eval, compared."""
        for module in self.both:
            module.eval()
        with torch.no_grad():
            self.forward(batch)
        for module in self.both:
            module.train()

    def each(self, work):
        """What both say to the same question."""
        return [work(module) for module in self.both]

    def check(self):
        """Nothing went wrong, and both hold the same and counted the same."""
        for module in self.both:
            module.check()
        self.sound(self.tiers)
        ours, wanted = self.tiers.state_dict(), self.whole.state_dict()
        assert list(ours) == list(wanted)
        for name, value in wanted.items():
            same(ours[name], value, name)
        for name in self.tiers.tables():
            counted, others = (module.table(name).stats().counters for module in self.both)
            assert counted == others

    def stats(self, tier, name="a"):
        """A tier of a table."""
        return self.tiers.table(name).stats().tiers[tier]


def assert_same_handles(pair, asked):
    """Both handles of table a answer the same."""
    for ask in ("lookup", "scores", "contains"):
        same(*pair.each(lambda module, ask=ask: getattr(module.table("a"), ask)(asked).float()))
    ours, wanted = pair.each(lambda module: module.table("a").state(asked))
    for name, value in wanted.items():
        same(ours[name], value, name)
    assert torch.equal(*pair.each(lambda module: module.table("a").keys()))
    assert len(pair.tiers.table("a")) == len(pair.whole.table("a"))


def assign_and_erase_between_steps(pair, steps, bags, keys):
    """Rows of table a (of dim 4) are assigned and erased between forwards and their backwards."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        outs, _ = pair.forward(random_kjt(["a"], bags=bags, keys=keys, seed=step))
        some = torch.randint(0, keys + 20, (20,), generator=generator).to(DEVICE)
        rows = torch.randn(20, 4, generator=generator).to(DEVICE)
        pair.each(lambda module, some=some, rows=rows: module.table("a").assign(some, rows))
        gone = torch.randint(0, keys + 20, (15,), generator=generator).to(DEVICE)
        assert len(set(pair.each(lambda module, gone=gone: module.table("a").erase(gone)))) == 1
        again, _ = pair.forward(random_kjt(["a"], bags=bags, keys=keys, seed=step + 20))
        pair.backward(outs, step)
        pair.sound(pair.tiers)
        pair.backward(again, step)
        del outs, again
        pair.each(lambda module, gone=gone: module.table("a").erase(gone[:5]))
        pair.sound(pair.tiers)


def do_anything(data, pair, pool, steps, most_waiting):
    """Whatever hypothesis draws, to a pair with the tables a (of dim 3) and b (2, which features a and b feed)."""
    some = st.lists(st.sampled_from(pool), max_size=20)
    waiting = []
    kinds = ["step", "step", "forward", "backward", "drop", "eval", "assign", "erase", "load", "stage"]
    for step in range(data.draw(steps)):
        do = data.draw(st.sampled_from(kinds))
        if do in ("step", "forward", "eval", "stage"):
            batch = kjt({"a": [data.draw(some), data.draw(some)], "b": [data.draw(some), []]})
        if do == "step":
            pair.step(batch, step)
        elif do == "forward" and len(waiting) < most_waiting:
            waiting.append(pair.forward(batch)[0])
        elif do == "stage":
            if (staging := pair.tiers.stage(placed(batch))) is not None:
                staging.read()
                staging.place(lambda: False)
                staging.release()
        elif do == "eval":
            pair.evaluate(batch)
        elif do == "backward" and waiting:
            pair.backward(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))), step)
        elif do == "drop":
            waiting.clear()
        elif do == "assign":
            keys = here(*data.draw(some), dtype=torch.int64)
            rows = torch.ones(len(keys), 2, device=DEVICE)
            pair.each(lambda module, keys=keys, rows=rows: module.table("b").assign(keys, rows))
        elif do == "erase":
            keys = here(*data.draw(some), dtype=torch.int64)
            pair.each(lambda module, keys=keys: module.table("a").erase(keys))
        elif do == "load":
            waiting.clear()
            state = pair.tiers.state_dict()
            pair.each(lambda module, state=state: module.load_state_dict(state))
        pair.sound(pair.tiers)
