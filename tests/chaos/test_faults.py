"""A few episodes of ``benchmarks.chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import run_benchmark

NUM_EPISODES = 8


@pytest.mark.usefixtures("etcd_binary")
def test_no_fault_loses_a_request_changes_a_token_or_leaves_a_block_held(tmp_path: Path) -> None:
    # Among the first episodes of this seed are kills, drains and freezes of all kinds of processes.
    options = ("--episodes", str(NUM_EPISODES), "--seed", "1", "--fleets", "2")
    found = run_benchmark("chaos", *options, report=tmp_path / "report.json")

    assert found["failed"] == [], found["stderr"]
    assert (found["fleets"], found["episodes"], found["requests"]) == (2, NUM_EPISODES, 8 * NUM_EPISODES)
    assert sum(found["faults"].values()) >= NUM_EPISODES
