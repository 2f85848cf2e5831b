"""/v1/responses: how requests say what chats say, and how answers show it, whole and in events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import HttpVersion10

from quartet.api.blocks import KeptBlocks
from quartet.api.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS, ChatPrompt, ToolChoice
from quartet.api.openai.requests import Asked, Caller
from quartet.api.openai.steps import STEP_WORK
from quartet.api.request import TextOptions
from quartet.api.responses.answers import ResponseHead, StreamedResponse, whole_response
from quartet.api.responses.requests import read_response
from quartet.engine.base import FinishReason
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.errors import InvalidRequestError, UnsupportedFieldError, WorkersLostError
from quartet.media.items import MediaUrl
from quartet.text.chat_message import ChatMessage, ToolCall
from quartet.text.json_object import JsonObject
from quartet.text.parsed import Parsed, ToolCallDelta
from router.http.events import EventStream, EventWriter
from tests.router.fakes import Plan, expected_tokens, text_of
from tests.router.http.answering import PARTS, Events, answer, run
from tests.router.http.face import open_face, until

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
PICTURE = "data:image/png;base64,AAAA"


def read(**body: Any) -> Asked:
    return run(read_response({"input": "hi", **body}, Caller()))


def chat(**body: Any) -> ChatPrompt:
    prompt = read(**body).starts[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "How is it "},
                {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
            ],
        },
        {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"id": "fc_1", "status": "completed", **CALL},
        {**CALL, "call_id": "call_2", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"role": "assistant", "content": "It rains."},
        {"role": "assistant", "content": "Still."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "bye"},
    ]
    city = JsonObject.of_text('{"city": "Oslo"}')
    calls = (ToolCall("weather", city, "call_1"), ToolCall("weather", JsonObject.of_text("{}"), "call_2"))
    assert chat(input=items, instructions="Be brief.").messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("system", "Be kind."),
        ChatMessage("user", ("How is it ", MediaUrl(PICTURE))),
        ChatMessage("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        ChatMessage("tool", "rain", tool_call_id="call_1"),
        ChatMessage("tool", "ab", tool_call_id="call_2"),
        ChatMessage("assistant", "It rains."),
        ChatMessage("assistant", "Still."),
        ChatMessage("assistant", "No.", reasoning="short"),
        ChatMessage("user", "bye"),
    )
    assert chat().messages == (ChatMessage("user", "hi"),)


def test_fields_become_those_of_a_chat() -> None:
    asked = read(
        model="tiny",
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        ignore_eos=True,
        stop=["END"],
        seed=4,
        tools=[TOOL],
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"enable_thinking": True},
        text={"format": {"type": "json_schema", "name": "n", "description": "d", "strict": True, "schema": {"a": 1}}},
        include=["reasoning.encrypted_content"],
        stream_tool_arguments=True,
        **{"store": True, "user": "u", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
        **{"truncation": "disabled", "background": False, "top_logprobs": 0, "stream": True},
        metadata={"a": "b"},
    )
    [start] = asked.starts
    guided = GuidedDecoding(GrammarKind.JSON_SCHEMA, '{"a": 1}')
    assert start.sampling == Sampling(max_tokens=7, temperature=0.0, top_p=0.5, top_k=3, ignore_eos=True, guided=guided)
    assert start.text_options == TextOptions(stop_strings=("END",), stream_tool_arguments=True)
    assert (start.model, start.seed, asked.streams, asked.num_choices) == ("tiny", 4, True, 1)
    prompt = start.prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_arguments is not None
    assert prompt.template_arguments.value("") == {"enable_thinking": True, "reasoning_effort": "low"}
    [tool] = prompt.tools
    assert (tool.name, tool.description, tool.parameters.value(""), tool.strict) == (
        "weather",
        "of a city",
        SCHEMA,
        True,
    )
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (ToolChoice.NONE, False)
    named = chat(tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert (named.tool_choice, named.tool_name) == (ToolChoice.FUNCTION, "weather")
    assert read(text={"format": {"type": "json_object"}}).starts[0].sampling.guided is not None
    assert read(text={"format": {"type": "text"}}).starts[0].sampling.guided is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**CALL, "namespace": "n"}]}, "input[0].namespace"),
        ({"input": ["", {**CALL, "name": "x" * 300}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a"}, {**CALL, "name": "x" * 300}]}, "input[1].name"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "a" * 300, "output": ""}]}, "input[0].call_id"),
        ({"input": [{**CALL, "call_id": "a" * 300}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "function": {}}]}, "tools[0].function"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "short"}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        *[
            ({name: "x"}, name)
            for name in ("previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation", "nonsense")
        ],
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(**body)
    assert refusal.value.field == field
    assert "json_schema." not in refusal.value.message


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "input"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (MAX_PARTS + 1)}], "input[0].content"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * count} for count in (MAX_PARTS, 1)],
            "input[1].content",
        ),
        ([{**CALL, "arguments": "x" * 250_000}] * 3, "input[0]"),
        ([{"role": "user", "content": "a"}, {**CALL, "arguments": "x" * 270_000}], "input[1].arguments"),
    ],
    ids=["items", "parts of one", "parts of all", "calls together", "one call"],
)
def test_the_bounds_of_chats_hold(items: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(input=items)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("body", "least_work"),
    [
        ({"input": [CALL] * MAX_TOOL_CALLS}, MAX_TOOL_CALLS * 60),
        ({"input": [{"role": "user", "content": "a"}] * MAX_MESSAGES}, MAX_MESSAGES * 40),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * MAX_PARTS}]}, MAX_PARTS * 15),
        ({"input": "hi", "tools": [TOOL] * 1_024}, 1_024 * 60),
    ],
    ids=["calls", "items", "parts", "tools"],
)
def test_what_a_request_is_made_of_is_read_in_steps_that_are_paid_for(body: dict[str, Any], least_work: int) -> None:
    works = list(read_response(body, Caller()))
    assert sum(works) >= least_work - STEP_WORK, "all but the last step"
    assert max(works) <= 1.5 * STEP_WORK


def head_of(**body: Any) -> ResponseHead:
    head = ResponseHead(read(**body), "tiny")
    head.set_request_id("r")
    return head


OUTPUT = [
    {
        "id": "rs_r_0",
        "status": "completed",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "let me see"}],
    },
    {
        "id": "msg_r_1",
        "status": "completed",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Well then.", "annotations": [], "logprobs": []}],
    },
    {
        "id": "fc_r_2",
        "status": "completed",
        "type": "function_call",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city": "Köln"}',
    },
    {
        "id": "msg_r_3",
        "status": "completed",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": " So", "annotations": [], "logprobs": []}],
    },
    {
        "id": "fc_r_4",
        "status": "completed",
        "type": "function_call",
        "call_id": "call_2",
        "name": "time",
        "arguments": "{}",
    },
]
USAGE = {
    "input_tokens": 30,
    "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 37,
}


async def test_a_whole_answer_has_an_item_for_reasoning_each_text_and_each_call() -> None:
    head = head_of(temperature=0, metadata={"a": "b"}, max_output_tokens=9, tool_choice="none")
    sink = KeptBlocks(head)
    answer(sink, PARTS, FinishReason.TOOL_CALLS)
    response = json.loads(whole_response(head, sink))
    assert (response["output"], response["usage"]) == (OUTPUT, USAGE)
    assert (response["id"], response["object"], response["model"]) == ("resp_r", "response", "tiny")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["completed_at"] >= response["created_at"]
    shown = ("temperature", "top_p", "metadata", "max_output_tokens", "tool_choice", "tools", "text", "store")
    assert [response[name] for name in shown] == [
        *(0.0, 1.0, {"a": "b"}, 9, "none", []),
        *({"format": {"type": "text"}}, False),
    ]


async def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    head = head_of(
        tool_choice={"type": "function", "name": "f"}, text={"format": {"type": "json_schema", "schema": {}}}
    )
    sink = KeptBlocks(head)
    answer(sink, [Parsed(text="Once")], FinishReason.LENGTH)
    response = json.loads(whole_response(head, sink))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert (response["tool_choice"], response["text"]) == ({"type": "function", "name": "f"}, None)
    for reason in (FinishReason.STOP_ID, FinishReason.STOP_STRING):
        sink = KeptBlocks(head)
        answer(sink, [Parsed(text="Once")], reason)
        response = json.loads(whole_response(head, sink))
        assert response["status"] == response["output"][0]["status"] == "completed"


def place(index: int, kind: str) -> dict[str, Any]:
    return {"output_index": index, "item_id": f"{kind}_r_{index}"}


def events_of_text(index: int, *texts: str) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item, at = OUTPUT[index], {**place(index, "msg"), "content_index": 0}
    begun = {**item, "status": "in_progress", "content": []}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        {"type": "response.content_part.added", **at, "part": part},
        *[{"type": "response.output_text.delta", **at, "logprobs": [], "delta": text} for text in texts],
        {"type": "response.output_text.done", **at, "logprobs": [], "text": "".join(texts)},
        {"type": "response.content_part.done", **at, "part": {**part, "text": "".join(texts)}},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def events_of_call(index: int, *arguments: str) -> list[dict[str, Any]]:
    item, at = OUTPUT[index], place(index, "fc")
    begun = {**item, "status": "in_progress", "arguments": ""}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *[{"type": "response.function_call_arguments.delta", **at, "delta": one} for one in arguments],
        {"type": "response.function_call_arguments.done", **at, "arguments": "".join(arguments)},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


async def test_a_stream_has_the_events_of_each_item_in_order_and_numbers_them() -> None:
    head, events = head_of(stream=True), Events()
    answer(StreamedResponse(head, events), PARTS, FinishReason.TOOL_CALLS)
    assert [event.pop("sequence_number") for event in events.sent] == list(range(len(events.sent)))
    created, in_progress, *items, completed = events.sent
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert created["response"]["usage"] is None
    part = {"type": "reasoning_text", "text": ""}
    at = {**place(0, "rs"), "content_index": 0}
    assert items == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**OUTPUT[0], "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **at, "part": part},
        {"type": "response.reasoning_text.delta", **at, "delta": "let me "},
        {"type": "response.reasoning_text.delta", **at, "delta": "see"},
        {"type": "response.reasoning_text.done", **at, "text": "let me see"},
        {"type": "response.content_part.done", **at, "part": {**part, "text": "let me see"}},
        {"type": "response.output_item.done", "output_index": 0, "item": OUTPUT[0]},
        *events_of_text(1, "Well ", "then."),
        *events_of_call(2, '{"city": ', '"Köln"}'),
        *events_of_text(3, " So"),
        *events_of_call(4, "{}"),
    ]
    assert completed["type"] == "response.completed"
    assert (completed["response"]["output"], completed["response"]["usage"]) == (OUTPUT, USAGE)
    # Texts are repeated at their ends, once each time.
    assert events.num_repeated == 3 + 2 * 3 + 2 * 2 + 1


async def test_a_stream_that_is_cut_ends_incomplete_and_a_call_that_is_cut_is_never_done() -> None:
    head, events = head_of(stream=True), Events()
    parts = [Parsed(tool_calls=[ToolCallDelta(0, "call_1", "weather", '{"ci')])]
    answer(StreamedResponse(head, events), parts, FinishReason.LENGTH)
    *_, delta, done, end = events.sent
    assert (delta["type"], delta["delta"]) == ("response.function_call_arguments.delta", '{"ci')
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (end["type"], end["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_a_call_that_never_ends_stays_incomplete_whatever_comes_after_it() -> None:
    head, events = head_of(stream=True), Events()
    parts = [Parsed(tool_calls=[ToolCallDelta(0, "call_1", "weather", '{"ci')]), Parsed(text="Well")]
    answer(StreamedResponse(head, events), parts, FinishReason.STOP_ID)
    done = [event["item"] for event in events.sent if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]


async def test_a_stream_is_answered_as_a_whole_and_fails_with_an_event() -> None:
    body = {"input": "hi", "seed": 5, "max_output_tokens": 5}
    async with open_face() as face:
        status, whole = await face.post("/v1/responses", body)
        assert (status, whole["output"][0]["content"][0]["text"]) == (200, text_of(expected_tokens(5, 0, 11, 5)))
        async with face.session.post("/v1/responses", json={**body, "stream": True}) as response:
            events = parse(await response.read())
        last = events[-1]["response"]
        assert last["output"][0]["content"] == whole["output"][0]["content"] and last["usage"] == whole["usage"]
        face.fleet.hops.plan("decode", Plan(error=WorkersLostError("gone"), fail_after=2))
        async with face.session.post("/v1/responses", json={**body, "stream": True}) as response:
            events = parse(await response.read())
        assert [event["type"] for event in events[-3:]] == ["response.output_text.delta"] * 2 + ["response.failed"]
        failed = events[-1]["response"]
        assert (failed["status"], failed["error"]["code"], failed["error"]["message"]) == (
            "failed",
            "server_error",
            "gone",
        )
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        await face.until_nothing_left()


def parse(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without comments."""
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


