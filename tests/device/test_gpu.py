"""What only a GPU can show: that no thread waits for it, that lookups can be captured, and rows can be many."""

import threading

import numpy as np
import pytest
import torch
from support.device_tables import Twins
from support.inside import device_rows_of, group_of
from support.torch_private import keep_gpu_busy

import shoal
from shoal import Table
from shoal.errors import DeviceError
from shoal.ops.sort import Sorter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def batch(features, bags=500, bag=4, keys=1000):
    """A batch that knows how many keys each feature has."""
    values = torch.randint(0, keys, (len(features) * bags * bag,), device="cuda")
    offsets = torch.arange(0, len(values) + 1, bag, device="cuda")
    made = shoal.KeyedJaggedTensor(features, values, lengths=offsets.diff(), offsets=offsets)
    made._length_per_key = [bags * bag] * len(features)
    return made


def trained(*tables):
    bags = shoal.EmbeddingBagCollection(list(tables), device="cuda")
    features = batch([table.name for table in tables])
    for _ in range(5):
        bags(features).values().sum().backward()
    return bags, features


def test_a_steady_step_and_an_eval_lookup_wait_for_nothing():
    bags, features = trained(Table("a", 64), Table("b", 64), Table("c", 8, optimizer=shoal.Adam()))
    gradient = torch.randn_like(bags(features).values())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            bags(features).values().backward(gradient)
        bags.eval()
        with torch.no_grad():
            bags(features)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tiered(rows, dim=64):
    """Tables of which so many rows are in device memory."""
    size = rows * (4 * dim * 3 + 150)
    tiers = [shoal.Hbm(size), shoal.Dram()]
    return [Table(name, dim, optimizer=shoal.Adam(lr=0.1), tiers=tiers) for name in ("a", "b")]


def test_a_step_whose_rows_come_up_from_host_memory_waits_for_nothing():
    bags, _ = trained(*tiered(2000))
    batches = [batch(["a", "b"], keys=5000) for _ in range(10)]
    gradient = torch.randn_like(bags(batches[0]).values())
    for one in 3 * batches:  # until there is room for as many batches as the host is ahead
        bags(one).values().backward(gradient)
    before = bags.table("a").stats().tiers[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in batches:
            bags(one).values().backward(gradient)
        bags.eval()
        with torch.no_grad():
            bags(batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = bags.table("a").stats().tiers[0]
    assert after.promotions > before.promotions and after.demotions > before.demotions


@pytest.mark.parametrize("rows", [3000, 20_000, 200_000])
def test_tables_of_two_tiers_train_to_the_bit_as_those_of_one(rows):
    two = shoal.EmbeddingBagCollection(tiered(rows), device="cuda", seed=3)
    whole = [Table(table.name, table.dim, optimizer=table.optimizer) for table in two._configs]
    one = shoal.EmbeddingBagCollection(whole, device="cuda", seed=3)
    gradient = torch.randn(5000, 128, device="cuda")
    waiting = []
    for step in range(30):
        features = batch(["a", "b"], bags=5000, keys=40_000 if step < 20 else 10_000)
        outs = [bags(features).values() for bags in (two, one)]
        assert torch.equal(*outs)
        waiting.append(outs)
        if step % 3:  # two at work now and then
            for ready in waiting.pop(0):
                ready.backward(gradient)
    while waiting:
        for ready in waiting.pop():
            ready.backward(gradient)
    two.check()
    wanted = one.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in two.state_dict().items())
    assert two.table("a").stats().tiers[0].bytes <= two._configs[0].tiers[0].bytes


def test_a_collection_with_pinned_memory_can_be_dropped_while_the_device_works():
    for _ in range(3):
        bags, features = trained(*tiered(500))
        bags(features).values().sum().backward()
        del bags
    torch.cuda.synchronize()


def test_an_eval_lookup_is_captured_into_a_graph():
    bags, features = trained(Table("a", 64), Table("b", 64))
    bags.eval()
    with torch.no_grad():
        wanted = bags(features).values()
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            bags(features)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            out = bags(features).values()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_streams_follow_each_other():
    bags, features = trained(Table("a", 64))
    wanted = bags(features).values().detach().clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        bags(features).values().backward(torch.ones_like(wanted))
    bags.eval()
    assert not torch.equal(bags(features).values(), wanted)


@pytest.mark.parametrize("dim", [3, 8, 64])
def test_gradients_may_lie_anywhere(dim):
    bags = shoal.EmbeddingBagCollection([Table("a", dim, optimizer=shoal.SGD(lr=1.0))], device="cuda")
    keys = torch.arange(100, device="cuda")
    features = shoal.KeyedJaggedTensor(["a"], keys, lengths=torch.ones_like(keys))
    for offset in (0, 1, 2, 4):  # compiled for the first, and not to be used for the others
        out = bags(features).values()
        before = bags.table("a").lookup(keys)
        gradient = torch.randn(out.numel() + offset, device="cuda")[offset:].view(out.shape)
        out.backward(gradient)
        assert torch.equal(bags.table("a").lookup(keys), before - gradient)


def test_a_handle_follows_other_streams():
    bags, features = trained(Table("a", 64, optimizer=shoal.SGD(lr=1.0)))
    keys = torch.arange(1000, device="cuda")
    ones = torch.ones_like(bags(features).values())
    torch.cuda.synchronize()
    before, aside = bags.table("a").lookup(keys), torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(20):
            bags(features).values().backward(ones)
    after = bags.table("a").lookup(keys)  # at once, on the first stream
    torch.cuda.synchronize()
    assert torch.equal(after, bags.table("a").lookup(keys))
    counts = torch.bincount(features.values(), minlength=1000).float()
    torch.testing.assert_close(after, before - 20 * counts[:, None])


def test_first_lookups_of_several_threads_are_whole():
    bags, features = trained(Table("a", 64), Table("b", 8))
    bags.eval()
    wanted = bags(features).values()
    for _ in range(5):
        group_of(bags)._plans.forget()  # nothing is compiled for this order of features
        group_of(bags)._newest_plan = None
        outs = [None] * 4

        def look(number, outs=outs):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                outs[number] = bags(features).values()
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=look, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(out, wanted) for out in outs)


