"""The short form of ``benchmarks.drain``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drain import MAX_DRAIN_S
from services.workers import worker
from tests.chaos.command import run_benchmark
from tests.e2e.fork_server import ForkServer


@pytest.mark.usefixtures("etcd_binary")
def test_endless_answers_outlive_the_drain_of_their_workers(tmp_path: Path, fork_server: ForkServer) -> None:
    found = run_benchmark("drain", "--short", report=tmp_path / "report.json", fork_server=fork_server)

    assert [drain["worker"] for drain in found["drains"]] == ["prefill-0", "decode-0"]
    assert (found["streams"], found["failed"], found["wrong"], found["errors"]) == (12, 0, 0, [])
    # What lasts longer on a machine that has other work waited for a CPU.
    assert all(drain["own_s"] <= MAX_DRAIN_S for drain in found["drains"])
    # Its limit is five minutes, which it takes where no worker can go on.
    assert found["slowest_drain_s"] < 60


def test_the_waits_of_a_drain_that_hands_on_are_shorter_than_the_benchmarks_limit() -> None:
    assert worker._MOVE_AFTER_S + worker._LAST_OUTPUTS_S + worker._LAST_PULLS_S < MAX_DRAIN_S
