"""``quartet top`` in a terminal, over a fleet of mock engines: keys, a drain, a lost router, Ctrl-Z, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from quartet.v1 import router_pb2
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.stack import Stack, StackConfig
from tests.e2e.terminal import Terminal
from tests.e2e.up import QUARTET

CTRL_Z = b"\x1a"
COLOUR = re.compile(r"\x1b\[(\d+;)*3\d")
READY, DRAINING = router_pb2.WORKER_STATE_READY, router_pb2.WORKER_STATE_DRAINING
# What the shell starts as `quartet`.
PYTHON = f"{sys.executable} {QUARTET} top"


@pytest.fixture(scope="module")
def fleet(start_stack: StartStack) -> Stack:
    worker = {"engine.kind": "mock", "model_path": str(tiny.CHECKPOINT)}
    return start_stack(StackConfig(num_prefill=1, num_decode=2, worker=worker))


def run(directory: Path, script: str, fleet: Stack) -> Terminal:
    """A shell with job control, in which ``top`` is the command."""
    command = f"top() {{ {QUARTET} top --router {fleet.router_address}; }}; set -m; {script}"
    return Terminal(directory, "bash", "-c", command)


async def test_keys_sort_and_drain_and_the_terminal_is_as_before(tmp_path: Path, fleet: Stack) -> None:
    async with run(tmp_path, "top; stty -a; fg; stty -a; echo over", fleet) as terminal:
        await terminal.read_until("3 of 3 workers ready")
        await terminal.read_until("▸ prefill-0")
        terminal.press(b"s")
        await terminal.read_until("WORKER▲")
        terminal.press(CTRL_Z)
        await terminal.read_until(" icanon")
        await terminal.read_until(" echo ")
        await terminal.read_until("WORKER▲")  # `fg`: it goes on as it was
        terminal.press(b"\x1b[A\x1b[Ajd")
        await terminal.read_until("Drain decode-1?")
        terminal.press(b"n")
        await terminal.read_until("decode-1 was not drained")
        terminal.press(b"dy")
        await terminal.read_until("decode-1 is drained: 0 requests ended there")
        await asyncio.to_thread(fleet.wait_states, {"prefill-0": READY, "decode-0": READY, "decode-1": DRAINING}, 60)
        fleet.kill("router")
        await terminal.read_until("no contact: ")
        fleet.spawn("router")
        await terminal.read_until("2 of 3 workers ready")
        terminal.press(b"q")
        await terminal.read_until(" icanon")
        await terminal.read_until("over")
        await terminal.wait_end()
    assert "Traceback" not in terminal.text
    assert COLOUR.search(terminal.text)


async def test_a_signal_leaves_the_terminal_as_before_and_no_color_is_heeded(tmp_path: Path, fleet: Stack) -> None:
    async with run(tmp_path, 'NO_COLOR=1 top; echo "code $?"; stty -a', fleet) as terminal:
        await terminal.read_until("workers ready")
        [pid] = [pid for pid, command in terminal.processes().items() if command.startswith(PYTHON)]
        os.kill(pid, signal.SIGTERM)
        await terminal.read_until("code 143")
        await terminal.read_until(" icanon")
        await terminal.wait_end()
    assert "Traceback" not in terminal.text
    assert not COLOUR.search(terminal.text)