def test_an_output_of_more_than_2_to_the_31_elements():
    bags = shoal.EmbeddingBagCollection([Table("a", 1024, optimizer=shoal.SGD(lr=1.0))], device="cuda")
    many = 2**21 + 100
    values = torch.arange(many, device="cuda") % 50
    values[-1] = 77
    features = shoal.KeyedJaggedTensor(["a"], values, lengths=torch.ones_like(values))
    out = bags(features).values()
    before = bags.table("a").lookup([77])
    gradient = torch.zeros_like(out)
    gradient[-1] = 1.0
    out.backward(gradient)
    assert torch.equal(bags.table("a").lookup([77]), before - 1.0)
    bags.check()


def test_one_key_a_hundred_thousand_times_is_summed_alike_every_time():
    rows = []
    for _ in range(2):
        bags = shoal.EmbeddingBagCollection([Table("a", 64)], device="cuda")
        torch.manual_seed(0)
        values = torch.cat([torch.zeros(100_000), torch.arange(5000)]).long().cuda()
        features = shoal.KeyedJaggedTensor(["a"], values, lengths=torch.full((21_000,), 5, device="cuda"))
        out = bags(features).values()
        out.backward(torch.randn_like(out))
        rows.append(bags.table("a").lookup(torch.arange(5000, device="cuda")))
    assert torch.equal(*rows)


def test_a_group_of_more_than_2_to_the_31_elements():
    bags = shoal.EmbeddingBagCollection([Table("a", 256, optimizer=shoal.SGD(lr=1.0))], device="cuda")
    group, many = group_of(bags), 9_000_000  # x 256 elements
    for keys in torch.arange(many, device="cuda").split(1 << 20):
        group._rows.upsert(0, keys)
    far = torch.tensor([many - 1, 0], device="cuda")
    before = bags.table("a").lookup(far)
    features = shoal.KeyedJaggedTensor(["a"], far, lengths=torch.ones(2, dtype=torch.int64, device="cuda"))
    out = bags(features).values()
    assert torch.equal(out, before)
    out.backward(torch.ones_like(out))
    assert torch.equal(bags.table("a").lookup(far), before - 1.0)
    bags.check()


def test_a_short_training_loop():
    """Small and of every kind: what scripts/gpu runs under compute-sanitizer."""
    adam = shoal.Adam(lr=0.01)
    twins = Twins(Table("a", 5), Table("b", 8, pooling="mean", optimizer=adam), Table("c", 33, dtype="bfloat16"))
    for step in range(4):
        twins.step(_small(step), seed=step)
    twins.check()


def _small(seed, size=16):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (3 * size,), generator=generator)
    values = torch.randint(-30, 30, (int(lengths.sum()),), generator=generator)
    return shoal.KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)


def test_batches_of_other_sizes_on_other_streams_agree_with_host_memory():
    twins = Twins(*(Table(name, 6, optimizer=shoal.Adam(lr=0.1)) for name in "abc"))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for step, size in enumerate([16, 3, 0, 16, 200, 0, 1, 16, 16, 2000, 16, 5]):
        with torch.cuda.stream(streams[step % 3 % 2]):
            twins.step(_small(step, size), seed=step)
    twins.check()


