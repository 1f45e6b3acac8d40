"""Batches of more rows than memory holds: they give what they give with memory for all rows, bit for bit."""

import gc
import os
import signal
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import assert_same_rows, kjt, memory, train_step
from support.sweeps import examples
from support.tiered import KINDS, assert_equal_outputs, below, collection, outputs

import shoal
from shoal import _native
from shoal.errors import BackwardError, CapacityError, NonFiniteError, OutOfMemoryError, StorageError
from shoal.storage import MemoryStorage

LITTLE = "8KiB"
DECAYED = shoal.AdamW(lr=0.1, weight_decay=0.1, bias_correction="global", clip=shoal.Clip(norm=0.5, value=0.3))
OPTIMIZERS = [
    shoal.SGD(lr=0.1),
    shoal.SGD(lr=0.1, momentum=0.9),
    shoal.Adagrad(lr=0.1, weight_decay=0.01),
    shoal.RowwiseAdagrad(lr=0.1),
    shoal.Adam(lr=0.1),
    DECAYED,
    shoal.PartialRowwiseAdam(lr=0.1),
    shoal.Ftrl(lr=0.1, l1=0.01),
    shoal.Assign(),
]


def pair(kind, folder, tables, size=LITTLE, **given_as):
    """The same collection with all the memory it wants, and with little."""
    tiers = [below(kind, folder)] if size is None else [shoal.Dram(size), below(kind, folder)]
    return collection(tables, **given_as), collection(tables, tiers, **given_as)


def gradients(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for tensor in tensors]


def backward(out, seed=0):
    tensors = outputs(out)
    torch.autograd.backward(tensors, gradients(tensors, seed))


def promoted(bags):
    """Rows that came into memory from below, of all tables."""
    return sum(table.tiers[0].promotions for table in bags.stats().values())


def counters(bags):
    return {name: (stats.counters, stats.step, stats.rows) for name, stats in bags.stats().items()}


def assert_same(plain, tiered):
    assert_same_rows(plain, tiered)
    assert counters(plain) == counters(tiered)
    for name, handle in plain.tables().items():
        keys = handle.keys()
        other = tiered.table(name)
        assert torch.equal(handle.scores(keys), other.scores(keys))
        for column, value in handle.state(keys).items():
            assert torch.equal(value, other.state(keys)[column]), (name, column)


@st.composite
def bags_of_keys(draw, features):
    """Ragged bags, some empty and some of more keys than a piece has, with keys that come again within and across."""
    size = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    longest = draw(st.sampled_from([3, 40, 400]))
    lengths = torch.randint(0, longest + 1, (len(features) * size,), generator=generator)
    lengths[torch.rand(len(lengths), generator=generator) < 0.3] = 0
    n = int(lengths.sum())
    most = draw(st.sampled_from([30, 1000, 10**6]))
    values = torch.randint(-most, most, (n,), generator=generator)
    weights = torch.randn(n, generator=generator) if draw(st.booleans()) else None
    return shoal.KeyedJaggedTensor(list(features), values, weights, lengths=lengths)


