"""The short form of ``benchmarks.drain``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import run_benchmark


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("etcd_binary")
def test_endless_answers_outlive_the_drain_of_their_workers(tmp_path: Path) -> None:
    found = run_benchmark("drain", "--short", report=tmp_path / "report.json")

    assert [drain["worker"] for drain in found["drains"]] == ["prefill-0", "decode-0"]
    assert (found["streams"], found["failed"], found["wrong"], found["errors"]) == (12, 0, 0, [])
    # Its limit is five minutes, which it takes where nobody can go on.
    assert found["slowest_drain_s"] < 60
