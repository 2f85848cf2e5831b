"""``quartet chat --tools``: a person asks, the model calls the calculator, gets its result and answers."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.answers_after_calls import THEN
from tests.e2e.conftest import StartStack
from tests.e2e.stack import Stack, StackConfig
from tests.e2e.terminal import Terminal
from tests.e2e.test_tools import TEMPLATE

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
CALL = json.dumps({"name": "calculator", "arguments": {"expression": "6*7"}})
ASKS = f"I had better compute it.</think>\n\nOne moment.\n<tool_call>\n{CALL}\n</tool_call>"
ANSWERS = "I have it.</think>\n\n6 times 7 is 42."


@pytest.fixture(scope="module")
def chat(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command, at a router whose model calls the calculator and answers when it has the result."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    worker = {
        "model_path": str(tiny.CHECKPOINT),
        "custom_jinja_template": str(template),
        "engine.kind": "mock",
        "engine.mock.speed_up": 100.0,
        "engine.mock.says": ASKS + THEN + ANSWERS,
    }
    stack: Stack = start_stack(StackConfig(worker=worker, launcher=("tests.e2e.answers_after_calls",)))
    program = "from cli.app import main; main()"
    tools = str(REPOSITORY / "configs" / "tools" / "calculator.json")
    return [sys.executable, "-c", program, "chat", "--tools", tools, "--router", stack.router_address]


async def test_in_a_terminal_calls_and_reasoning_have_their_own_colours(chat: list[str]) -> None:
    async with Terminal(REPOSITORY, "env", "-u", "NO_COLOR", *chat) as terminal:
        for question in (b"6 times 7?\n", b"Again?\n"):
            terminal.press(question)
            for start in ('\x1b[36m→ calculator(expression="6*7")', "\x1b[36m← 42", "6 times 7 is 42."):
                await terminal.read_line(start)
    assert terminal.text.count("\x1b[2mI") == 4


async def test_a_terminal_that_wants_no_colours_gets_none(chat: list[str]) -> None:
    async with Terminal(REPOSITORY, "env", "NO_COLOR=1", *chat) as terminal:
        terminal.press(b"6 times 7?\n")
        for start in ("│ I had better compute it.", "→ calculator(", "← 42", "│ I have it.", "6 times 7 is 42."):
            await terminal.read_line(start)
    # Codes that end in m are styles; readline has others.
    assert re.search(r"\x1b\[[0-9;]*m", terminal.text) is None


@pytest.mark.parametrize("path", ["generate", "session", "direct"])
async def test_in_a_pipe_there_are_no_colours_on_any_path(chat: list[str], path: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*chat, "--path", path),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        output, errors = await process.communicate(b"6 times 7?\n")
    assert (process.returncode, errors.decode()) == (0, "")
    assert output.decode() == (
        "> │ I had better compute it.\n"
        "\n"
        "One moment.\n"
        "\n"
        '→ calculator(expression="6*7")\n'
        "← 42\n"
        "\n"
        "│ I have it.\n"
        "\n"
        "6 times 7 is 42.\n"
        "> \n"
    )