@pytest.mark.filterwarnings("ignore:.*gradients are off:shoal.errors.ModeWarning")
@settings(max_examples=examples(60))
@given(data=st.data())
def test_whatever_comes_gives_what_enough_memory_gives(data, tmp_path_factory):
    which = data.draw(st.sampled_from(["bags", "sequences"]))
    poolings = ["sum", "mean"] if which == "bags" else ["none"]
    read, write = shoal.Feature("z", "read"), shoal.Feature("y", "write")
    tables = [
        {
            "name": name,
            "dim": data.draw(st.sampled_from([1, 3, 5, 16, 32, 33, 64])),
            "features": features,
            "optimizer": data.draw(st.sampled_from(OPTIMIZERS)),
            "dtype": data.draw(st.sampled_from(["float32", "float16", "bfloat16"])),
            "pooling": data.draw(st.sampled_from(poolings)),
            "missing": data.draw(st.sampled_from(["init", "zero"])),
        }
        for name, features in (("a", ["x", "y"]), ("b", ["x", read]), ("c", ["z", write]))
    ]
    tables[data.draw(st.integers(0, 2))]["tiers"] = [shoal.Dram()]
    kind = data.draw(st.sampled_from(KINDS))
    both = plain, tiered = pair(kind, tmp_path_factory.mktemp("rows"), tables, which=which)
    waiting = []
    for step in range(data.draw(st.integers(1, 6))):
        batch = data.draw(bags_of_keys(["x", "y", "z"]))
        action = data.draw(st.sampled_from(["train", "train", "wait", "drop", "no_grad", "eval", "lookup", "erase"]))
        if action in ("train", "wait", "drop"):
            outs = [bags(batch) for bags in both]
            assert_equal_outputs(outs, step)
            if action == "train":
                for out in outs:
                    backward(out, step)
            elif action == "wait":
                waiting.append(outs)
        elif action == "no_grad":
            with torch.no_grad():
                outs = [bags(batch) for bags in both]
            assert_equal_outputs(outs, step)
        elif action == "eval":
            outs = [bags.eval()(batch) for bags in both]
            assert_equal_outputs(outs, step)
            for bags in both:
                bags.train()
        elif action == "lookup":
            assert_equal_outputs([bags.lookup(batch) for bags in both], step)
        else:
            keys = batch.values()[::2]
            assert len({bags.table("a").erase(keys) for bags in both}) == 1
        outs = out = None
        if len(waiting) == 2:
            for out in waiting.pop(0):
                backward(out, step)
            out = None
    for one in waiting:
        for out in one:
            backward(out)
        out = None
    assert_same(plain, tiered)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_takes_the_same_steps(optimizer, dtype, kind, tmp_path):
    table = {"name": "t", "dim": 7, "features": ["x", "y"], "optimizer": optimizer, "dtype": dtype}
    plain, tiered = pair(kind, tmp_path, [table])
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        keys = torch.randint(0, 1500, (2000,), generator=generator).tolist()
        batch = kjt({"x": [keys[:900], keys[900:1000]], "y": [[], keys[1000:]]})
        outs = [plain(batch), tiered(batch)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert promoted(tiered) == 0  # in pieces, each time
    assert_same(plain, tiered)


def test_memory_that_is_implied_serves_what_does_not_fit_into_it(tmp_path):
    """[Ssd(...)] alone has 64 MiB to work in."""
    table = {"name": "t", "dim": 128, "optimizer": shoal.Adam(lr=0.1)}
    plain, tiered = pair("ssd", tmp_path, [{**table, "tiers": None}])
    tiered = collection([table], [shoal.Ssd(tmp_path / "own", "1GiB")])
    batch = shoal.KeyedJaggedTensor(["t"], torch.randperm(60_000), lengths=torch.full((1000,), 60))
    assert torch.equal(plain.lookup(batch).values(), tiered.lookup(batch).values())
    for step in range(2):
        outs = [plain(batch), tiered(batch)]
        assert_equal_outputs(outs, step)
        for out in outs:
            backward(out, step)
    assert tiered.stats()["t"].tiers[0].bytes <= 64 << 20
    outs = [bags.eval()(batch) for bags in (plain, tiered)]
    assert_equal_outputs(outs)
    keys = torch.arange(60_000)
    assert torch.equal(plain.table("t").lookup(keys), tiered.table("t").lookup(keys))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [5, 64])
def test_a_bag_of_more_keys_than_a_piece_is_summed_in_order(pooling, output_dtype, dim, tmp_path):
    tables = [{"name": "t", "dim": dim, "pooling": pooling}]
    made = [shoal.Table(**one) for one in tables]
    plain = shoal.EmbeddingBagCollection(made, seed=3, output_dtype=output_dtype)
    made = [shoal.Table(**one, tiers=[shoal.Dram(LITTLE), MemoryStorage]) for one in tables]
    tiered = shoal.EmbeddingBagCollection(made, seed=3, output_dtype=output_dtype)
    weights = {"t": [[3.0], [0.1 * (n % 7) - 0.2 for n in range(3000)], [], [-1.0]]}
    for given_weights in (None, weights):
        batch = kjt({"t": [[1], [n * n % 2003 for n in range(3000)], [], [2]]}, weights=given_weights)
        outs = [plain(batch), tiered(batch)]
        assert_equal_outputs(outs)
        for out in outs:
            backward(out)
    assert_same_rows(plain, tiered)


