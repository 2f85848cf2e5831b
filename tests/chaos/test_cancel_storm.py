"""The short form of ``benchmarks.cancel_storm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import run_benchmark
from tests.e2e.fork_server import ForkServer


@pytest.mark.usefixtures("etcd_binary")
def test_after_a_cancel_at_most_the_running_step_is_computed_and_nothing_stays_held(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    found = run_benchmark("cancel_storm", "--short", report=tmp_path / "report.json", fork_server=fork_server)

    assert found["requests"] == 90
    assert {phase: result["most_steps"] for phase, result in found["phases"].items() if result["most_steps"] > 1} == {}
    assert {"queue", "decode"} <= found["phases"].keys()
    assert (found["missed"], found["held"], found["failed_probes"], found["errors"]) == ([], 0, 0, [])
