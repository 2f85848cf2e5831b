"""OpenAI's responses and Anthropic's messages of a real fleet, by their vendors' own clients."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI

from quartet.client import ChatMessage, QuartetClient, Sampling
from quartet.discovery.base import Role
from services.topology.launch import free_port
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig
from tests.e2e.test_tools import ARGUMENTS, SAYS, TEMPLATE

# Tests import it themselves: it takes two seconds of CPU, of each process that collects this file.
if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

KEY = "acme-0123456789abcdef"
MODEL = "tiny"
QUESTION = "Tell me a short story about a rabbit named Olive."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PICTURE = Path(__file__).parents[2] / "models/tiny/pictures/shapes.jpg"
PICTURE_DATA = base64.b64encode(PICTURE.read_bytes()).decode()
CAPTION_BEGIN = "A small blue circle at the top"
RETURN_S = 40.0
GREEDY: Any = {"extra_body": {"temperature": 0}}
ENDLESS: Any = {"extra_body": {"ignore_eos": True}}
TOOL = {"name": "weather", "description": "Says it.", "parameters": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture(scope="module")
def http_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """An encode and a prefill worker, two decodes, and a router with HTTP and keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {KEY}\n")
    settings = {**REMOTE_PREFILL, "http.port": free_port(), "http.keys_file": str(keys)}
    return start_stack(StackConfig(num_encode=1, num_decode=2, routers={"router": settings}))


@pytest.fixture(scope="module")
def tools_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A mock worker that answers every request with reasoning, a text and a call."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    worker = {
        "model_path": str(tiny.CHECKPOINT),
        "custom_jinja_template": str(template),
        "engine.kind": "mock",
        "engine.mock.speed_up": 100.0,
        "engine.mock.says": SAYS,
    }
    return start_stack(StackConfig(num_prefill=0, worker=worker, routers={"router": {"http.port": free_port()}}))


def url_of(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.config.routers['router']['http.port']}"


@pytest.fixture
async def responses(http_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url_of(http_stack)}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def messages(http_stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url_of(http_stack), api_key=KEY, max_retries=0) as client:
        yield client


async def test_both_answer_as_grpc_does_whole_and_streamed(
    http_stack: Stack, responses: AsyncOpenAI, messages: AsyncAnthropic
) -> None:
    async with QuartetClient(http_stack.router_address) as client:
        asked = [ChatMessage("user", QUESTION)]
        known = await client.complete(messages=asked, sampling=Sampling(temperature=0.0, max_tokens=24))
    text, num_prompt = known.choices[0].text, known.accepted.num_prompt_tokens

    response = await responses.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
    assert (response.output_text, response.id[:5]) == (text, "resp_")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (num_prompt, 24)
    assert response.usage.input_tokens_details.cached_tokens == num_prompt // 32 * 32
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = await responses.responses.create(
        model=MODEL, input=MESSAGES, temperature=0, max_output_tokens=24, stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == text
    assert events[-1].response.usage == response.usage

    message = await messages.messages.create(model=MODEL, messages=MESSAGES, max_tokens=24, **GREEDY)
    assert [(block.type, getattr(block, "text", "")) for block in message.content] == [("text", text)]
    assert (message.id[:4], message.role, message.stop_reason) == ("msg_", "assistant", "max_tokens")
    cached = num_prompt // 32 * 32
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (num_prompt - cached, cached)
    assert message.usage.output_tokens == 24
    async with messages.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=24, **GREEDY) as streamed:
        assert "".join([piece async for piece in streamed.text_stream]) == text
        final = await streamed.get_final_message()
    assert (final.usage.input_tokens, final.usage.output_tokens) == (num_prompt - cached, 24)
    assert (final.usage.cache_read_input_tokens, final.stop_reason) == (cached, "max_tokens")


