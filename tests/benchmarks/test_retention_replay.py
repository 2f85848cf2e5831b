"""The benchmark of replays with retention: its traces, what is compared, and its table."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.retention_replay import LOADS, TTLS_S, Load, Run, compared, requests_of
from benchmarks.table import retention_replay_tables
from cli.replay.results import PolicyResult, Spread
from cli.replay.simulation import FleetSettings
from cli.traces.generate import SessionConfig


def run(ttl_s: float, ttft_ms: float, load: str = "documents") -> Run:
    spread = Spread(mean=ttft_ms, p50=1.0, p90=2.0, p99=3.0)
    result = PolicyResult(
        ttft_ms=spread,
        itl_ms=spread,
        e2e_ms=spread,
        reuse_ratio=0.5,
        imbalance=1.0,
        requests_refused=0,
        requests_completed=10,
        goodput_per_s=1.0,
        output_tokens_per_s=1.0,
        duration_s=1.0,
        cpu_s=1.0,
        session_ttft_ms=Spread(mean=40.0, p99=90.0),
    )
    return Run(load=load, ttl_s=ttl_s, fleet=FleetSettings(), result=result)


def test_what_comes_beside_sessions_has_none_and_shares_no_block_with_them() -> None:
    load = Load(about="", rate=2.0, num_requests=30, others=SessionConfig(num_turns=1.0), other_rate=3.0)
    requests = requests_of(load)
    asked, others = [[item for item in requests if bool(item.session) is has] for has in (True, False)]
    assert len(asked) == 30
    assert len(others) > 10
    assert max(item.arrival_s for item in others) < asked[-1].arrival_s
    assert requests == sorted(requests, key=lambda item: item.arrival_s)
    ids, other_ids = [{id for item in items for id in item.hash_ids} for items in (asked, others)]
    assert not ids & other_ids


def test_each_load_is_compared_with_itself_without_retention() -> None:
    runs = compared([run(15.0, 60.0), run(60.0, 90.0, "agents"), run(0.0, 80.0)])
    assert [(item.load, item.ratio) for item in runs] == [
        ("agents", None),
        ("documents", 1.0),
        ("documents", pytest.approx(0.75)),
    ]


def test_the_table_has_a_row_for_each_replay() -> None:
    runs = [asdict(item) for item in compared([run(15.0, 60.0), run(0.0, 80.0)])]
    lines = retention_replay_tables({"runs": runs}).splitlines()
    assert lines[2] == "| agents beside documents | none | 80.0 | 1.00 | 1 | 3 | 40.0, 90 |  | 0.500 |"
    assert lines[3] == "| agents beside documents | 15 s | 60.0 | 0.75 | 1 | 3 | 40.0, 90 |  | 0.500 |"


def test_the_first_time_to_live_is_none() -> None:
    assert TTLS_S[0] == 0.0
    assert all(load.others is None or load.other_rate > 0 for load in LOADS.values())
