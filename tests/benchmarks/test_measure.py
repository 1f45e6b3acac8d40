"""The arithmetic of the benchmarks: rounds, ratios, the gate, limits, the CSV. No clock is believed here."""

import itertools
from contextlib import contextmanager

import pytest
import torch

from benchmarks import record, work
from benchmarks.effort import Effort
from benchmarks.measure import OURS, Bench, Contender, Load, QuietGate, Result, foreign_cores, quantiles
from benchmarks.registry import Case, Limit, Registry

ORIGIN = record.Origin("2026-01-01T00:00:00+00:00", "abc", "a machine, 2 cores")
SHORT = Effort(rounds=4, turn_seconds=0.0)


def quiet() -> QuietGate:
    return QuietGate(load=lambda: Load(0.0, 0.0, 0.0), sleep=lambda _: None)


def loads(*foreign: float):
    """A load reader that tells, interval by interval, of so many foreign cores."""
    readings = []
    for interval, cores in enumerate(foreign):
        readings += [Load(interval, 0.0, 0.0), Load(interval + 1.0, cores + 1.0, 1.0)]
    return iter(readings).__next__


def case(limits: dict[str, Limit]) -> Case:
    return Case("a case", "this and that", limits, "stage", lambda bench: Result("ms", {OURS: [1.0]}))


def test_quantiles_interpolate():
    spread = quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 0.0])
    assert (spread.p20, spread.p50, spread.p80) == (1.0, 2.5, 4.0)
    assert quantiles([7.0]).p20 == quantiles([7.0]).p80 == 7.0


def test_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians():
    result = Result("ms", {OURS: [1.0, 4.0, 9.0], "peer": [2.0, 2.0, 3.0]})
    assert result.ratio("peer") == 2.0
    assert result.of(OURS).p50 / result.of("peer").p50 == 2.0
    drifting = Result("ms", {OURS: [1.0, 10.0, 3.0], "peer": [2.0, 20.0, 1.0]})
    assert drifting.ratio("peer") == 0.5
    assert drifting.of(OURS).p50 / drifting.of("peer").p50 == 1.5
    assert drifting.peers == ["peer"]


def test_every_contender_has_one_turn_a_round_and_the_order_rotates():
    order = []
    contenders = [Contender(name, lambda i, name=name: order.append(name)) for name in "abc"]
    result = Bench(SHORT, quiet()).alternate(contenders)
    assert {name: len(values) for name, values in result.rounds.items()} == {"a": 4, "b": 4, "c": 4}
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"  # an untimed step and a timed one a turn


def test_batches_go_on_from_turn_to_turn():
    seen = []
    Bench(SHORT, quiet()).alternate([Contender(OURS, seen.append)])
    assert seen == list(range(len(seen)))
    assert len(seen) == 2 * SHORT.rounds  # one untimed and one timed step a turn


def test_warm_steps_come_first():
    seen = []
    contenders = [Contender(name, lambda i, name=name: seen.append((name, i))) for name in "ab"]
    Bench(Effort(rounds=1, turn_seconds=0.0), quiet()).alternate(contenders, warm_steps=2)
    assert seen[:4] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_turn_runs_inside_its_context():
    events = []

    @contextmanager
    def around():
        events.append("in")
        yield
        events.append("out")

    Bench(Effort(rounds=1, turn_seconds=0.0), quiet()).alternate(
        [Contender(OURS, lambda i: events.append("step"), around=around)]
    )
    assert events == ["in", "step", "step", "out"]


def test_rates_and_times_are_reciprocal(monkeypatch):
    ticks = itertools.count(0.0, 0.5)  # each look at the clock is half a second later
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(ticks))
    bench = Bench(Effort(rounds=1, turn_seconds=0.6), quiet())
    steps = Contender(OURS, lambda i: None, work=100.0)
    time_a_step = bench.alternate([steps], unit="ms/key", scale=1e3)
    rate = bench.alternate([steps], unit="keys/s", scale=1.0, rate=True)
    assert time_a_step.rounds[OURS] == [1e3 / 100.0]
    assert rate.rounds[OURS] == [100.0]
    assert (time_a_step.higher_is_better, rate.higher_is_better) == (False, True)