def test_per_sample_weights_get_their_gradient(tmp_path):
    read, write = shoal.Feature("x", "read"), shoal.Feature("x", "write")
    tables = [
        {"name": "a", "dim": 5, "features": ["x"], "pooling": "mean", "dtype": "bfloat16"},
        {"name": "b", "dim": 16, "features": [read, "y"], "missing": "zero"},
        {"name": "c", "dim": 3, "features": [write]},
    ]
    both = plain, tiered = pair("ssd", tmp_path, tables)
    for training in (True, False):
        generator = torch.Generator().manual_seed(1)
        keys = torch.randint(0, 700, (1500,), generator=generator).tolist()
        grads = []
        for bags in both:
            batch = kjt({"x": [keys[:1000], [], keys[:5]], "y": [keys[5:7], keys[1000:], []]}, weights=0.7)
            batch.weights().requires_grad_()
            backward(bags.train(training)(batch))
            grads.append(batch.weights().grad)
        assert torch.equal(*grads) and bool(grads[0].any())
    assert_same(plain, tiered)


def test_lookups_of_other_threads_go_on(tmp_path):
    plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 8}])
    batch = kjt({"t": [list(range(k, 3000, 7)) for k in range(7)]})
    for bags in (plain, tiered):
        train_step(bags, batch)
    wanted = plain.lookup(batch).values()
    wrong, threads = [], []

    def look():
        for _ in range(5):
            if not torch.equal(tiered.lookup(batch).values(), wanted):
                wrong.append(1)

    for _ in range(4):
        threads.append(threading.Thread(target=look))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tiered.stats()["t"].counters["lookups"] == 3000 + 20 * 3000
    assert tiered.stats()["t"].counters["hits"] == 20 * 3000


def test_nothing_leaves_memory_for_a_batch_that_it_cannot_hold(tmp_path):
    _, bags = pair("memory", tmp_path, [{"name": "t", "dim": 8}])
    train_step(bags, kjt({"t": [list(range(60))]}))
    before = bags.stats()["t"].tiers
    bags.eval()(kjt({"t": [list(range(5000))]}))
    bags.lookup(kjt({"t": [list(range(5000))]}))
    after = bags.stats()["t"].tiers
    assert after[0].rows == before[0].rows and after[0].demotions == before[0].demotions


def test_other_tables_of_the_batch_keep_their_budgets(tmp_path):
    """A table without a tier below memory refuses the batch, and no table has changed."""
    tables = [
        {"name": "a", "dim": 8, "features": ["x"]},
        {"name": "b", "dim": 8, "features": ["x"], "tiers": [shoal.Dram("64KiB")]},
    ]
    _, bags = pair("ssd", tmp_path, tables)
    train_step(bags, kjt({"x": [list(range(50))]}))
    before = memory(bags)
    with pytest.raises(CapacityError, match=r"table 'b'.*Dram\('64KiB'\)"):
        bags(kjt({"x": [list(range(5000))]}))
    assert_same_content(bags, before)


def test_the_lowest_tier_still_bounds_the_table(tmp_path):
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(LITTLE), shoal.Ssd(tmp_path, "512KiB")])
    train_step(bags, kjt({"t": [[1, 2, 3]]}))
    before = memory(bags)
    capacity = bags.stats()["t"].tiers[1].capacity
    with pytest.raises(CapacityError, match=rf"its 3 rows and {capacity} new ones.*Raise Ssd\(size=\)"):
        bags(kjt({"t": [list(range(10, 10 + capacity))]}))
    assert_same_content(bags, before)
    train_step(bags, kjt({"t": [list(range(10, 10 + capacity - 3))]}))
    assert len(bags.table("t")) == capacity


def assert_same_content(bags, before):
    """Rows, steps and scores are those of `memory` before."""
    now = bags.state_dict()
    assert list(now) == list(before[0])
    assert all(torch.equal(value, now[name]) for name, value in before[0].items())


