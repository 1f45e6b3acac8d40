"""A version has each key of a table once, and scores that are numbers: reading a log finds versions that have not."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import find
from support.batches import kjt
from support.forged import Forged
from support.hostile import key_twice_in_a_snapshot

import shoal
from shoal.errors import NonFiniteWarning, StorageError
from shoal.log.keys import InOrder, KeysOnce, Seen
from shoal.log.reader import SnapshotWarning
from shoal.log.repair import RepairWarning
from shoal.log.snapshot import buckets_of
from shoal.records import Layout, Rows, layout_of
from shoal.records.frames import FrameHeader, Kind, encode_deletes

LAYOUT = Layout("a", 2)


def table():
    return shoal.EmbeddingBagCollection([shoal.Table("a", dim=2, optimizer=shoal.SGD(lr=0.5))], seed=0)


def rows(keys, score=0.0):
    keys = torch.tensor(keys, dtype=torch.int64)
    return Rows(keys, torch.zeros(len(keys), 2), {}, torch.full((len(keys),), score, dtype=torch.float64))


@pytest.fixture
def log(tmp_path):
    """A log whose first version is sound; `pieces` becomes the second."""

    def written(pieces):
        with shoal.ChangeLog(tmp_path / "log") as log:
            log.commit_rows(LAYOUT, [rows([1, 2, 3])])
            log.commit_rows(LAYOUT, pieces)
        return tmp_path / "log"

    return written


@pytest.mark.parametrize(
    ("pieces", "key"),
    [
        ([[5, 5]], 5),
        ([[7, 5, 5, 6]], 5),
        ([[1, 2, 3], [4, 5, 3]], 3),
        ([[1], [2], [3], [4], [1]], 1),
        ([[1, 2], [3], [3]], 3),
        ([[0, -(2**63), 2**63 - 1], [-(2**63)]], -(2**63)),
    ],
)
def test_a_key_that_comes_twice_is_named_by_who_reads_it(log, pieces, key):
    path = log(map(rows, pieces))
    wanted = rf"segments/0+1\.seg\] version 2, .*table 'a': wanted each key once in a version; got key {key} again"
    bags = table()
    bags.table("a").assign([9], torch.ones(1, 2))
    for read in (shoal.load, shoal.recover):
        with pytest.raises(StorageError, match=wanted):
            read(path, bags, progress=False)
        assert len(bags.table("a")) == 0, "and no index has it twice"
    with shoal.open_log(path) as opened:
        report = opened.verify()
        assert len(report.problems) == 1
        with pytest.raises(StorageError, match=wanted):
            list(opened.at(2).rows("a"))
        with pytest.raises(StorageError, match=wanted):
            [list(one.changes()) for one in opened.tail()]
    with pytest.raises(StorageError, match=wanted):
        raise StorageError(report.problems[0])
    with pytest.warns(RepairWarning, match=f"got key {key} again"), shoal.ChangeLog(path, repair=True) as repaired:
        assert repaired.version == 1
    shoal.load(path, bags, progress=False)
    assert bags.table("a").keys().tolist() == [1, 2, 3]


def test_a_key_that_a_version_puts_and_deletes(log):
    path = log([rows([4, 5, 6])])

    def change(frames):
        at = next(at for at, (header, _) in enumerate(frames) if header.version == 2 and header.kind is Kind.PUTS)
        pieces = encode_deletes(torch.tensor([7, 5]), LAYOUT, table=0, version=2)
        deletes = FrameHeader.unpack(pieces[0], "test")
        return [*frames[: at + 1], (deletes, b"".join(pieces[1:])[: deletes.payload_bytes]), *frames[at + 1 :]]

    Forged(path).write_segment(change)
    with pytest.raises(StorageError, match=r"version 2, .*got key 5 again"):
        shoal.load(path, table(), progress=False)


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("number", NOT_FINITE)
def test_scores_that_are_not_finite_are_refused(log, number):
    """No table has such."""
    path = log([rows([4, 5], score=number)])
    wanted = f"version 2, .*column 'score': wanted finite values; got {number} in row 0"
    for read in (shoal.load, shoal.recover):
        with pytest.raises(StorageError, match=wanted):
            read(path, table(), progress=False)
    with shoal.open_log(path) as opened:
        assert re.search(wanted, opened.verify().problems[0])


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize("column", ["row", "momentum"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_that_are_not_finite_come_with_a_warning(tmp_path, number, column, dtype):
    def table():
        optimizer = shoal.SGD(momentum=0.9)
        return shoal.EmbeddingBagCollection([shoal.Table("a", dim=2, optimizer=optimizer, dtype=dtype)], seed=0)

    layout = layout_of(table().table("a").place[0].tables[0].config, 0)
    weights, momentum = torch.zeros(9, 2, dtype=layout.torch_dtype), torch.zeros(9, 2)
    {"row": weights, "momentum": momentum}[column][7, 1] = number
    scores = torch.zeros(9, dtype=torch.float64)
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit_rows(layout, [Rows(torch.arange(9), weights, {"momentum": momentum}, scores)])
        assert log.verify().is_sound
        assert log.verify().not_finite == 1
    for read in (shoal.load, shoal.recover):
        bags = table()
        with pytest.warns(NonFiniteWarning, match=r"table 'a': 1 of the rows that were read have NaN or infinity"):
            read(tmp_path / "log", bags, progress=False)
        assert len(bags.table("a")) == 9
    if column == "momentum":
        shoal.load(tmp_path / "log", table(), state=False, progress=False)


def test_rows_that_training_made_come_back(tmp_path):
    """Of finite weights and gradients: float32 has no sum of them."""

    def table():
        return shoal.EmbeddingBagCollection([shoal.Table("a", dim=2, optimizer=shoal.Ftrl(lr=999_999.0))], seed=0)

    bags = table()
    bags.table("a").assign([1], torch.full((1, 2), 3.4e38))
    for sign in (1, -1, 1):
        out = bags(kjt({"a": [[1], [2]]})).values()
        out.backward(torch.full_like(out, sign * 7e14))
    assert not bags.table("a").lookup([1]).isfinite().all()
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        assert log.verify().is_sound
        log.compact()
    again = table()
    with pytest.warns(NonFiniteWarning):
        shoal.load(tmp_path / "log", again, progress=False)
    assert torch.equal(again.table("a").lookup([1]).isfinite(), bags.table("a").lookup([1]).isfinite())


def test_a_snapshot_with_a_key_twice_is_passed_over(tmp_path):
    bags = table()
    bags.table("a").assign(range(50), torch.randn(50, 2))
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags)
        log.compact()
    key_twice_in_a_snapshot(tmp_path / "log", smallest)
    with shoal.open_log(tmp_path / "log") as opened:
        assert "version 1, offset" in opened.verify().problems[0]
        assert "wanted each key once; got key" in opened.verify().problems[0]
    again = table()
    with pytest.warns(SnapshotWarning, match="wanted each key once"):
        shoal.load(tmp_path / "log", again, progress=False)
    assert again.table("a").lookup(range(50)).equal(bags.table("a").lookup(range(50)))


def smallest(strategy):
    """The simplest example that a strategy draws."""
    return find(strategy, lambda _value: True)


def in_pieces(keys, cuts):
    ends = [0, *cuts, len(keys)]
    return [keys[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize("buckets", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize("cuts", [[], [1], [10, 11, 12], [100, 100, 250], list(range(1, 300, 7))])
@pytest.mark.parametrize("order", ["ascending", "buckets", "random"])
def test_keys_are_found_in_any_order_and_any_pieces(buckets, cuts, order):
    keys = torch.arange(-100, 200)
    if order == "buckets":
        keys = keys[buckets_of(keys, buckets).sort(stable=True).indices]
    elif order == "random":
        keys = keys[torch.randperm(300)]

    def found(keys):
        once, pieces = KeysOnce(buckets), in_pieces(keys, cuts)
        return [once.add(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]

    assert not any(one is not None for one in found(keys))
    for at in (0, 5, 150, 298):
        twice = torch.cat([keys[: at + 1], keys[at:-1]])  # next to each other
        assert int(keys[at]) in found(twice)
        elsewhere = keys.clone()
        elsewhere[-1 - at] = keys[at]
        assert int(keys[at]) in found(elsewhere)


def test_keys_in_the_order_of_buckets_are_let_go():
    keys = torch.arange(10_000)
    keys = keys[buckets_of(keys, 1000).sort(stable=True).indices]
    once = InOrder(1000)
    for piece in keys.split(500):
        assert once.add(piece, 0, 999, False) == Seen()
        assert sum(map(len, once._open)) < 50
    assert once.add(keys[:1], 0, 999, False).misplaced == 0
    assert once.add(keys[-1:], 0, 998, False).misplaced == 0
