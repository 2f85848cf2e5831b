from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench


def test_guided_answers_outlive_their_worker_and_are_drawn(tmp_path: Path) -> None:
    report, picture = tmp_path / "kill.json", tmp_path / "kill.png"
    command = [sys.executable, "-m", "benchmarks.guided_kill", "--json", str(report), "--plot", str(picture)]
    subprocess.run(command, check=True, timeout=240)
    results = json.loads(report.read_text())
    assert len(results["answers"]) == 10 and results["hit"] > 0
    assert results["invalid"] == results["changed"] == 0
    assert picture.stat().st_size > 10_000