# ---- what gradients may be


def test_gradients_that_are_not_finite_change_nothing(tmp_path):
    _, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 4}])
    out = bags(kjt({"t": [list(range(900)), [5]]})).values()
    before = memory(bags)
    grad = torch.ones(out.shape)
    grad[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="No row was changed"):
        out.backward(grad, retain_graph=True)
    assert_same_content(bags, before)
    out.backward(torch.ones(out.shape))


def test_rows_whose_gradients_overflow_are_left_alone(tmp_path):
    both = plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 4}])
    batch = kjt({"t": [list(range(900)), [5, 800], [5, 800]]})
    for bags in both:
        out = bags(batch).values()
        grad = torch.ones(out.shape)
        grad[1:] = 1e16
        with pytest.raises(NonFiniteError, match="2 of 't'"):
            out.backward(grad)
    assert_same(plain, tiered)


def test_a_gradient_of_a_row_erased_since_is_dropped(tmp_path):
    both = plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 4}])
    batch = kjt({"t": [list(range(900))]})
    outs = [bags(batch) for bags in both]
    for bags in both:
        assert bags.table("t").erase(list(range(100, 500))) == 400
        bags.table("t").assign([100, 499], torch.ones(2, 4))  # others of the same keys
    for out in outs:
        backward(out)
    assert tiered.stats()["t"].counters["dropped_gradients"] == 400
    assert_same(plain, tiered)


@pytest.mark.parametrize("missing", ["init", "zero"])
@pytest.mark.parametrize("change", ["erase", "erase and assign", "assign"])
def test_weight_gradients_are_of_the_rows_that_the_forward_saw(change, missing, tmp_path):
    table = {"name": "t", "dim": 4, "features": ["x", shoal.Feature("y", "read")], "missing": missing}
    for training in (True, False):
        both = plain, tiered = pair("ssd", tmp_path / str(training), [table])
        grads = []
        for bags in both:
            train_step(bags, kjt({"x": [list(range(600))], "y": [[]]}))
            batch = kjt({"x": [list(range(900)), [5]], "y": [list(range(500, 1500)), []]}, weights=0.5)
            batch.weights().requires_grad_()
            out = bags.train(training)(batch).values()
            handle = bags.table("t")
            for keys, times in ((list(range(100, 300)), 1), (list(range(200, 310)), 2), (list(range(1400, 1420)), 3)):
                if "erase" in change:
                    handle.erase(keys)
                if "assign" in change:
                    for some in torch.tensor(keys).split(10):
                        handle.assign(some, torch.full((len(some), 4), float(times)))
            # Keys that had no row get one, and lose it again.
            handle.assign([1499, 1498], torch.ones(2, 4))
            handle.erase([1498])
            out.sum().backward()
            grads.append(batch.weights().grad)
        assert torch.equal(*grads)
        assert_same_rows(plain, tiered)


def test_a_backward_happens_once(tmp_path):
    _, bags = pair("ssd", tmp_path, [{"name": "t", "dim": 4}])
    out = bags(kjt({"t": [list(range(900))]})).values()
    out.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="applied already"):
        out.sum().backward()
    out = bags(kjt({"t": [list(range(900))]})).values()
    bags.load_state_dict(bags.state_dict())
    with pytest.raises(BackwardError, match="released"):
        out.sum().backward()


def test_a_forward_that_is_dropped_was_a_use(tmp_path):
    both = plain, tiered = pair("ssd", tmp_path, [{"name": "t", "dim": 4}])
    for bags in both:
        train_step(bags, kjt({"t": [[1, 2]]}))
        bags(kjt({"t": [list(range(900))]}))
        gc.collect()
        train_step(bags, kjt({"t": [[1, 2]]}))
    assert_same(plain, tiered)


# ---- prefetch


