"""Runs a benchmark as its users do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 180


def run_benchmark(name: str, *arguments: str, report: Path) -> Any:
    """The report of ``python -m benchmarks.NAME``, whatever its exit code: times are no test on a busy machine."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(report), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert report.exists(), done.stderr
    return json.loads(report.read_text())
