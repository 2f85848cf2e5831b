"""Two attacks of ``benchmarks.isolation`` that once left another tenant without any answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ATTACKS = ("messages", "choices")


@pytest.mark.timeout(200)
def test_an_attacked_router_answers_every_request_of_another_tenant(tmp_path: Path) -> None:
    report = tmp_path / "isolation.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.isolation",
        "--json",
        str(report),
        "--seconds",
        "5",
        "--only",
        *ATTACKS,
    ]

    # How much later answers come is measured, not asserted: the exit code, which judges that too, is left aside.
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)

    assert report.exists(), done.stderr
    outcomes = json.loads(report.read_text())["outcomes"]
    assert list(outcomes) == list(ATTACKS)
    for outcome in outcomes.values():
        assert outcome["attacked"]["requests"] > 0
        assert outcome["attacked"]["failed"] == {}, done.stderr