def test_what_a_stage_keeps_is_built_once():
    bench = Bench(SHORT, quiet())
    built = []
    for _ in range(2):
        assert bench.keep("tables", lambda: built.append(1) or "tables") == "tables"
    assert len(built) == 1
    bench.clear()
    bench.keep("tables", lambda: built.append(1) or "tables")
    assert len(built) == 2


def test_foreign_load_is_all_but_our_own():
    assert foreign_cores(Load(10.0, 100.0, 50.0), Load(12.0, 103.0, 52.0)) == 0.5
    assert foreign_cores(Load(1.0, 0.0, 0.0), Load(1.0, 0.0, 0.0)) == 0.0


def test_a_quiet_turn_is_taken_once():
    gate = QuietGate(load=loads(0.1))
    assert gate.run(lambda: "turn") == "turn"
    assert (gate.redone, gate.disturbed, gate.waited) == (0, 0, 0.0)


def test_a_disturbed_turn_is_taken_again_once_the_machine_is_quiet():
    turns = itertools.count()
    slept = []
    # disturbed turn; then while waiting: busy, quiet, busy, quiet, quiet; then a quiet turn
    gate = QuietGate(load=loads(1.0, 0.9, 0.0, 0.9, 0.0, 0.0, 0.0), sleep=slept.append)
    assert gate.run(lambda: next(turns)) == 1
    assert (gate.redone, gate.disturbed) == (1, 0)
    assert len(slept) == 5
    assert gate.waited == sum(slept)


def test_without_patience_a_disturbed_turn_is_kept_and_counted():
    gate = QuietGate(patience=0.0, load=loads(1.0, 1.0))
    assert gate.run(lambda: "first") == "first"
    assert (gate.redone, gate.disturbed) == (0, 1)


def test_a_machine_that_is_never_quiet_ends_after_so_many_tries():
    busy = itertools.count()
    gate = QuietGate(patience=2.0, tries=3, load=lambda: Load(*[float(next(busy))] * 2, 0.0), sleep=lambda _: None)
    gate.run(lambda: None)
    assert gate.disturbed == 1
    assert gate.waited == 2.0


def test_result_counts_the_disturbed_turns_of_its_own_case_only():
    gate = QuietGate(patience=0.0, load=loads(*[1.0] * 8))
    bench = Bench(SHORT, gate)
    bench.alternate([Contender(OURS, lambda i: None)])
    result = bench.alternate([Contender(OURS, lambda i: None)])
    assert result.disturbed == SHORT.rounds
    assert gate.disturbed == 2 * SHORT.rounds


def test_a_case_is_registered_for_every_combination():
    registry = Registry()

    @registry.case(
        "step, dim {dim}, {ids}",
        compares="dims {dim}",
        limits=lambda dim, ids: {"peer": Limit(dim / 10)},
        stage="dim {dim}",
        ids=("uniform", "zipf"),
        dim=(1, 2),
    )
    def step(bench, dim, ids):
        return Result(ids, {OURS: [float(dim)]})

    cases = registry.select()
    assert [one.name for one in cases] == [
        "step, dim 1, uniform",
        "step, dim 1, zipf",
        "step, dim 2, uniform",
        "step, dim 2, zipf",
    ]  # stages stay together although ids came first
    assert cases[2].limits == {"peer": Limit(0.2)}
    result = cases[3].run(Bench(SHORT, quiet()))
    assert (result.unit, result.rounds) == ("zipf", {OURS: [2.0]})
    assert [one.name for one in registry.select("dim 2")] == ["step, dim 2, uniform", "step, dim 2, zipf"]
    assert [one.name for one in registry.select("*zipf")] == ["step, dim 1, zipf", "step, dim 2, zipf"]
    assert registry.select("nothing") == []


def test_two_cases_of_one_name_are_refused():
    registry = Registry()
    registry.case("step", compares="", limits={})(lambda bench: None)
    with pytest.raises(ValueError, match="two cases are called 'step'"):
        registry.case("step", compares="", limits={})(lambda bench: None)