@pytest.mark.parametrize("kind", KINDS)
def test_prefetch_before_batches_of_all_sizes(kind, tmp_path):
    both = plain, tiered = pair(kind, tmp_path, [{"name": "t", "dim": 6}])

    def batches():
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            keys = torch.randint(0, 1500, (40 if step % 3 else 2000,), generator=generator).tolist()
            yield kjt({"t": [keys[::2], keys[1::2]]})

    for bags in both:
        loader = batches() if bags is plain else shoal.prefetch(batches(), bags, depth=3)
        for step, batch in enumerate(loader):
            backward(bags(batch), step)
    assert_same(plain, tiered)


# ---- changes


def test_a_log_has_what_changed_below_memory(tmp_path):
    bags = collection([{"name": "t", "dim": 4}], [shoal.Dram(LITTLE), MemoryStorage])
    log = shoal.ChangeLog(tmp_path / "log")
    log.commit(bags)
    for step in range(3):
        train_step(bags, kjt({"t": [list(range(step * 100, 900 + step * 100))]}), seed=step)
        log.commit(bags)
    with torch.no_grad():
        bags(kjt({"t": [list(range(1100))]}))
    log.commit(bags)
    log.close()
    again = collection([{"name": "t", "dim": 4}])
    shoal.recover(tmp_path / "log", again)
    assert_same_rows(bags, again)
    keys = bags.table("t").keys()
    assert torch.equal(bags.table("t").scores(keys), again.table("t").scores(keys))


# ---- signals


class Stop(Exception):
    """What a handler of a signal raises."""


class Signalled(MemoryStorage):
    """A signal comes after the nth write from then on."""

    comes: int | None = None

    def write(self, keys, rows):
        super().write(keys, rows)
        if Signalled.comes is not None:
            Signalled.comes -= 1
            if Signalled.comes < 0:
                Signalled.comes = None
                os.kill(os.getpid(), signal.SIGUSR1)


class Handler:
    def plain(self, _number, _frame):
        raise Stop

    def __call__(self, number, frame):
        self.plain(number, frame)


def raise_stop(_number, _frame):
    raise Stop


