"""A few episodes of ``benchmarks.chaos``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_EPISODES = 8


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("etcd_binary")
def test_no_fault_loses_a_request_changes_a_token_or_leaves_a_block_held(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    # Among the first episodes of this seed are kills, drains and freezes of all kinds of processes.
    options = ["--json", str(report), "--episodes", str(NUM_EPISODES), "--seed", "1"]
    command = [sys.executable, "-m", "benchmarks.chaos", *options]

    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)

    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    assert found["failed"] == [], done.stderr
    assert (found["episodes"], found["requests"]) == (NUM_EPISODES, 8 * NUM_EPISODES)
    assert sum(found["faults"].values()) >= NUM_EPISODES
