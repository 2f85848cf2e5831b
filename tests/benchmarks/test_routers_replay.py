"""The benchmark of several routers in replays: what each setup changes, what is compared, tables and picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.routers_replay import SETUPS, Job, Row, Run, find_jobs, plot, replay, requests_of, rows_of
from benchmarks.table import routers_replay_tables
from cli.replay.results import Spread
from cli.traces.format import write_trace
from cli.traces.generate import ArrivalKind, Arrivals, TraceConfig, generate


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrivals = Arrivals(kind=ArrivalKind.BURSTS, rate=8.0, burst_size=12, burst_spread_s=0.0)
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    write_trace(generate(TraceConfig(arrivals=arrivals, max_requests=120, seed=1)), path)
    return path


def run(setup: str, ttft_ms: float, seed: int = 0, counts: tuple[int, ...] = (0, 0)) -> Run:
    spread = Spread(mean=ttft_ms, p50=1.0, p90=2.0, p99=3.0)
    return Run(
        setup=setup,
        seed=seed,
        ttft_ms=spread,
        reuse_ratio=0.5,
        requests_completed=10,
        requests_without_index=counts,
    )


RUNS = [
    run("telling_1", 100.0),
    run("telling_1", 200.0, seed=1),
    run("telling_4", 110.0),
    run("telling_4", 240.0, seed=1),
    run("silent_4", 130.0),
    run("restarted_4", 132.0, counts=(3, 1)),
    run("restarted_4", 240.0, seed=1, counts=(2, 5)),
    run("no_turns_4", 180.0),
    run("silent_8", 500.0, seed=2),  # one router has not been replayed with that seed yet
]


def row(rows: list[Row], name: str) -> Row:
    [found] = [each for each in rows if each.name == name]
    return found


def test_all_that_is_replayed_is_replayed_with_each_seed_and_parts_with_three() -> None:
    jobs = find_jobs(5)
    assert len(jobs) == len(set(jobs))
    assert {job.seed for job in jobs if job.setup == "telling_16"} == {0, 1, 2, 3, 4}
    assert {job.seed for job in jobs if job.setup == "no_turns_16"} == {0, 1, 2}
    assert [setup.limit for name, setup in SETUPS.items() if name.startswith("telling")] == [
        None,
        1.15,
        1.15,
        1.3,
        1.3,
    ]


def test_each_seed_has_requests_of_its_own_from_the_first_moment(trace: Path) -> None:
    first, second = requests_of(trace, 0, 50), requests_of(trace, 1, 50)
    assert len(first) == len(second) == 50
    assert first[0].arrival_s == second[0].arrival_s == 0.0
    assert {item.hash_ids for item in first} != {item.hash_ids for item in second}
    assert len(requests_of(None, 0, 30)) == 30


def test_routers_that_are_told_too_late_and_have_no_turns_herd(trace: Path) -> None:
    turns, none, owners = (
        replay(Job(setup=name, seed=0), trace, 120) for name in ("telling_16", "no_turns_16", "owners_16")
    )
    assert turns.requests_completed == none.requests_completed == owners.requests_completed == 120
    assert none.ttft_ms.mean > 1.1 * turns.ttft_ms.mean
    assert owners.ttft_ms.mean not in (none.ttft_ms.mean, turns.ttft_ms.mean)


def test_a_router_without_an_index_finds_less_and_its_requests_are_counted(trace: Path) -> None:
    kept, blind = (replay(Job(setup=name, seed=0), trace, 120) for name in ("telling_4", "blind_4"))
    assert 0.85 * kept.reuse_ratio < blind.reuse_ratio < 0.95 * kept.reuse_ratio, "the others find theirs"
    assert sum(kept.requests_without_index) == 0
    assert sum(blind.requests_without_index) == 30, "the requests of one router of four"
    restarted = replay(Job(setup="restarted_4", seed=0), trace, 120)
    assert 0 < sum(restarted.requests_without_index) < 30


def test_a_row_is_compared_with_one_router_seed_by_seed() -> None:
    rows = rows_of(RUNS)
    telling = row(rows, "telling_4")
    assert (telling.num_runs, telling.ttft_ms_mean, telling.over_with_index) == (2, 175.0, None)
    over = telling.over_one
    assert (over.least, over.mean, over.most) == pytest.approx((1.1, 1.15, 1.2))
    restarted = row(rows, "restarted_4")
    assert restarted.requests_without_index == [5, 6]
    assert restarted.over_with_index is not None
    with_index = restarted.over_with_index
    assert (with_index.least, with_index.mean, with_index.most) == pytest.approx((1.0, 1.1, 1.2))
    assert "silent_8" not in {each.name for each in rows}


def test_the_tables_say_what_is_wanted_and_each_rows_spread() -> None:
    rows = [asdict(each) for each in rows_of([*RUNS, run("telling_2", 120.0), run("blind_4", 150.0, counts=(7, 0))])]
    report = {"rows": rows, "num_requests": 1000, "trace": "small.jsonl"}
    lines = routers_replay_tables(report).splitlines()
    assert "| 1 | 150 | 3 | 1 |  |  |  | 2 |" in lines
    assert "| 2 | 120 | 3 | **1.20 (1.20, 1.20)** | <= 1.15 |  |  | 1 |" in lines
    assert "| 4 | 175 | 3 | 1.15 (1.10, 1.20) | <= 1.15 | 130 | 1.30 (1.30, 1.30) | 2 |" in lines
    assert "| they tell nothing | 1.30 (1.30, 1.30) |" in lines
    assert "| told after 2 ms, no turns | 1.80 (1.80, 1.80) |" in lines
    assert "| for 2.1 s of every 10 | 186 | 1.10 (1.00, 1.20) | 11 | 5, 6 | 2 |" in lines
    assert "| at any time | 150 | 1.36 (1.36, 1.36) | 7 | 0, 7 | 1 |" in lines
    assert "1,000 requests of small.jsonl for each seed." in lines


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    plot(rows_of(RUNS), tmp_path / "images" / "routers.png")
    assert (tmp_path / "images" / "routers.png").read_bytes().startswith(b"\x89PNG")