def test_a_limit_widens_with_its_aim():
    assert Limit(0.5, aim=0.4).widened(2.0) == Limit(1.0, aim=0.8)
    assert Limit(0.5).widened(2.0) == Limit(1.0)


@pytest.mark.parametrize(
    ("higher_is_better", "ours", "verdict"),
    [(False, 0.9, "pass"), (False, 1.1, "miss"), (True, 1.1, "pass"), (True, 0.9, "miss")],
)
def test_a_time_must_stay_below_its_limit_and_a_rate_above(higher_is_better, ours, verdict):
    result = Result("unit", {OURS: [ours], "peer": [1.0]}, higher_is_better)
    rows = record.rows_of(case({"peer": Limit(1.0)}), result, ORIGIN)
    assert [(row.contender, row.ratio, row.verdict) for row in rows] == [(OURS, None, ""), ("peer", ours, verdict)]


def test_a_limit_against_nobody_is_an_error():
    with pytest.raises(ValueError, match=r"limits against \['peer'\]"):
        record.rows_of(case({"peer": Limit(1.0)}), Result("ms", {OURS: [1.0]}), ORIGIN)


def test_csv_returns_what_was_appended(tmp_path):
    path = tmp_path / "results" / "suite.csv"
    result = Result("ms", {OURS: [1.0, 2.0, 3.0], "peer": [2.0, 4.0, 6.0], "other": [1.0, 2.0, 3.0]}, disturbed=2)
    rows = record.rows_of(case({"peer": Limit(0.65)}), result, ORIGIN)
    record.append(path, rows[:1])
    record.append(path, rows[1:])
    assert record.read(path) == rows
    assert path.read_text().count("contender") == 1


def test_csv_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "suite.csv"
    path.write_text("when,what\n1,2\n")
    with pytest.raises(ValueError, match=r"suite\.csv: wanted the columns"):
        record.append(path, [])
    assert path.read_text() == "when,what\n1,2\n"


def test_newest_keeps_the_last_run_of_each_case():
    def row(when: str, name: str, contender: str) -> record.Row:
        return record.Row(when, "c", "m", name, contender, "ms", 1.0, 1.0, 1.0, None, None, "", 1, 0)

    old = [row("1", "a", OURS), row("1", "a", "gone"), row("1", "b", OURS)]
    new = [row("2", "a", OURS), row("2", "a", "peer")]
    assert record.newest(old + new) == [*new, old[2]]


def test_plot_is_drawn_from_rows(tmp_path):
    from benchmarks import plot

    result = Result("ms", {OURS: [1.0, 2.0], "peer": [2.0, 3.0]})
    plot.draw(record.rows_of(case({"peer": Limit(1.0)}), result, ORIGIN), tmp_path / "suite.png")
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")


def test_keys_are_distinct_and_streams_do_not_meet():
    ids = torch.arange(5000)
    keys = torch.cat([work.keys_of(ids, stream) for stream in range(2 * work.TABLES)])
    assert len(keys.unique()) == len(keys)
    assert bool((keys < 0).any())
    assert bool((keys > 0).any())


def test_batches_are_the_same_every_time_and_within_the_table():
    for distribution in work.DISTRIBUTIONS:
        first, again = (work.batches(distribution, 1000, bags=32, count=2) for _ in range(2))
        assert torch.equal(first[1].ids, again[1].ids)
        assert not torch.equal(first[0].ids, first[1].ids)
        assert 0 <= int(first[0].ids.min()) <= int(first[0].ids.max()) < 1000
        assert torch.equal(work.keys_of(first[0].of_table(3), stream=3), first[0].keys.view(work.TABLES, -1)[3])
        assert int(first[0].lengths.sum()) == len(first[0].ids) == int(first[0].offsets[-1])


def test_zipf_has_hot_ids():
    counts = work.draw("zipf", 1000, (100_000,), seed=1).bincount(minlength=1000).sort(descending=True).values
    assert counts[0] > 1.8 * counts[1] > 1.8 * 1.2 * counts[2]
    with pytest.raises(ValueError, match="got 'normal'"):
        work.draw("normal", 10, (1,), seed=0)


def test_chunks_cover_all_numbers():
    assert torch.equal(torch.cat(list(work.chunks(10, 4))), torch.arange(10))
