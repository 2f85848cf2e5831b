"""The short form of ``benchmarks.wedge``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import run_benchmark


@pytest.mark.usefixtures("etcd_binary")
def test_what_hangs_or_is_frozen_is_noticed_and_requests_go_on(tmp_path: Path) -> None:
    found = run_benchmark("wedge", "--short", report=tmp_path / "report.json")

    said = {strike["strike"]: (strike["probe"], strike["health"]) for strike in found["strikes"]}
    assert said == {
        "decode-0 step": ("not serving", "not serving"),
        "router-1 reports": ("not serving", "silent"),
        "prefill-0 frozen": ("silent", "silent"),
    }
    for strike in found["strikes"]:
        assert None not in (strike["probe_s"], strike["health_s"], strike["unplaced_s"], strike["recovery_s"])
        assert strike["ended"] > 0 and strike["failed"] == 0
