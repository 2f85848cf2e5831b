"""Runs benchmarks as their users do, and attacks of ``benchmarks.isolation``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.isolation import Window, measure
from benchmarks.isolation_attack import Attack

#: Ends what hangs: several times what any of them takes on a slow machine that has other work.
TIMEOUT_S = 600
ATTACK_S = 3.0


async def attack(attacks: Sequence[Attack], directory: Path) -> dict[Attack, Window]:
    """What another tenant saw of each attack: its requests were answered, and nothing stalled.

    How much later answers come is measured by the benchmark, not asserted here: that depends on the machine.
    """
    found = {attack: await measure(attack, ATTACK_S, directory=directory) for attack in attacks}
    for name, window in found.items():
        assert window.requests > 0, name
        assert window.failed == {}, name
        # In CPU time of the event loop's thread, so a busy machine does not count.
        assert window.router_stall_ms < 200, name
    return found


def run_benchmark(name: str, *arguments: str, report: Path) -> Any:
    """The report of ``python -m benchmarks.NAME``, whatever its exit code: times are no test on a busy machine."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(report), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert report.exists(), done.stderr
    return {**json.loads(report.read_text()), "stderr": done.stderr}