async def test_an_answer_that_ends_by_itself_or_by_a_stop_sequence_says_so(
    responses: AsyncOpenAI, messages: AsyncAnthropic
) -> None:
    asked: Any = [{"role": "user", "content": "What can you do?"}]
    ended = await messages.messages.create(model=MODEL, messages=asked, max_tokens=400, **GREEDY)
    [block] = ended.content
    assert block.type == "text"
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    word = block.text.split()[4]
    async with messages.messages.stream(
        model=MODEL, messages=asked, max_tokens=400, stop_sequences=["nowhere to be found", word], **GREEDY
    ) as stream:
        stopped = await stream.get_final_message()
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    [cut] = stopped.content
    assert cut.type == "text" and cut.text == block.text[: block.text.index(word)]

    async with responses.responses.stream(model=MODEL, input=asked, instructions="Be kind.", temperature=0) as events:
        response = await events.get_final_response()
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert len(response.output_text) > 20


async def test_a_picture_is_described_by_both(responses: AsyncOpenAI, messages: AsyncAnthropic) -> None:
    import anthropic

    content: Any = [
        {"type": "input_image", "image_url": f"data:image/jpeg;base64,{PICTURE_DATA}", "detail": "auto"},
        {"type": "input_text", "text": "Describe the picture."},
    ]
    asked: Any = [{"role": "user", "content": content}]
    response = await responses.responses.create(model=MODEL, input=asked, temperature=0, max_output_tokens=16)
    assert response.output_text.startswith(CAPTION_BEGIN)
    source = {"type": "base64", "media_type": "image/jpeg", "data": PICTURE_DATA}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "Describe the picture."}]
    question: Any = [{"role": "user", "content": blocks}]
    message = await messages.messages.create(model=MODEL, messages=question, max_tokens=16, **GREEDY)
    [block] = message.content
    assert block.type == "text" and block.text == response.output_text

    source["data"] = base64.b64encode(b"no picture").decode()
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"):
        await messages.messages.create(model=MODEL, messages=question, max_tokens=16)
    content[0]["image_url"] = "file:///etc/passwd"
    with pytest.raises(openai.PermissionDeniedError) as refusal:
        await responses.responses.create(model=MODEL, input=asked)
    assert refusal.value.param == "input[0].content[0].image_url"


async def test_counted_tokens_are_those_of_the_prompt(messages: AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "system": "Be kind.", "messages": MESSAGES}
    counted = await messages.messages.count_tokens(**asked)
    message = await messages.messages.create(max_tokens=1, **asked)
    assert message.usage.cache_read_input_tokens is not None
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


async def test_refusals_are_the_errors_that_each_client_knows(
    http_stack: Stack, responses: AsyncOpenAI, messages: AsyncAnthropic
) -> None:
    import anthropic

    with pytest.raises(openai.BadRequestError) as kept:
        await responses.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert (kept.value.param, kept.value.code) == ("previous_response_id", "unsupported_field")
    with pytest.raises(openai.NotFoundError) as missing:
        await responses.responses.create(model="huge", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await responses.with_options(api_key="wrong").responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.NotFoundError, match="keeps no answers"):
        await responses.responses.retrieve("resp_1")

    with pytest.raises(anthropic.BadRequestError) as wrong:
        await messages.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, container="c")
    assert wrong.value.type == "invalid_request_error" and "container" in str(wrong.value.api_message)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await messages.messages.create(model="huge", messages=MESSAGES, max_tokens=5)
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="keeps no batches"):
        await messages.messages.batches.retrieve("msgbatch_1")
    async with anthropic.AsyncAnthropic(base_url=url_of(http_stack), api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as nobody:
            await stranger.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert nobody.value.type == "authentication_error"


async def test_a_stream_that_its_client_leaves_returns_its_blocks(
    http_stack: Stack, responses: AsyncOpenAI, messages: AsyncAnthropic
) -> None:
    stream = await responses.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=1_500, stream=True, **ENDLESS
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await asyncio.to_thread(http_stack.wait_blocks_returned, timeout_s=RETURN_S)
    begun = await messages.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1_500, stream=True, **ENDLESS)
    async for part in begun:
        if part.type == "content_block_delta":
            break
    await begun.close()
    await asyncio.to_thread(http_stack.wait_blocks_returned, timeout_s=RETURN_S)


