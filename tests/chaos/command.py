"""Runs benchmarks, as their users do or with what they start forked, and attacks of ``benchmarks.isolation``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.isolation import Window, measure
from benchmarks.isolation_attack import Attack
from tests.e2e.fork_server import ForkServer

#: Ends what hangs: several times what any of them takes on a slow machine that has other work.
TIMEOUT_S = 600
ATTACK_S = 3.0

#: ``python -m MODULE ARGUMENTS``, after another program to start processes with.
_WITH_PYTHON = """
import runpy, sys
sys.executable = sys.argv[1]
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


async def attack(attacks: Sequence[Attack], directory: Path, fork_server: ForkServer) -> dict[Attack, Window]:
    """What another tenant saw of each attack: its requests were answered, and nothing stalled.

    Fleets and attackers are forked. How much later answers come is measured by the benchmark, not asserted here: that
    depends on the machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(fork_server.python))
        found = {attack: await measure(attack, ATTACK_S, directory=directory) for attack in attacks}
    for name, window in found.items():
        assert window.requests > 0, name
        assert window.failed == {}, name
        # In CPU time of the event loop's thread, so a busy machine does not count.
        assert window.router_stall_ms < 200, name
    return found


def run_benchmark(name: str, *arguments: str, report: Path, fork_server: ForkServer | None = None) -> Any:
    """The report of ``python -m benchmarks.NAME``, whatever its exit code: times are no test on a busy machine.

    With a ``fork_server``, all that it starts is forked: for one that freezes none of its processes.
    """
    python = [sys.executable, "-m"] if fork_server is None else [sys.executable, "-c", _WITH_PYTHON, fork_server.python]
    command = [*python, f"benchmarks.{name}", "--json", report, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert report.exists(), done.stderr
    return {**json.loads(report.read_text()), "stderr": done.stderr}
