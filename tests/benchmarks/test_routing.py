"""The benchmark of routing changes one thing at a time, goes on where it was stopped, and says what is met."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.routing import Bar, Job, Results, Run, bars_of, find_jobs, read_runs, replay, replay_all, rows_of
from benchmarks.routing_cases import CASES, OTHERS, OURS
from benchmarks.table import routing_tables
from cli.replay.results import PolicyResult, Spread
from cli.traces.format import read_trace, write_trace
from cli.traces.generate import ArrivalKind, Arrivals, TraceConfig, generate
from quartet.telemetry.provenance import write_report


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrivals = Arrivals(kind=ArrivalKind.BURSTS, rate=8.0, burst_size=5, burst_spread_s=0.0)
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    write_trace(generate(TraceConfig(arrivals=arrivals, max_requests=25, seed=1)), path)
    return path


def run(case: str, policy: str, seed: int = 0, *, mean: float = 100.0, p99: float = 900.0, itl: float = 8.0) -> Run:
    spread = Spread(mean=mean, p50=mean, p90=mean, p99=p99)
    result = PolicyResult(
        ttft_ms=spread,
        itl_ms=replace(spread, mean=itl),
        e2e_ms=spread,
        reuse_ratio=0.5,
        imbalance=1.0,
        requests_refused=0,
        requests_completed=10,
        goodput_per_s=1.0,
        output_tokens_per_s=1.0,
        duration_s=10.0,
        cpu_s=1.0,
    )
    return Run(case=case, policy=policy, seed=seed, revision="0123456789abcdef", result=result)


def case_runs(case: str, *, mean: float, p99: float) -> list[Run]:
    return [run(case, OURS, mean=mean, p99=p99), *(run(case, other, mean=100.0, p99=1000.0) for other in OTHERS)]


def test_every_seed_of_what_draws_is_replayed_and_nothing_twice() -> None:
    jobs = find_jobs(["base", "poisson"], 3, [run("base", OURS, 1)], has_trace=True)
    assert len(jobs) == len(set(jobs)) == (1 + 4 * 3 - 1) + 5 * 3
    assert [job.seed for job in jobs if (job.case, job.policy) == ("base", OURS)] == [0, 2]
    assert [job.seed for job in jobs if (job.case, job.policy) == ("base", "round_robin")] == [0]
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)


def test_without_a_trace_only_what_generates_its_own_is_replayed() -> None:
    assert {job.case for job in find_jobs(list(CASES), 1, [], has_trace=False)} == {"poisson", "bursty", "shared"}


def test_each_seed_has_a_generated_trace_of_its_own() -> None:
    case = replace(CASES["shared"], generated=TraceConfig(max_requests=20))
    assert case.requests(None, 1) == case.requests(None, 1) != case.requests(None, 2)


@pytest.mark.parametrize(("name", "spread_s"), [("spread_1ms", 0.001), ("spread_50ms", 0.05), ("spread_2s", 2.0)])
def test_bursts_are_spread_and_nothing_else_changes(trace: Path, name: str, spread_s: float) -> None:
    before, after = CASES["base"].requests(trace, 0), CASES[name].requests(trace, 0)
    assert [len(list(burst)) for _, burst in groupby(before, key=lambda request: request.arrival_s)] == [5] * 5
    assert len({request.arrival_s for request in after}) == 25
    assert [request.arrival_s for request in after] == sorted(request.arrival_s for request in after)
    by_ids = {request.hash_ids: request.arrival_s for request in before}
    assert all(0 <= request.arrival_s - by_ids[request.hash_ids] <= spread_s for request in after)
    faster = read_trace(trace)
    assert before[-1].arrival_s == pytest.approx(faster[-1].arrival_s / 1.5)


def test_replayed_runs_are_saved_each_time_and_read_again(trace: Path, tmp_path: Path) -> None:
    file, runs, saved = tmp_path / "routing.json", list[Run](), list[int]()
    jobs = find_jobs(["old_load"], 1, [], has_trace=True)[:2]
    replay_all(jobs, trace, runs, 1, lambda: saved.append(len(runs)))
    assert saved == [1, 2]
    rows = rows_of(runs)
    report = Report("routing", arguments=[])
    write_report(report.finish(Results(trace="small", rows=rows, bars=bars_of(rows), runs=runs)), str(file))
    again = read_runs(file)
    assert [(item.case, item.policy, item.seed) for item in again] == [(job.case, job.policy, 0) for job in jobs]
    assert find_jobs(["old_load"], 1, again, has_trace=True)[0].policy == "least_loaded"
    assert read_runs(tmp_path / "nothing.json") == []


def test_a_replay_is_of_the_cases_own_fleet(trace: Path) -> None:
    few, many = (replay(Job(case=name, policy="round_robin", seed=0), trace, None) for name in ("workers_4", "base"))
    assert few.result.requests_completed == many.result.requests_completed == 25
    assert few.result.itl_ms.mean > many.result.itl_ms.mean


def test_bars_are_measured_against_the_best_other() -> None:
    runs = [*case_runs("speed_2", mean=103.0, p99=1040.0), run("speed_2", "dynamo_1", 1, mean=80.0, p99=1000.0)]
    mean_bar, p99_bar = bars_of(rows_of(runs))
    assert (mean_bar.measured, mean_bar.limit) == (pytest.approx(103 / 90), 1.02)  # the best other: two seeds
    assert (p99_bar.measured, p99_bar.limit) == (pytest.approx(1.04), 1.05)


def test_the_base_case_has_bars_of_its_own_and_routers_are_measured_against_one() -> None:
    runs = [
        *case_runs("base", mean=60.0, p99=800.0),
        run("old_load", OURS, mean=100.0),
        run("routers_4", OURS, mean=116.0),
        run("telling_16", OURS, mean=120.0),
    ]
    bars = bars_of(rows_of(runs))
    assert {(bar.case, bar.limit) for bar in bars if bar.case == "base"} == {
        ("base", limit) for limit in (1.02, 1.05, 0.66, 0.87, 0.81, 1.0, 0)
    }
    assert all(bar.measured <= bar.limit for bar in bars if bar.case == "base")
    assert bars[-2:] == [
        Bar(case="routers_4", what="mean TTFT of one router's", measured=1.16, limit=1.15),
        Bar(case="telling_16", what="mean TTFT of one router's", measured=1.2, limit=1.3),
    ]


def test_the_table_shows_what_is_missed_and_how_often_it_was_measured() -> None:
    runs = [*case_runs("speed_2", mean=103.0, p99=1040.0), run("speed_2", OURS, 1, mean=103.0, p99=1040.0)]
    rows = rows_of(runs)
    report = Report("routing", arguments=[]).finish(Results(trace="t", rows=rows, bars=bars_of(rows), runs=runs))
    table = routing_tables(report)
    assert "| 2x | 103.0 | 100.0 | 100.0 | 100.0 | 100.0 | 2, 1, 1, 1, 1 |" in table
    assert "| 2x | mean TTFT of the best other's | **1.030** | <= 1.02 |" in table
    assert "| 2x | p99 TTFT of the best other's | 1.040 | <= 1.05 |" in table
    assert "commit 0123456789ab." in table


def test_replays_of_the_conversation_trace_are_held_to_what_they_are_calibrated_by() -> None:
    rows = rows_of([run("base", "dynamo_16", mean=257.0), run("speed_1", "round_robin", mean=330.0)])
    bars = {
        (bar.case, bar.what.split(" ")[0]): bar.measured <= bar.limit
        for bar in bars_of(rows, "mooncake_conversation.jsonl.gz")
    }
    assert bars["base", "ttft_mean"]
    assert not bars["speed_1", "ttft_mean"]
    assert not bars_of(rows, "another.jsonl")
