"""``quartet chat --tools``: calls are shown and run, their results go back, and the model answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet.errors import QueueFullError, ServingError
from quartet.v1 import router_pb2
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

CALCULATOR = str(Path(__file__).parents[2] / "configs" / "tools" / "calculator.json")


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


def call(arguments: str, name: str = "calculator", index: int = 0) -> router_pb2.ToolCallDelta:
    return router_pb2.ToolCallDelta(index=index, id=f"id{index}", name=name, arguments=arguments, is_complete=True)


def thought(text: str) -> router_pb2.Delta:
    return router_pb2.Delta(reasoning=text)


def said(text: str) -> router_pb2.Delta:
    return router_pb2.Delta(text=text)


def called(*calls: router_pb2.ToolCallDelta) -> router_pb2.Delta:
    return router_pb2.Delta(tool_calls=calls)


ASKS_AND_ANSWERS: list[list[router_pb2.Delta | ServingError]] = [
    [thought("I com"), thought("pute it.\nAt once."), said("A moment."), called(call('{"expression": "6*7"}'))],
    [said("It is"), said(" 42.")],
]


async def test_a_call_is_run_and_its_result_goes_back_until_the_model_answers(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.answers = ASKS_AND_ANSWERS
    address = await start_router(router)
    result = await run_cli("chat", "--tools", CALCULATOR, "--router", address, input="6 times 7?\nThanks\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "> │ I compute it.\n"
        "│ At once.\n"
        "\n"
        "A moment.\n"
        "\n"
        '→ calculator(expression="6*7")\n'
        "← 42\n"
        "\n"
        "It is 42.\n"
        "> one two three\n"
        "> \n"
    )
    first, second, third = (start.chat for start in router.starts)
    [tool] = first.tools
    assert tool.name == "calculator" and json.loads(tool.parameters)["required"] == ["expression"]
    assert first.tools == second.tools == third.tools
    question, turn, returned = second.messages
    assert (question.role, question.content) == ("user", "6 times 7?")
    assert (turn.role, turn.content, turn.reasoning) == ("assistant", "A moment.", "I compute it.\nAt once.")
    [made] = turn.tool_calls
    assert (made.id, made.name, json.loads(made.arguments)) == ("id0", "calculator", {"expression": "6*7"})
    assert (returned.role, returned.content, returned.tool_call_id) == ("tool", "42", "id0")
    assert list(third.messages)[:3] == [question, turn, returned]
    assert [(message.role, message.content) for message in third.messages[3:]] == [
        ("assistant", "It is 42."),
        ("user", "Thanks"),
    ]


async def test_calls_that_cannot_be_run_are_shown_and_answered_with_the_reason(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    calls = [
        call('{"city": "Köln", "days": [1, 2]}', "weather"),
        call('{"expression": "1/0"}', index=1),
        call('{"sum": "1"}', index=2),
        call("[]", index=3),
        call("", index=4),
        call(json.dumps({"expression": "\x1b[2J" + 300 * "9"}), index=5),
    ]
    router.answers = [[called(*calls[:2]), said("\n"), called(*calls[2:])], [said("Sorry.")]]
    address = await start_router(router)
    result = await run_cli("chat", "--tools", CALCULATOR, "--router", address, input="Hi\n")
    errors = [
        "error: there is nobody here to run weather",
        "error: division by zero",
        "error: calculator takes one argument, expression, a string",
        "error: bad arguments: the JSON must be an object",
        "error: calculator takes one argument, expression, a string",
        "error: the expression is longer than 256 characters",
    ]
    *lines, last, answer, end = result.stdout.removeprefix("> ").splitlines()
    assert lines[:5] == [
        '→ weather(city="Köln", days=[1, 2])',
        '→ calculator(expression="1/0")',
        '→ calculator(sum="1")',
        "→ calculator([])",
        "→ calculator()",
    ]
    assert lines[5].startswith(r'→ calculator(expression="\u001b[2J999') and lines[5].endswith("9…")
    assert len(lines[5]) == 202
    assert lines[6:] == [f"← {error}" for error in errors]
    assert (last, answer, end) == ("", "Sorry.", "> ")
    assert [message.content for message in router.starts[1].chat.messages[2:]] == errors


async def test_a_model_that_only_calls_is_stopped_and_the_conversation_goes_on(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    calls = [called(call('{"expression": "1+1"}'))]
    router.answers = [calls] * 8 + [[said("Yes.")]]
    address = await start_router(router)
    result = await run_cli("chat", "--tools", CALCULATOR, "--router", address, input="Hi\nWell?\n")
    assert result.stderr == "quartet: the model called tools 8 times and did not answer\n"
    assert result.stdout.count("← 2\n") == 8
    assert result.stdout.endswith("> Yes.\n> \n")
    assert [message.content for message in router.starts[8].chat.messages] == ["Well?"]


async def test_a_failure_after_a_call_drops_the_question_and_not_the_conversation(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.answers = [ASKS_AND_ANSWERS[0], [said("It is"), QueueFullError("the queue is full")], [said("Yes.")]]
    address = await start_router(router)
    result = await run_cli("chat", "--tools", CALCULATOR, "--router", address, input="Hi\nWell?\n")
    assert result.stderr == "quartet: RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full\n"
    assert result.stdout.endswith("← 42\n\nIt is\n> Yes.\n> \n")
    assert [message.content for message in router.starts[2].chat.messages] == ["Well?"]


async def test_times_are_printed_for_each_request_after_the_answer(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.answers = ASKS_AND_ANSWERS
    address = await start_router(router)
    result = await run_cli("chat", "--tools", CALCULATOR, "--time", "--router", address, input="Hi\n")
    assert [line.partition(" ")[0] for line in result.stderr.splitlines()] == ["time:"] * 2


async def test_generate_prints_reasoning_beside_the_text(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.answers = [[thought("Hm.\n"), thought("Yes."), said("\nA"), said(" moment.\n")]]
    result = await run_cli("generate", "--chat", "Hi", "--router", await start_router(router))
    assert result.stdout == "\nA moment.\n\n"
    assert result.stderr == "│ Hm.\n│ Yes.\n\n"


FUNCTION: Mapping[str, Any] = {"name": "f"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{", "Expecting property name"),
        ("{}", "it must hold a list of tools"),
        ("[]", "it must hold a list of tools"),
        ('["f"]', '[0] must be {"type": "function"'),
        (json.dumps([{"type": "function", "function": FUNCTION}, {"type": "function"}]), "[1] must be"),
        (json.dumps([{"type": "function", "function": {**FUNCTION, "x": 1}}]), "[0].function.x is unknown"),
        (json.dumps([{"type": "function", "function": {**FUNCTION, "parameters": []}}]), "field of a wrong type"),
    ],
)
async def test_a_malformed_file_is_exit_code_2(run_cli: RunCli, tmp_path: Path, content: str, shown: str) -> None:
    (tmp_path / "t.json").write_text(content)
    result = await run_cli("chat", "--tools", str(tmp_path / "t.json"), "--router", "127.0.0.1:1")
    assert result.exit_code == 2
    assert shown.replace(" ", "") in "".join(result.stderr.replace("│", "").split())


async def test_a_missing_file_is_exit_code_2(run_cli: RunCli) -> None:
    result = await run_cli("chat", "--tools", "/nowhere/at/all", "--router", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "/nowhere/at/all" in result.stderr
