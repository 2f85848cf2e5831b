"""/v1/messages: how requests say what chats say, how answers show it, and its errors and token counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet.api.anthropic.answers import MessageHead, StreamedMessage, whole_message
from quartet.api.anthropic.requests import read_count, read_messages
from quartet.api.blocks import KeptBlocks
from quartet.api.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS, ChatPrompt, ToolChoice
from quartet.api.openai.requests import Asked, Caller
from quartet.api.openai.steps import STEP_WORK
from quartet.api.request import TextOptions
from quartet.engine.base import FinishReason
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.errors import InvalidRequestError, QueueFullError, WorkersLostError
from quartet.media.items import MediaUrl
from quartet.text.chat_message import ChatMessage, ToolCall
from quartet.text.chat_template import ChatTemplate
from quartet.text.json_object import JsonObject
from quartet.text.parsed import Parsed, ToolCallDelta
from quartet.text.tokenizer import SpecialTokens
from router.http.config import HttpConfig
from router.http.errors import STATUS, ErrorShape, HttpError, error_body
from tests.router.fakes import Plan, expected_tokens, text_of
from tests.router.http.answering import PARTS, Events, answer, run
from tests.router.http.face import TEMPLATE, open_face, until
from tests.router.http.test_server import ACME, write_keys

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
HI = [{"role": "user", "content": "hi"}]
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
ASK = {"messages": HI, "max_tokens": 5}


def read(**body: Any) -> Asked:
    return run(read_messages({**ASK, **body}, Caller()))


def chat(**body: Any) -> ChatPrompt:
    prompt = read(**body).starts[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def texts(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "a"}] * count


def test_blocks_become_the_messages_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    picture = {"type": "image", "source": BASE64, "cache_control": {"type": "ephemeral"}}
    messages = [
        *user({"type": "text", "text": "How is it "}, picture, {"type": "text", "text": "?", "citations": None}),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                {"type": "text", "text": "I look."},
                {**CALL, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ],
        },
        *user(
            {**result, "content": "rain", "is_error": False},
            {**result, "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "a"}, picture]},
            {"type": "text", "text": "So"},
            {**result, "tool_use_id": "toolu_3"},
        ),
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Yes."},
        *user({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}),
    ]
    url = MediaUrl("data:image/png;base64,AAAA")
    calls = (
        ToolCall("weather", JsonObject.of_text('{"city": "Oslo"}'), "toolu_1"),
        ToolCall("time", JsonObject.of_text("{}"), "toolu_2"),
    )
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be true."}]
    assert chat(messages=messages, system=system).messages == (
        ChatMessage("system", "Be brief.\n\nBe true."),
        ChatMessage("user", ("How is it ", url, "?")),
        ChatMessage("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        ChatMessage("tool", "rain", tool_call_id="toolu_1"),
        ChatMessage("tool", ("a", url), tool_call_id="toolu_2"),
        ChatMessage("user", "So"),
        ChatMessage("tool", "", tool_call_id="toolu_3"),
        ChatMessage("system", "Be kind."),
        ChatMessage("assistant", "Yes."),
        ChatMessage("user", (MediaUrl("https://x/y.png"),)),
    )
    assert chat(system="Be brief.").messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))


def test_fields_become_those_of_a_chat() -> None:
    asked = read(
        model="tiny",
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        stop_sequences=["END", "."],
        ignore_eos=True,
        seed=4,
        stream=True,
        stream_tool_arguments=True,
        tools=[TOOL],
        tool_choice={"type": "none", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1_024, "display": "summarized"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
        **{"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard"},
    )
    [start] = asked.starts
    guided = GuidedDecoding(GrammarKind.JSON_SCHEMA, '{"a": 1}')
    assert start.sampling == Sampling(max_tokens=7, temperature=0.0, top_p=0.5, top_k=3, ignore_eos=True, guided=guided)
    assert start.text_options == TextOptions(stop_strings=("END", "."), stream_tool_arguments=True)
    assert (start.model, start.seed, asked.streams, asked.num_choices) == ("tiny", 4, True, 1)
    prompt = start.prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_arguments is not None
    assert prompt.template_arguments.value("") == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }
    [tool] = prompt.tools
    assert (tool.name, tool.description, tool.parameters.value(""), tool.strict) == (
        "weather",
        "of a city",
        SCHEMA,
        None,
    )
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (ToolChoice.NONE, False)
    # A message that is not streamed has whole calls only.
    assert not read(stream_tool_arguments=True).starts[0].text_options.stream_tool_arguments


@pytest.mark.parametrize(
    ("choice", "known"),
    [
        ({"type": "auto"}, (ToolChoice.AUTO, "", True)),
        ({"type": "any"}, (ToolChoice.REQUIRED, "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (ToolChoice.REQUIRED, "", False)),
        ({"type": "tool", "name": "weather"}, (ToolChoice.FUNCTION, "weather", True)),
        (None, (ToolChoice.AUTO, "", True)),
    ],
)
def test_the_choice_of_tools_is_that_of_chats(choice: Any, known: tuple[ToolChoice, str, bool]) -> None:
    prompt = chat(tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.tool_name, prompt.parallel_tool_calls) == known


@pytest.mark.parametrize("kind", ["adaptive", "disabled"])
def test_thinking_sets_what_templates_call_it_unless_the_client_does(kind: str) -> None:
    thinks = kind == "adaptive"
    arguments = chat(thinking={"type": kind}).template_arguments
    assert arguments is not None and arguments.value("") == {"enable_thinking": thinks, "thinking": thinks}
    arguments = chat(thinking={"type": kind}, chat_template_kwargs={"thinking": 5}).template_arguments
    assert arguments is not None and arguments.value("") == {"enable_thinking": thinks, "thinking": 5}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"messages": [*HI, {"role": "assistant", "content": "The answer is"}]}, "messages[1]"),
        ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": user({"type": "tool_use"})}, "messages[0].content[0].type"),
        ({"messages": user({"text": "a"})}, "messages[0].content[0].type"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": user({"type": "text", "text": "a", "citations": [{}]})}, "messages[0].content[0].citations"),
        ({"messages": user({"type": "image"})}, "messages[0].content[0].source"),
        ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0].source.type"),
        (
            {"messages": user({"type": "image", "source": {"type": "url"}})},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": user({"type": "image", "source": {**BASE64, "media_type": "image/bmp"}})},
            "messages[0].content[0].source.media_type",
        ),
        (
            {"messages": user({"type": "image", "source": {**BASE64, "data": None}})},
            "messages[0].content[0].source.data",
        ),
        ({"messages": user({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [CALL]})},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "a" * 300})},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, *HI]},
            "messages[0].content[0].thinking",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *HI]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "id": None}]}, *HI]}, "messages[0].content[0].id"),
        (
            {"messages": [{"role": "assistant", "content": [*texts(1), {**CALL, "input": "{}"}]}, *HI]},
            "messages[0].content[1].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [*texts(1), {**CALL, "name": "x" * 300}]}, *HI]},
            "messages[0].content[1].name",
        ),
        ({"system": [{"type": "image", "source": BASE64}]}, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [TOOL, {**TOOL, "input_schema": {"a": "x" * 270_000}}]}, "tools[1].input_schema"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"speed": "fast"}, "speed"),
        ({"n": 2}, "n"),
        *[({name: "x"}, name) for name in ("container", "mcp_servers", "inference_geo", "diagnostics", "workspace_id")],
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(**body)
    assert refusal.value.field == field


def turn(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (HI * (MAX_MESSAGES + 1), "messages"),
        (user(*texts(MAX_PARTS + 1)), "messages[0].content"),
        ([*user(*texts(MAX_PARTS)), *user(*texts(1))], "messages[1].content"),
        (
            [*(HI * (MAX_MESSAGES - 1)), *user(*[{"type": "tool_result", "tool_use_id": "a"}] * 2)],
            f"messages[{MAX_MESSAGES - 1}].content[1]",
        ),
        ([*turn(*[{**CALL, "input": {"a": "x" * 250_000}}] * 3), *HI], "messages[0]"),
        ([*turn({**CALL, "input": {"a": "x" * 270_000}}), *HI], "messages[0].content[0].input"),
    ],
    ids=["messages", "blocks of one", "blocks of all", "results", "calls together", "one call"],
)
def test_the_bounds_of_chats_hold(messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(messages=messages)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("body", "least_work"),
    [
        ({"messages": [*turn(*[CALL] * MAX_TOOL_CALLS), *HI]}, MAX_TOOL_CALLS * 60),
        ({"messages": HI * MAX_MESSAGES}, MAX_MESSAGES * 40),
        ({"messages": user(*texts(MAX_PARTS))}, MAX_PARTS * 15),
        ({"messages": user(*[{"type": "tool_result", "tool_use_id": "a"}] * MAX_PARTS)}, MAX_PARTS * 15),
        ({"messages": HI, "tools": [TOOL] * 1_024}, 1_024 * 60),
    ],
    ids=["calls", "messages", "blocks", "results", "tools"],
)
def test_what_a_request_is_made_of_is_read_in_steps_that_are_paid_for(body: dict[str, Any], least_work: int) -> None:
    works = list(read_messages({**ASK, **body}, Caller()))
    assert sum(works) >= least_work - STEP_WORK, "all but the last step"
    assert max(works) <= 1.5 * STEP_WORK


def test_a_picture_is_paid_for_before_it_is_copied() -> None:
    picture = {"type": "image", "source": {**BASE64, "data": "A" * 4_000_000}}
    assert next(read_messages({**ASK, "messages": user(picture)}, Caller())) >= 40_000


def head_of(**body: Any) -> MessageHead:
    head = MessageHead(read(**body), "tiny")
    head.set_request_id("r")
    return head


CONTENT = [
    {"type": "thinking", "thinking": "let me see", "signature": "unsigned"},
    {"type": "text", "text": "Well then."},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln"}},
    {"type": "text", "text": " So"},
    {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
]
USAGE = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 20,
    "output_tokens": 7,
}


async def test_a_whole_answer_has_a_block_for_thinking_each_text_and_each_call() -> None:
    head = head_of()
    sink = KeptBlocks(head)
    answer(sink, PARTS, FinishReason.TOOL_CALLS)
    assert json.loads(whole_message(head, sink)) == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": CONTENT,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    ("reason", "stop_string", "shown"),
    [
        (FinishReason.STOP_ID, None, "end_turn"),
        (FinishReason.LENGTH, None, "max_tokens"),
        (FinishReason.STOP_STRING, "END", "stop_sequence"),
    ],
)
async def test_why_an_answer_ended_is_said_whole_and_streamed(
    reason: FinishReason, stop_string: str | None, shown: str
) -> None:
    head, events = head_of(), Events()
    whole = KeptBlocks(head)
    answer(whole, [Parsed(text="a")], reason, stop_string)
    answer(StreamedMessage(head, events), [Parsed(text="a")], reason, stop_string)
    message = json.loads(whole_message(head, whole))
    assert (message["stop_reason"], message["stop_sequence"]) == (shown, stop_string)
    [delta] = [event["delta"] for event in events.sent if event["type"] == "message_delta"]
    assert delta == {"stop_reason": shown, "stop_sequence": stop_string}


def block_events(index: int, begun: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": begun},
        *[{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": index},
    ]


async def test_a_stream_has_the_events_of_each_block_in_order() -> None:
    head, events = head_of(stream=True), Events()
    answer(StreamedMessage(head, events), PARTS, FinishReason.TOOL_CALLS)
    start = {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**USAGE, "input_tokens": 30, "cache_read_input_tokens": 0, "output_tokens": 0},
    }
    assert events.sent == [
        {"type": "message_start", "message": start},
        *block_events(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "let me "},
            {"type": "thinking_delta", "thinking": "see"},
            {"type": "signature_delta", "signature": "unsigned"},
        ),
        *block_events(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "Well "},
            {"type": "text_delta", "text": "then."},
        ),
        *block_events(
            2,
            {**CONTENT[2], "input": {}},
            {"type": "input_json_delta", "partial_json": '{"city": '},
            {"type": "input_json_delta", "partial_json": '"Köln"}'},
        ),
        *block_events(3, {"type": "text", "text": ""}, {"type": "text_delta", "text": " So"}),
        *block_events(4, CONTENT[4], {"type": "input_json_delta", "partial_json": "{}"}),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE,
        },
        {"type": "message_stop"},
    ]
    assert not events.num_repeated


async def test_a_call_that_is_cut_ends_with_its_block() -> None:
    head, events = head_of(stream=True), Events()
    parts = [Parsed(tool_calls=[ToolCallDelta(0, "call_1", "weather", '{"ci')])]
    answer(StreamedMessage(head, events), parts, FinishReason.LENGTH)
    assert [event["type"] for event in events.sent[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


def parse(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without comments."""
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


