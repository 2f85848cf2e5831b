"""What a person does first, without the seconds that torch takes: ``make run-disagg`` in a terminal, ask, Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quartet.client import Delta, QuartetClient, Sampling
from tests.e2e.terminal import CTRL_C, Terminal
from tests.stopwatch import Stopwatch

REPOSITORY = Path(__file__).resolve().parents[2]
ENDLESS = Sampling(ignore_eos=True, max_tokens=3000)
ALL_GONE_WITHIN_S = 5.0

pytestmark = [
    pytest.mark.usefixtures("etcd_binary"),
    # Else `make` would begin with an installation.
    pytest.mark.skipif(
        Path(sys.prefix) != REPOSITORY / ".venv", reason="these tests don't run in the environment that `make` uses"
    ),
]


async def test_ctrl_c_in_a_terminal_ends_all_that_make_run_started() -> None:
    async with Terminal(REPOSITORY, "make", "run-disagg", "ENGINE=mock", "ARGS=--router-port 0") as terminal:
        await terminal.read_line("ready")
        router_address = (await terminal.read_line("quartet workers")).split()[-1]
        assert {"services.prefill", "services.decode", "router"} <= {
            word for command in terminal.processes().values() for word in command.split()
        }
        async with QuartetClient(router_address) as client, client.generate("The sea", sampling=ENDLESS) as answer:
            await anext(event async for event in answer if isinstance(event, Delta))
            terminal.press(CTRL_C)
            stopwatch = Stopwatch()
            await terminal.wait_end()
            assert stopwatch.seconds < ALL_GONE_WITHIN_S
        assert terminal.processes() == {}
    assert "stopped" in terminal.text
    assert "Traceback" not in terminal.text