def test_a_thread_that_asked_cuda_for_nothing_yet_can_look_up():
    bags, features = trained(Table("a", 64))
    outs = []

    def look():
        with torch.no_grad():
            outs.append(bags(features).values())

    for mode in (bags.eval, bags.train):
        mode()
        look()
        look()  # from now on the core launches
        torch.cuda.synchronize()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(outs) == 6 and all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_training_is_not_captured():
    bags, features = trained(Table("a", 64))
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=aside), pytest.raises(DeviceError, match="being captured"):
        bags(features)
    bags(features).values().sum().backward()
    bags.check()


@pytest.mark.filterwarnings("error")
def test_empty_batches_come_again_and_again():
    bags, _features = trained(Table("a", 64))
    offsets = torch.zeros(5, dtype=torch.int64, device="cuda")
    values = torch.empty(0, dtype=torch.int64, device="cuda")
    empty = shoal.KeyedJaggedTensor(["a"], values, lengths=offsets.diff(), offsets=offsets)
    for _ in range(4):
        bags(empty).values().sum().backward()
    bags.check()


def test_nobody_hears_of_a_step_before_it_is_over():
    bags, features = trained(Table("a", 64))
    ledger = device_rows_of(bags).ledger
    while ledger.sent < 2 * ledger.copies:  # each event was recorded before
        bags(features).values().sum().backward()
    bags.check()
    out = bags(features).values()
    keep_gpu_busy(500_000_000)
    bags(features).values().sum().backward()
    out.sum().backward()
    told = [ledger._events[number % ledger.copies].query() for number in range(ledger.sent - 3, ledger.sent)]
    heard = ledger.hear()
    torch.cuda.synchronize()
    assert told == [False] * 3
    assert heard is not None and heard[0] == ledger.sent - 3
    assert ledger.hear()[0] == ledger.sent


def sorted_by_numpy(slots):
    order = np.argsort(slots.cpu().numpy(), kind="stable")
    return slots.cpu()[order], torch.from_numpy(order)


def test_slots_in_the_same_memory_are_sorted_by_a_graph_that_reads_them_anew():
    sorter, device = Sorter(torch.device("cuda", 0)), torch.device("cuda", 0)
    calls = []
    for n in (40_000, 30_000, 50_000):
        slots = torch.empty(n, dtype=torch.int32, device=device)
        calls.append((slots, torch.empty_like(slots), torch.empty_like(slots, dtype=torch.int64)))
    for step in range(24):
        slots, ordered, order = calls[step % 2 if step < 12 else step % 3]
        torch.randint(-1, 1000, slots.shape, out=slots)
        sorter.sort(slots, ordered, order)
        held = [torch.full_like(slots, 7) for _ in range(8)]  # would be in the sort's memory, were that free
        for given, wanted in zip((ordered, order), sorted_by_numpy(slots), strict=True):
            assert torch.equal(given.cpu(), wanted), step
        assert all(bool((one == 7).all()) for one in held)
        if step == 11:
            assert len(sorter._graphs) == 2
            torch.cuda.empty_cache()
    assert len(sorter._graphs) == 3 and sorter._may_capture


def test_training_is_the_same_where_sorts_are_not_captured(monkeypatch):
    values = torch.randint(0, 300, (4000,), device="cuda")
    features = shoal.KeyedJaggedTensor(["a"], values, lengths=torch.full((400,), 10, device="cuda"))
    grad = torch.randn(400, 16, device="cuda")
    rows = []
    for _ in range(2):
        bags = shoal.EmbeddingBagCollection([Table("a", 16, optimizer=shoal.Adam(lr=0.1))], device="cuda")
        for _ in range(6):
            bags(features).values().backward(grad)
        rows.append(bags.table("a").lookup(torch.arange(300, device="cuda")))
        monkeypatch.setattr(Sorter, "_was_seen", lambda *_: False)
    assert torch.equal(*rows)


def test_prefetch_moves_batches_of_the_host_in_place():
    """To one collection and to two, and the run is the same as with batches that were there."""
    tables = [Table("a", 16, optimizer=shoal.Adam())]

    def loader():
        generator = torch.Generator().manual_seed(3)
        for _ in range(20):
            values = torch.randint(0, 500, (400,), generator=generator)
            yield shoal.KeyedJaggedTensor(["a"], values, lengths=torch.full((100,), 4))

    plain, moved, other = (shoal.EmbeddingBagCollection(tables, device="cuda", seed=1) for _ in range(3))
    for features in loader():
        plain(features.to("cuda")).values().sum().backward()
    for features in shoal.prefetch(loader(), [moved, other]):
        assert features.values().is_cuda
        moved(features).values().sum().backward()
        other(features).values().sum().backward()
        kept = features
    assert not kept.values().is_cuda and not kept.offsets().is_cuda
    for bags in (moved, other):
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in bags.state_dict().items())