@pytest.mark.parametrize(
    "handler",
    [raise_stop, Handler().plain, Handler(), partial(raise_stop)],
    ids=["function", "method", "object", "partial"],
)
def test_what_a_handler_raises_within_a_storage_is_an_interrupt_and_no_failure(handler):
    table = {"name": "t", "dim": 4, "optimizer": shoal.Adam(lr=0.1)}
    plain, bags = collection([table]), collection([table], [shoal.Dram(LITTLE), Signalled])
    outs = [one(kjt({"t": [list(range(900))]})).values().sum() for one in (plain, bags)]
    outs[0].backward()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        Signalled.comes = 2
        with pytest.raises(Stop):
            outs[1].backward(retain_graph=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(BackwardError, match="applied already"):
        outs[1].backward()
    assert bags.stats()["t"].tiers[1].failures == 0
    assert_same(plain, bags)


# ---- storages that fail


class Failing(MemoryStorage):
    """Fails where it is told to: before the nth call of that name from then on."""

    fails: tuple[str, int] | None = None
    error: type[Exception] = OSError

    def _count(self, call):
        if Failing.fails is None or Failing.fails[0] != call:
            return
        Failing.fails = (call, Failing.fails[1] - 1)
        if Failing.fails[1] < 0:
            raise Failing.error(f"{call} failed")

    def read(self, keys):
        self._count("read")
        return super().read(keys)

    def write(self, keys, rows):
        self._count("write")
        super().write(keys, rows)

    def erase(self, keys):
        self._count("erase")
        super().erase(keys)


@pytest.fixture(autouse=True)
def _nothing_fails():
    Failing.fails, Failing.error = None, OSError
    _native.clear_faults()
    yield
    Failing.fails = None
    _native.clear_faults()


def failing_pair():
    tables = [{"name": "t", "dim": 4, "optimizer": shoal.Adam(lr=0.1)}]
    both = collection(tables), collection(tables, [shoal.Dram(LITTLE), Failing])
    batch = kjt({"t": [list(range(450)), list(range(400, 900))]})
    for bags in both:
        train_step(bags, batch)
    return *both, batch


@pytest.mark.filterwarnings("ignore:.*gradients are off:shoal.errors.ModeWarning")
@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_fails_changes_nothing(call, training):
    _plain, bags, _batch = failing_pair()
    more = kjt({"t": [list(range(700, 1100))]})
    rows, scores = bags.state_dict(), bags.table("t").scores(range(900))
    for nth in (*range(4), *range(4, 100, 3)):
        Failing.fails = (call, nth)
        try:
            bags.train(training)(more)
        except OSError:
            gc.collect()
            Failing.fails = None
            now = bags.state_dict()
            assert all(torch.equal(value, now[name]) for name, value in rows.items())
            assert torch.equal(scores, bags.table("t").scores(range(900))) and len(bags.table("t")) == 900
        else:
            break
    assert nth > (3 if call == "read" or training else -1)


def test_a_backward_whose_rows_cannot_be_read_changes_nothing():
    """All are read before the first of them changes."""
    plain, bags, batch = failing_pair()
    outs = [plain(batch).values(), bags(batch).values()]
    before, step = bags.state_dict(), bags.stats()["t"].step
    pieces = 0
    for nth in range(100):
        Failing.fails = ("read", nth)
        try:
            outs[1].sum().backward(retain_graph=True)
        except OSError as error:
            Failing.fails = None
            if "took it" in str(getattr(error, "__notes__", "")):
                break  # read again for the second piece
            pieces += 1
            now = bags.state_dict()
            assert all(torch.equal(value, now[name]) for name, value in before.items())
            assert bags.stats()["t"].step == step
    assert pieces > 3


def test_a_backward_that_fails_in_the_middle_says_what_did_not_take_the_step():
    plain, bags, batch = failing_pair()
    out = bags(batch).values()
    before = bags.table("t").lookup(range(900))
    Failing.fails = ("write", 2)
    with pytest.raises(OSError, match="write failed") as failed:
        out.sum().backward(retain_graph=True)
    Failing.fails = None
    note = " ".join(failed.value.__notes__)
    assert "of the 900 keys of table 't'" in note and "the step counts" in note
    left = int(note.split("not hold" if "not hold" in note else "holds: ")[1].split(" of the 900")[0])
    plain(batch).values().sum().backward()
    now = bags.table("t").lookup(range(900))
    taken = (now != before).any(1)
    assert 0 < left < 900 and int((~taken).sum()) == left
    assert torch.equal(now[taken], plain.table("t").lookup(range(900))[taken])
    assert bags.stats()["t"].step == plain.stats()["t"].step
    with pytest.raises(BackwardError, match="applied already"):
        out.sum().backward()
    train_step(bags, batch)


def test_memory_that_is_refused_in_the_middle_of_a_backward_says_what_did_not_take_the_step():
    _plain, bags, batch = failing_pair()
    out = bags(batch).values()
    Failing.fails, Failing.error = ("write", 2), MemoryError
    with pytest.raises(OutOfMemoryError) as failed:
        out.sum().backward()
    assert "of the 900 keys of table 't'" in " ".join(failed.value.__notes__)


def test_an_erase_that_fails_drops_no_gradient_of_a_row_that_stays():
    plain, bags, batch = failing_pair()
    outs = [plain(batch).values(), bags(batch).values()]
    Failing.fails = ("erase", 0)
    with pytest.raises(OSError, match="erase failed"):
        bags.table("t").erase(range(100, 500))
    Failing.fails = None
    for out in outs:
        out.sum().backward()
    assert bags.stats()["t"].counters["dropped_gradients"] == 0
    assert_same_rows(plain, bags)


def test_rows_that_a_disk_lost_are_told_by_the_lookup(tmp_path):
    bags = collection([{"name": "t", "dim": 8}], [shoal.Dram(LITTLE), shoal.Ssd(tmp_path, "16MiB")])
    batch = kjt({"t": [list(range(2000))]})
    train_step(bags, batch)
    _native.inject_fault(_native.FileCall.read, "", 5, 0, 1 << 30)
    with pytest.raises(StorageError) as lost:
        bags.eval()(batch)
    assert lost.value.table == "t" and len(lost.value.keys)
    _native.clear_faults()
    bags(batch)
