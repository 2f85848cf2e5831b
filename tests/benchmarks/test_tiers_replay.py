"""The benchmark of replays with tiers: what is below the pools, what is compared, and its table."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.table import tiers_replay_tables
from benchmarks.tiers_replay import BELOW, DEVICE, Run, compared, tiers_of
from cli.replay.results import PolicyResult, Spread
from cli.replay.simulation import FleetSettings


def run(below: str, ttft_ms: float, load: str = "agents") -> Run:
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
        host_ratio=0.25,
        blocks_dropped=1234,
    )
    return Run(load=load, below=below, fleet=FleetSettings(), result=result)


def test_tiers_are_multiples_of_the_pool() -> None:
    sizes = {}
    for below in BELOW:
        tiers = tiers_of(below, 100)
        sizes[below] = None if tiers is None else (tiers.host.num_blocks, tiers.disk and tiers.disk.num_blocks)
    assert sizes == {DEVICE: None, "host": (400, None), "disk": (400, 1600)}


def test_each_load_is_compared_with_itself_without_tiers() -> None:
    runs = compared([run("host", 60.0), run("host", 90.0, load="conversation"), run(DEVICE, 80.0)])
    assert [(item.load, item.ratio) for item in runs] == [
        ("conversation", None),
        ("agents", 1.0),
        ("agents", pytest.approx(0.75)),
    ]


def test_the_table_has_a_row_for_each_replay() -> None:
    runs = [asdict(item) for item in compared([run("host", 60.0), run(DEVICE, 80.0), run("disk", 70.0)])]
    lines = tiers_replay_tables({"runs": runs}).splitlines()
    assert lines[2] == "| agents | nothing | 80.0 | 1.00 |  | 1 | 2 | 3 | 0.500 | 0.250 | 0.000 | 1,234 |"
    assert lines[3] == "| agents | host | 60.0 | 0.75 |  | 1 | 2 | 3 | 0.500 | 0.250 | 0.000 | 1,234 |"
    assert lines[4].startswith("| agents | host and disk | 70.0 | 0.88 |")


def test_what_is_wanted_stands_beside_the_hosts_ratio_on_conversations() -> None:
    runs = compared([run(DEVICE, 80.0, "conversation"), run("host", 72.0, "conversation")])
    assert "| **0.90** | <= 0.8 |" in tiers_replay_tables({"runs": [asdict(item) for item in runs]})
