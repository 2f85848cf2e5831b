"""Tools and reasoning: how requests say them, and how answers show them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.api.openai.answers import Head, StreamedAnswer, WholeAnswer, whole_response
from quartet.api.openai.requests import Asked, Caller, read_chat
from quartet.api.openai.steps import STEP_WORK
from quartet.api.request import Accepted, ChoiceFinished, TimeBreakdown, Usage
from quartet.engine.base import FinishReason
from quartet.errors import InvalidRequestError
from quartet.text.chat_template import ChatTemplate
from quartet.text.parsed import Parsed, ToolCallDelta
from quartet.text.tokenizer import SpecialTokens
from tests.router.http.face import TEMPLATE, open_face

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
MESSAGES = [
    {"role": "user", "content": "how is it?", "name": "ann"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def read(**body: Any) -> Asked:
    steps = read_chat({"messages": MESSAGES, **body}, Caller())
    try:
        while True:
            next(steps)
    except StopIteration as end:
        asked: Asked = end.value
        return asked


@dataclass
class Events:
    """Takes events in place of a connection."""

    sent: list[Any] = field(default_factory=list)

    def send(self, event: str) -> None:
        self.sent.append(json.loads(event.removeprefix("data: ")))


def finished(reason: FinishReason) -> ChoiceFinished:
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=7, num_attempts=1)
    return ChoiceFinished(choice=0, reason=reason, usage=usage, time=TimeBreakdown())


#: What a parser shows of an answer with reasoning, text and two calls, one of them in parts.
PARTS = [
    Parsed(reasoning="let me "),
    Parsed(reasoning="see", text="Well. "),
    Parsed(tool_calls=[ToolCallDelta(0, "call_1", "weather", '{"city": ')]),
    Parsed(tool_calls=[ToolCallDelta(0, arguments='"Oslo"}'), ToolCallDelta(1, "call_2", "time", "{}", True)]),
]


def test_tools_calls_and_arguments_of_the_template_are_read() -> None:
    asked = read(
        tools=TOOLS,
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning_effort="low",
        chat_template_args={"enable_thinking": True, "reasoning_effort": "high"},
    )
    prompt = asked.starts[0].prompt
    assert isinstance(prompt, ChatPrompt)
    [tool] = prompt.tools
    assert (tool.name, tool.description, tool.parameters.value("")) == ("weather", "of a city", SCHEMA)
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (ToolChoice.NONE, False)
    assert prompt.template_arguments is not None
    assert prompt.template_arguments.value("") == {"enable_thinking": True, "reasoning_effort": "low"}
    user, assistant, tool_message = prompt.messages
    assert user.name == "ann" and assistant.reasoning == "hm" and tool_message.tool_call_id == "call_1"
    [call] = assistant.tool_calls
    assert (call.id, call.name, call.arguments.value("")) == ("call_1", "weather", {"city": "Oslo"})


def functions(count: int, name: str, value: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", name: value}} for _ in range(count)]


def assistant(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def test_long_tools_and_calls_are_refused_before_any_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(*_arguments: Any, **_options: Any) -> str:
        raise AssertionError("something was written out")

    monkeypatch.setattr(json, "dumps", dump)
    long = {"a": "x" * 250_000}
    calls = assistant(*functions(300, "arguments", long))
    for body, path in (
        ({"tools": functions(300, "parameters", long)}, "tools"),
        ({"messages": [calls]}, "messages[0]"),
    ):
        with pytest.raises(InvalidRequestError, match="longer than 524288 characters together") as refusal:
            read(**body)
        assert (refusal.value.field or "").startswith(path)
    with pytest.raises(InvalidRequestError, match=r"^tools\[1\].function.parameters: the JSON is longer than 262144"):
        read(tools=functions(1, "parameters", {}) + functions(1, "parameters", {"a": [{"b": "x" * 263_000}]}))


@pytest.mark.parametrize(
    ("body", "least_work"),
    [
        ({"messages": [assistant(*functions(4_096, "arguments", {"a": 1}))]}, 4_096 * 60),
        ({"messages": [assistant(*functions(2, "arguments", {"a": "x" * 250_000}))] * 40}, 40 * 500_000 // 40),
        ({"messages": [assistant(*functions(1, "arguments", {"a": [1] * 5_000}))] * 6}, 30_000 * 2),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4_096}]}, 4_096 * 15),
        ({"messages": [{"role": "user", "content": "a"}] * 4_096}, 4_096 * 15),
        (
            {"tools": functions(1_024, "parameters", {"a": 1}), "messages": [{"role": "user", "content": "a"}]},
            1_024 * 60,
        ),
    ],
    ids=["calls", "long calls", "calls with many values", "parts", "messages", "tools"],
)
def test_what_a_chat_is_made_of_is_read_in_steps_that_are_paid_for(body: dict[str, Any], least_work: int) -> None:
    works = list(read_chat(body, Caller()))
    assert sum(works) >= least_work - STEP_WORK, "all but the last step"
    assert max(works) <= 1.5 * STEP_WORK


def test_too_many_biases_are_refused_before_any_is_read() -> None:
    with pytest.raises(InvalidRequestError, match="32000"):
        read(logit_bias={f"no token {number}": 1 for number in range(32_000)})


async def test_a_whole_answer_has_its_reasoning_and_calls_apart_from_its_text() -> None:
    head = Head(read(), "tiny")
    answer = WholeAnswer(head)
    answer.accept(Accepted(request_id="r", choices=(), num_prompt_tokens=3, seed=0))
    for part in PARTS:
        answer.add_parsed(0, 0, (5,), part, ())
    answer.finish(finished(FinishReason.TOOL_CALLS))
    answer.end()
    [choice] = json.loads(whole_response(head, [answer]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Well. ",
        "reasoning_content": "let me see",
        "tool_calls": [CALL, {**CALL, "id": "call_2", "function": {"name": "time", "arguments": "{}"}}],
    }


async def test_a_stream_says_a_calls_name_once_and_its_arguments_as_they_come() -> None:
    head, events = Head(read(stream=True), "tiny"), Events()
    answer = StreamedAnswer(head, events)
    for part in PARTS:
        answer.add_parsed(0, 0, (5,), part, ())
    answer.add(0, 4, (6,), "Bye.", ())
    answer.finish(finished(FinishReason.TOOL_CALLS))
    *parts, end = events.sent
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"reasoning_content": "let me "},
        {"reasoning_content": "see", "content": "Well. "},
        {"tool_calls": [{"index": 0, **CALL, "function": {"name": "weather", "arguments": '{"city": '}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"Oslo"}'}},
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ]
        },
        {"content": "Bye."},
    ]
    assert end["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_template_gets_the_tools_or_the_request_is_refused() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 1}
    async with open_face() as face:
        status, answer = await face.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "tools", "unsupported_field")
        _, plain = await face.post("/tokenize", {"messages": body["messages"]})
        source = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ effort }}" + TEMPLATE
        face.fleet.texts.text = replace(face.fleet.texts.text, chat_template=ChatTemplate(source, SpecialTokens()))
        asked = {"messages": body["messages"], "tools": TOOLS, "chat_template_kwargs": {"effort": "high"}}
        _, counted = await face.post("/tokenize", asked)
        assert counted["count"] > plain["count"]
