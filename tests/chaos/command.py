"""Runs a benchmark as its users do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 180


def attack(attacks: Sequence[str], report: Path) -> Any:
    """What ``benchmarks.isolation`` found, by attack: another tenant's requests were answered, and nothing stalled.

    How much later answers come is measured, not asserted: that depends on the machine.
    """
    found = run_benchmark("isolation", "--seconds", "5", "--only", *attacks, report=report)["outcomes"]
    assert list(found) == list(attacks)
    for outcome in found.values():
        assert outcome["attacked"]["requests"] > 0
        assert outcome["attacked"]["failed"] == {}
        # In CPU time of the event loop's thread, so a busy machine does not count.
        assert outcome["attacked"]["router_stall_ms"] < 200
    return found


def run_benchmark(name: str, *arguments: str, report: Path) -> Any:
    """The report of ``python -m benchmarks.NAME``, whatever its exit code: times are no test on a busy machine."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(report), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert report.exists(), done.stderr
    return json.loads(report.read_text())