async def test_what_the_pipeline_refuses_names_the_field_as_the_client_called_it() -> None:
    async with open_face(max_model_len=64) as face:
        picture = {"type": "input_image", "image_url": "gopher://x/y"}
        items = [{"role": "user", "content": "a"}, {"role": "user", "content": [{**picture}]}]
        for body, field in (
            ({"input": "hi " * 60}, "input"),
            ({"input": "hi", "max_output_tokens": 1_000}, "max_output_tokens"),
            ({"input": "hi", "stop": ["a" * 2_000]}, "stop"),
            ({"input": items}, "input[1].content[0].image_url"),
            ({"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"input": "hi", "structured_outputs": {"json_object": True}}, "structured_outputs"),
            ({"input": "hi", "tools": [TOOL]}, "tools"),
            ({"input": "hi", "tools": [{**TOOL, "name": "x" * 300}]}, "tools[0].name"),
        ):
            status, refusal = await face.post("/v1/responses", body)
            assert status in (400, 403), refusal
            assert refusal["error"]["param"] == field, refusal
        status, refusal = await face.post("/v1/responses", {"input": "hi", "model": "huge"})
        assert (status, refusal["error"]["code"]) == (404, "model_not_found")


@dataclass
class Unread:
    """A transport whose reader takes nothing."""

    size: int = 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.size += len(data)

    def get_write_buffer_size(self) -> int:
        return self.size


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_reader_may_leave_unread_what_a_stream_repeats_and_no_more(repeats: bool) -> None:
    request: Any = SimpleNamespace(version=HttpVersion10)
    stream = EventStream(request, EventWriter(), max_unread_bytes=1_000)
    stream.transport, slow = Unread(), []  # type: ignore[assignment]
    stream.on_slow = lambda: slow.append(True)
    (stream.repeat if repeats else stream.send)("x" * 5_000)
    stream.write()
    assert bool(slow) is not repeats
    if repeats:
        stream.send("x" * 1_000)
        stream.write()
        assert not slow
        stream.send("x")
        stream.write()
        assert slow


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with open_face() as face:
        face.fleet.hops.plan("decode", Plan(hang_after=2))
        body = {"input": "hi", "max_output_tokens": 50, "stream": True}
        async with face.session.post("/v1/responses", json=body) as response:
            while b"output_text.delta" not in await response.content.readline():
                pass
            response.close()
        await until(lambda: not face.fleet.pipeline.num_running)
        face.fleet.assert_nothing_left()


def test_no_answer_is_kept() -> None:
    with pytest.raises(UnsupportedFieldError, match="send the items of the conversation as input"):
        read(previous_response_id="resp_1")


async def test_another_method_and_a_body_that_is_no_json_are_refused_in_the_same_shape() -> None:
    async with open_face() as face:
        status, refusal = await face.get("/v1/responses")
        assert (status, refusal["error"]["type"]) == (405, "invalid_request_error")
        status, refusal = await face.post("/v1/responses", b"{")
        assert status == 400 and "no JSON" in refusal["error"]["message"]
        with pytest.raises(aiohttp.ClientResponseError):
            (await face.session.get("/v1/responses/resp_1")).raise_for_status()