async def test_a_stream_is_answered_as_a_whole_and_fails_with_an_event() -> None:
    body = {**ASK, "seed": 5}
    async with open_face("prefill-0", "decode-0") as face:
        async with face.session.post("/v1/messages", json=body, headers={"anthropic-version": "any"}) as response:
            whole = await response.json()
            assert response.status == 200 and response.headers["request-id"] == whole["id"].removeprefix("msg_")
        text = text_of(expected_tokens(5, 0, 11, 5))
        assert whole["content"] == [{"type": "text", "text": text}]
        assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 11
        async with face.session.post("/v1/messages?beta=true", json={**body, "stream": True}) as response:
            events = parse(await response.read())
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert deltas == list(text)
        assert events[-2]["usage"] == whole["usage"]
        face.fleet.hops.plan("decode", Plan(error=WorkersLostError("gone"), fail_after=2))
        async with face.session.post("/v1/messages", json={**body, "stream": True}) as response:
            events = parse(await response.read())
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
        await face.until_nothing_left()


async def test_what_the_pipeline_refuses_names_the_field_as_the_client_called_it() -> None:
    async with open_face(max_model_len=64) as face:
        picture = {"type": "image", "source": {"type": "url", "url": "gopher://x/y"}}
        for body, field in (
            ({"messages": [{"role": "user", "content": "hi " * 60}]}, "messages"),
            ({"max_tokens": 1_000}, "max_tokens"),
            ({"stop_sequences": ["a" * 2_000]}, "stop_sequences"),
            ({"messages": [*HI, *user(*texts(1), picture)]}, "messages[1].content[1].source"),
            (
                {"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [picture]})},
                "messages[0].content[0].content[0].source",
            ),
            ({"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}}, "output_config.format"),
            ({"tools": [TOOL]}, "tools"),
        ):
            status, refusal = await face.post("/v1/messages", {**ASK, **body})
            assert status in (400, 403) and refusal["type"] == "error", refusal
            assert refusal["error"]["message"].startswith(f"{field}: "), refusal


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(code: int, kind: str) -> None:
    body = error_body(HttpError(code, "why", field="max_tokens"), ErrorShape.MESSAGES)
    assert body == {"type": "error", "error": {"type": kind, "message": "max_tokens: why"}}
    assert code == 405 or code in {status for status, _ in STATUS.values()} | {413}


async def test_errors_of_the_server_itself_have_anthropics_shape_too(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"acme {ACME}")
    async with open_face(config=HttpConfig(keys_file=keys)) as face:
        status, refusal = await face.post("/v1/messages", ASK, **{"x-api-key": "nope"})
        assert (status, refusal["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": ACME}, {"Authorization": f"Bearer {ACME}"}):
            status, _ = await face.post("/v1/messages/count_tokens", {"messages": HI}, **headers)
            assert status == 200
        for path, kind in (("/v1/messages/batches", "not_found_error"), ("/v1/messages", "invalid_request_error")):
            _, refusal = await face.get(path, **{"x-api-key": ACME})
            assert (refusal["type"], refusal["error"]["type"]) == ("error", kind)


async def test_a_full_queue_is_a_rate_limit_that_says_when_to_try_again() -> None:
    async with open_face() as face:

        async def refuse(_queued: Any) -> Any:
            raise QueueFullError("the queue is full", retry_delay_s=2.0)

        face.fleet.admission.admit = refuse  # type: ignore[method-assign]
        async with face.session.post("/v1/messages", json=ASK) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            assert (await response.json())["error"] == {"type": "rate_limit_error", "message": "the queue is full"}


async def test_tokens_are_counted_as_the_prompt_of_a_message_is_laid_out() -> None:
    async with open_face() as face:
        source = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ thinking }}" + TEMPLATE
        face.fleet.texts.text = replace(face.fleet.texts.text, chat_template=ChatTemplate(source, SpecialTokens()))
        body = {"messages": HI, "system": "Be brief.", "thinking": {"type": "adaptive"}}
        _, counted = await face.post("/v1/messages/count_tokens", body)
        _, message = await face.post("/v1/messages", {**body, "max_tokens": 1})
        usage = message["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        _, shorter = await face.post("/v1/messages/count_tokens", {"messages": HI})
        assert shorter["input_tokens"] < counted["input_tokens"]
        for refused, field in (
            ({"max_tokens": 5}, "max_tokens"),
            ({"tools": [TOOL]}, "tools"),
            ({"messages": user({"type": "image", "source": BASE64})}, "messages[0].content[0].source"),
        ):
            status, refusal = await face.post("/v1/messages/count_tokens", {"messages": HI, **refused})
            assert status == 400 and refusal["error"]["message"].startswith(f"{field}: "), refusal


def test_counting_needs_no_bound_of_the_answer() -> None:
    assert run(read_count({"messages": HI}, Caller())).starts[0].sampling.max_tokens is None


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with open_face() as face:
        face.fleet.hops.plan("decode", Plan(hang_after=2))
        async with face.session.post("/v1/messages", json={**ASK, "max_tokens": 50, "stream": True}) as response:
            while b"text_delta" not in await response.content.readline():
                pass
            response.close()
        await until(lambda: not face.fleet.pipeline.num_running)
        face.fleet.assert_nothing_left()
