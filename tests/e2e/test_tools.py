"""A chat with tools from the client's words to the calls of its answer, on every path, over real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from quartet.client import (
    ChatMessage,
    ChoiceFinished,
    Delta,
    FinishReason,
    GenerateFields,
    JsonObject,
    QuartetClient,
    RequestPath,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
)
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from services.topology.launch import free_port
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.stack import Stack, StackConfig

#: Shows tools, calls and reasoning; its markers are Qwen's.
TEMPLATE = """\
{%- for tool in tools or () %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or () %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' + ('' if thinks is false else '<think>') }}"""
ARGUMENTS = {"city": "Köln", "days": [1, 2]}
SAYS = (
    "The weather? I look it up.</think>\n\nA moment.\n<tool_call>\n"
    f'{{"name": "weather", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}\n</tool_call>'
)
TOOLS = [Tool("weather", "Says it.", JsonObject.of_text('{"type": "object", "properties": {"city": {}}}'))]
QUESTION = [ChatMessage("user", "How is the weather?")]
ASK: GenerateFields = {"messages": QUESTION, "tools": TOOLS}


@pytest.fixture(scope="module")
def tools_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Both workers are mocks that give one answer; what parses it is guessed from the template."""
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    worker = {
        "model_path": str(tiny.CHECKPOINT),
        "custom_jinja_template": str(template),
        "engine.kind": "mock",
        "engine.mock.speed_up": 100.0,
        "engine.mock.says": SAYS,
    }
    return start_stack(StackConfig(worker=worker, routers={"router": {"http.port": free_port()}}))


@pytest.fixture
async def client(tools_stack: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(tools_stack.router_address) as client:
        yield client


@pytest.mark.parametrize("path", RequestPath)
async def test_reasoning_content_and_calls_come_apart_on_every_path(client: QuartetClient, path: RequestPath) -> None:
    answers = [
        await client.complete(path=path, num_choices=2, stream_tool_arguments=streams, **ASK)
        for streams in (False, True)
    ]
    for choice in (*answers[0].choices, *answers[1].choices):
        assert choice.reasoning == "The weather? I look it up."
        assert choice.text == "A moment."
        [call] = choice.tool_calls
        assert (call.name, call.arguments.value("")) == ("weather", ARGUMENTS)
        assert choice.finished.reason is FinishReason.TOOL_CALLS
    assert len({choice.tool_calls[0].id for answer in answers for choice in answer.choices}) == 4

    [model] = await client.list_models()
    assert (model.reasoning_parser, model.tool_call_parser) == ("qwen3", "hermes")
    assert (model.chat_features, model.template_arguments) == (("reasoning", "tools"), ("thinks",))

    raw = await client.complete(path=path, raw_text=True, **ASK)
    assert (raw.text, raw.choices[0].tool_calls, raw.choices[0].reasoning) == (SAYS, (), "")
    assert raw.choices[0].finished.reason is FinishReason.STOP_ID
    # No calls are looked for where there are no tools; and reasoning that the prompt did not begin has no end here.
    plain = await client.complete(messages=QUESTION, template_arguments={"thinks": False}, path=path)
    assert plain.text == SAYS
    cut = await client.complete(path=path, sampling=Sampling(max_tokens=len(raw.choices[0].token_ids) - 20), **ASK)
    assert (cut.text, cut.choices[0].tool_calls) == ("A moment.", ())
    assert cut.choices[0].finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("path", RequestPath)
async def test_a_call_is_streamed_and_its_result_goes_back_with_the_next_request(
    client: QuartetClient, path: RequestPath
) -> None:
    async with client.generate(path=path, stream_tool_arguments=True, **ASK) as parts:
        received = [part async for part in parts]
    deltas = [delta for part in received if isinstance(part, Delta) for delta in part.tool_calls]
    assert (deltas[0].index, deltas[0].name) == (0, "weather") and deltas[0].id.startswith("call_")
    assert "".join(delta.arguments for delta in deltas) == json.dumps(ARGUMENTS, ensure_ascii=False)
    assert [delta.is_complete for delta in deltas][-1] and not any(delta.name for delta in deltas[1:])
    [finished] = [part for part in received if isinstance(part, ChoiceFinished)]

    call = ToolCall("weather", JsonObject.of_text("".join(delta.arguments for delta in deltas)), deltas[0].id)
    turn = ChatMessage("assistant", "A moment.", tool_calls=(call,), reasoning="I look it up.")
    result = ChatMessage("tool", "sunny", name="weather", tool_call_id=call.id)
    next_ask = await client.complete(messages=[*QUESTION, turn, result], tools=TOOLS, path=path)
    assert next_ask.choices[0].finished.usage.num_prompt_tokens > finished.usage.num_prompt_tokens + 20


@pytest.mark.parametrize(
    ("ask", "field", "kind"),
    [
        ({"tool_choice": ToolChoice.REQUIRED}, "chat.tool_choice", UnsupportedFieldError),
        ({"tools": [Tool("f", "", JsonObject.of_text("[]"))]}, "chat.tools[0].parameters", InvalidRequestError),
        ({"template_arguments": {"messages": []}}, "chat.template_arguments", InvalidRequestError),
        (
            {"messages": [ChatMessage("assistant", "", tool_calls=(ToolCall("f", JsonObject.of_text("?")),))]},
            "chat.messages[0].tool_calls[0].arguments",
            InvalidRequestError,
        ),
        ({"tools": [Tool("")]}, "chat.tools[0].name", InvalidRequestError),
    ],
)
async def test_what_is_impossible_is_refused_by_its_field(
    client: QuartetClient, ask: GenerateFields, field: str, kind: type[InvalidRequestError]
) -> None:
    with pytest.raises(kind) as caught:
        await client.complete(**(ASK | ask))
    assert caught.value.field == field


async def test_openais_client_gets_the_same_and_goes_on_with_the_results(tools_stack: Stack) -> None:
    url = f"http://127.0.0.1:{tools_stack.config.routers['router']['http.port']}/v1"
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        whole = await openai.chat.completions.create(model="tiny", messages=messages, tools=tools)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "A moment."
        assert choice.message.reasoning_content == "The weather? I look it up."  # type: ignore[attr-defined]
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == ARGUMENTS
        for extra in ({}, {"stream_tool_arguments": True}):
            stream = openai.chat.completions.stream(model="tiny", messages=messages, tools=tools, extra_body=extra)
            async with stream as events:
                num_parts = len(
                    [event async for event in events if event.type == "tool_calls.function.arguments.delta"]
                )
                final = await events.get_final_completion()
            assert final.choices[0].message.tool_calls is not None
            assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS
            assert final.choices[0].finish_reason == "tool_calls"
            # Where tokens come together on a busy machine, so do the arguments that they hold.
            assert num_parts == 1 or (extra and num_parts > 1)
        messages += [choice.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        after = await openai.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="none")
        assert after.usage is not None and whole.usage is not None
        assert after.usage.prompt_tokens > whole.usage.prompt_tokens