async def test_streams_survive_the_death_of_their_decode_worker(
    http_stack: Stack, responses: AsyncOpenAI, messages: AsyncAnthropic
) -> None:
    sampled: Any = {"extra_body": {"seed": 3, "ignore_eos": True}}

    async def pieces_of_response() -> AsyncIterator[str]:
        stream = await responses.responses.create(
            model=MODEL, input=QUESTION, max_output_tokens=200, stream=True, **sampled
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta

    async def pieces_of_message() -> AsyncIterator[str]:
        async with messages.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=200, **sampled) as stream:
            async for piece in stream.text_stream:
                yield piece

    undisturbed = "".join([piece async for piece in pieces_of_response()])
    for pieces in (pieces_of_response, pieces_of_message):
        text, killed = "", ""
        async for piece in pieces():
            text += piece
            if not killed and len(text) > 20:
                killed = await decoding(http_stack)
                await asyncio.to_thread(http_stack.kill, killed)
        assert killed and text == undisturbed
        if pieces is pieces_of_response:
            await asyncio.to_thread(http_stack.spawn, killed)


async def decoding(stack: Stack) -> str:
    """The decode worker at which the only request is."""
    async with QuartetClient(stack.router_address) as client:
        workers = await client.list_workers()
    [name] = [one.record.worker_id for one in workers if one.record.role is Role.DECODE and one.num_requests]
    return name


async def test_openais_client_runs_a_tool_and_goes_on_with_its_result(tools_stack: Stack) -> None:
    tools: Any = [{"type": "function", "strict": None, **TOOL}]
    async with AsyncOpenAI(base_url=f"{url_of(tools_stack)}/v1", api_key="none", max_retries=0) as client:
        items: Any = [{"role": "user", "content": "How is the weather?"}]
        whole = await client.responses.create(model=MODEL, input=items, tools=tools)
        reasoning, text, call = whole.output
        assert reasoning.type == "reasoning" and reasoning.content is not None
        assert reasoning.content[0].text == "The weather? I look it up."
        assert text.type == "message" and whole.output_text == "A moment."
        assert call.type == "function_call" and call.name == "weather"
        assert json.loads(call.arguments) == ARGUMENTS and call.call_id.startswith("call_")
        assert whole.status == "completed"
        for extra in ({}, {"stream_tool_arguments": True}):
            async with client.responses.stream(model=MODEL, input=items, tools=tools, extra_body=extra) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            streamed = final.output[2]
            assert streamed.type == "function_call" and json.loads(streamed.arguments) == ARGUMENTS
            thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(thought) == reasoning.content[0].text
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        after = await client.responses.create(model=MODEL, input=items, tools=tools, tool_choice="auto")
        assert after.usage is not None and whole.usage is not None
        assert after.usage.input_tokens > whole.usage.input_tokens


async def test_anthropics_client_runs_a_tool_and_goes_on_with_its_result(tools_stack: Stack) -> None:
    from anthropic import AsyncAnthropic

    tools: Any = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    async with AsyncAnthropic(base_url=url_of(tools_stack), api_key="none", max_retries=0) as client:
        asked: Any = [{"role": "user", "content": "How is the weather?"}]
        settings: Any = {"model": MODEL, "max_tokens": 400, "tools": tools}
        whole = await client.messages.create(messages=asked, thinking={"type": "adaptive"}, **settings)
        thinking, text, call = whole.content
        assert thinking.type == "thinking" and thinking.thinking == "The weather? I look it up."
        assert text.type == "text" and text.text == "A moment."
        assert call.type == "tool_use" and (call.name, call.input) == ("weather", ARGUMENTS)
        assert whole.stop_reason == "tool_use"
        for extra in ({}, {"stream_tool_arguments": True}):
            async with client.messages.stream(messages=asked, extra_body=extra, **settings) as stream:
                final = await stream.get_final_message()
            assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
            assert final.content[0].to_dict() == thinking.to_dict()
            streamed = final.content[2]
            assert streamed.type == "tool_use" and streamed.input == ARGUMENTS
            assert final.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        asked += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        counted = await client.messages.count_tokens(model=MODEL, messages=asked, tools=tools)
        after = await client.messages.create(messages=asked, tool_choice={"type": "auto"}, **settings)
        assert after.usage.cache_read_input_tokens is not None
        assert counted.input_tokens == after.usage.input_tokens + after.usage.cache_read_input_tokens
        assert counted.input_tokens > whole.usage.input_tokens
