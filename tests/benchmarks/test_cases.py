"""Every case of the suites that need no GPU runs: on tiny tables in each run of the tests, with the sizes of `--quick`
in the slow ones. No time is believed here. Peers that are not installed are left out, which a skipped test says."""

import io
import math
import pathlib

import pytest
import torch
from rich.console import Console

from benchmarks import run
from benchmarks.effort import QUICK, TINY
from benchmarks.measure import OURS, Bench, QuietGate
from benchmarks.registry import PEERS, Case, suite

ROOT = pathlib.Path(__file__).parents[2]
SUITES = ("cpu", "tiers", "log")
CASES = [pytest.param(name, case, id=f"{name}: {case.name}") for name in SUITES for case in suite(name).select()]
ALL_PEERS = list({peer.name: peer for name in SUITES for peer in PEERS[name]}.values())

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, at each sparse step


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """A bench for each effort: cases of one stage share what it keeps."""
    made = {effort: Bench(effort, QuietGate(patience=0)) for effort in (TINY, QUICK)}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_BENCH_DIR", str(tmp_path_factory.mktemp("bench")))
        patch.chdir(ROOT)  # cases start processes with `python -m benchmarks...`
        torch.set_num_threads(run.THREADS)
        yield made
        torch.set_num_threads(threads)
    for bench in made.values():
        bench.clear()


def runs(bench: Bench, suite_name: str, case: Case) -> None:
    """Run a case, and look at what it returns."""
    bench.enter(case.stage)
    result = case.run(bench)
    absent = {name for peer in PEERS[suite_name] if not peer.is_installed for name in peer.contenders}
    promised = {OURS, *case.limits} - absent
    assert promised <= set(result.rounds)
    assert absent.isdisjoint(result.rounds)
    assert result.peers or absent, "a case compares with something"
    assert result.unit
    assert len({len(values) for values in result.rounds.values()}) == 1
    for name, values in result.rounds.items():
        assert values, name
        assert all(math.isfinite(value) and value > 0 for value in values), (name, values)


@pytest.mark.parametrize(("suite_name", "case"), CASES)
def test_case_runs_on_tiny_tables(benches, suite_name, case):
    runs(benches[TINY], suite_name, case)


@pytest.mark.slow
@pytest.mark.parametrize(("suite_name", "case"), CASES)
def test_case_runs_in_its_quick_form(benches, suite_name, case):
    runs(benches[QUICK], suite_name, case)


@pytest.mark.parametrize("peer", ALL_PEERS, ids=lambda peer: peer.name)
def test_peer_is_installed(peer):
    if not peer.is_installed:
        pytest.skip(f"not installed: {peer.name}; cases ran without {', '.join(peer.contenders)}")


def test_run_tells_each_case_and_counts_those_that_fail(benches):
    good, other = suite("cpu").select("ids of strings")[0], suite("cpu").select("memory after erase*")[0]

    def fail(bench):
        raise OSError("the disk is full")

    told = Console(file=io.StringIO(), width=150)
    bad = Case(other.name, other.compares, other.limits, other.stage, fail)
    # As of the suite for GPUs, for which it does not time how cores exchange a line.
    assert run.run([good, bad], benches[TINY], told, save=False, suite="gpu") == 1
    text = told.file.getvalue()
    assert good.name in text
    assert "the disk is full" in text


def test_run_names_the_peers_that_are_not_there(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("sys.argv", ["benchmarks.run", "log", "--quick"])
    with pytest.raises(SystemExit):
        run.main()
    assert "the suite 'log' wants fio" in capsys.readouterr().err
