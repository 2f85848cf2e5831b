"""Structured output over real processes: every surface, and answers that outlive the worker that gives them."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError

from quartet.client import (
    FinishReason,
    GrammarKind,
    GuidedDecoding,
    QuartetClient,
    RequestPath,
    Sampling,
)
from quartet.errors import UnsupportedFieldError
from services.topology.launch import free_port
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Ask, Crowd
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig
from tests.schemas import SCHEMAS, guided

#: Shows tools and calls, and no reasoning; its markers are Qwen's.
TEMPLATE = """\
{%- for tool in tools or () %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or () %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' }}"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOT_FOLLOWED: Any = {"type": "array", "uniqueItems": True}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
WAIT_S = 90.0


def function(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


@pytest.fixture(scope="module")
def guided_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    worker = {"custom_jinja_template": str(template), "transfer.hand_off_ttl_s": 3.0}
    router = {**REMOTE_PREFILL, "http.port": free_port(), "attempts.max_attempts": 20}
    return start_stack(StackConfig(worker=worker, routers={"router": router}))


@pytest.fixture(scope="module")
def undisturbed(guided_stack: Stack) -> list[tuple[object, ...]]:
    """What is shown of each of ``asks``, all of which follow their schemas."""

    async def run() -> Crowd:
        async with QuartetClient(guided_stack.router_address) as client, Crowd(client, asks()) as crowd:
            await crowd.finish()
        return crowd

    crowd = asyncio.run(run())
    for answer, schema in zip(crowd.answers, SCHEMAS.values(), strict=True):
        [choice] = answer.choices
        assert choice.finished is not None and choice.finished.reason is FinishReason.STOP_ID
        jsonschema.validate(json.loads(choice.text), schema)
    return crowd.shown


@pytest.fixture
async def client(guided_stack: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(guided_stack.router_address) as client:
        yield client


@pytest.fixture
async def openai(guided_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{guided_stack.config.routers['router']['http.port']}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        yield openai


def asks() -> list[Ask]:
    return [
        Ask(
            token_ids=tuple(range(600 + 20 * number, 680 + 20 * number)),
            sampling=Sampling(temperature=1.0, max_tokens=400, guided=guided(schema)),
            seed=number,
        )
        for number, schema in enumerate(SCHEMAS.values())
    ]


@pytest.mark.parametrize("path", [RequestPath.GENERATE, RequestPath.DIRECT])
async def test_guided_answers_outlive_the_decode_that_is_killed(
    path: RequestPath, guided_stack: Stack, client: QuartetClient, undisturbed: list[tuple[object, ...]]
) -> None:
    decode, is_direct = guided_stack.processes["decode-0"], path is RequestPath.DIRECT
    if not is_direct:  # a placement that no worker takes up is placed again
        decode.signal(signal.SIGSTOP)
    async with Crowd(client, asks(), path=path) as crowd:
        # They decode side by side, so when the last one has begun none is near its end: each has more than 20 tokens.
        await crowd.wait_for(lambda: all(answer.token_ids for answer in crowd.answers))
        decode.signal(signal.SIGCONT)
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 1 for answer in crowd.answers))
        await asyncio.to_thread(guided_stack.kill, "decode-0")
        await asyncio.to_thread(guided_stack.spawn, "decode-0")
        await crowd.finish()
    assert crowd.shown == undisturbed
    assert sum(num > 1 for num in crowd.num_attempts) >= len(SCHEMAS) // (2 if is_direct else 1), (
        "they had ended before"
    )
    await asyncio.to_thread(guided_stack.wait_blocks_returned, timeout_s=WAIT_S)


async def test_openais_client_gets_answers_of_its_schema(openai: AsyncOpenAI) -> None:
    async def ask(name: str, schema: object) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        answer = await openai.chat.completions.create(
            model="tiny", messages=QUESTION, response_format=form, max_tokens=400, seed=3
        )
        [choice] = answer.choices
        assert choice.finish_reason == "stop" and choice.message.content is not None, name
        jsonschema.validate(json.loads(choice.message.content), schema)

    await asyncio.gather(*(ask(name, schema) for name, schema in SCHEMAS.items()))


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"choice": ["red", "green"]}, "^(red|green)$"),
        ({"regex": "[a-f0-9]{8}"}, "^[a-f0-9]{8}$"),
        ({"grammar": 'root ::= "a" "b"+ "c"'}, "^ab+c$"),
        ({"json": {"enum": ["x", "y"]}}, '^"(x|y)"$'),
    ],
)
async def test_vllms_fields_are_followed(structured: Any, pattern: str, openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(
        model="tiny", prompt="Once", max_tokens=60, seed=1, extra_body={"structured_outputs": structured}
    )
    jsonschema.validate(answer.choices[0].text, {"type": "string", "pattern": pattern})


async def test_what_can_not_be_followed_is_a_400_that_names_the_keyword(
    openai: AsyncOpenAI, client: QuartetClient
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for streams in (False, True):
        with pytest.raises(BadRequestError, match="uniqueItems") as caught:
            await openai.chat.completions.create(model="tiny", messages=QUESTION, response_format=form, stream=streams)
        assert caught.value.param == "response_format"
    with pytest.raises(UnsupportedFieldError, match="uniqueItems") as refused:
        await client.complete("hi", sampling=Sampling(guided=guided(schema)))
    assert refused.value.field == "sampling.guided"
    strict: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for choice in ("auto", "required"):
        with pytest.raises(BadRequestError, match="uniqueItems") as caught:
            await openai.chat.completions.create(
                model="tiny",
                messages=QUESTION,
                tools=[strict],
                tool_choice=choice,  # type: ignore[arg-type]
            )
        assert caught.value.param == "tools"


async def test_a_call_that_is_required_comes_and_follows_its_schema(openai: AsyncOpenAI) -> None:
    tools = [function("weather"), function("forecast")]
    named = {"type": "function", "function": {"name": "forecast"}}

    async def call(choice: Any, seed: int) -> None:
        answer = await openai.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=seed,
        )
        [one] = answer.choices
        assert one.finish_reason == "tool_calls" and one.message.tool_calls is not None
        [call] = one.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "forecast" or choice == "required"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)

    await asyncio.gather(*(call(choice, seed) for choice in ("required", named) for seed in range(4)))


async def test_responses_follow_schemas_and_must_call_as_chats_do(openai: AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "where", "schema": PARAMETERS, "strict": True}
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    asked: Any = {"model": "tiny", "max_output_tokens": 200, "extra_body": {"seed": 3}}

    async def answer() -> None:
        response = await openai.responses.create(input="Where?", text={"format": form}, **asked)
        jsonschema.validate(json.loads(response.output_text), PARAMETERS)

    async def call(choice: Any) -> None:
        called = await openai.responses.create(
            input="How is it?", tools=[tool], tool_choice=choice, parallel_tool_calls=False, **asked
        )
        [item] = called.output
        assert item.type == "function_call" and item.name == "weather"
        jsonschema.validate(json.loads(item.arguments), PARAMETERS)

    await asyncio.gather(answer(), call("required"), call({"type": "function", "name": "weather"}))
    bad: Any = {**form, "schema": NOT_FOLLOWED}
    with pytest.raises(BadRequestError, match="uniqueItems") as refused:
        await openai.responses.create(model="tiny", input="Where?", text={"format": bad}, stream=True)
    assert refused.value.param == "text.format"


async def test_messages_follow_schemas_and_must_call_as_chats_do(openai: AsyncOpenAI) -> None:
    import anthropic  # here: it takes two seconds of CPU, of each process that collects this file

    url = str(openai.base_url).removesuffix("/v1/")
    asked: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 200, "extra_body": {"seed": 3}}
    schema: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]

    async def answer() -> None:
        message = await client.messages.create(output_config=schema, **asked)
        [block] = message.content
        assert block.type == "text" and message.stop_reason == "end_turn"
        jsonschema.validate(json.loads(block.text), PARAMETERS)

    async def call(chosen: Any) -> None:
        must: Any = {**chosen, "disable_parallel_tool_use": True}
        message = await client.messages.create(tools=tools, tool_choice=must, **asked)
        [use] = message.content
        assert use.type == "tool_use" and message.stop_reason == "tool_use"
        jsonschema.validate(use.input, PARAMETERS)

    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        await asyncio.gather(answer(), call({"type": "any"}), call({"type": "tool", "name": "weather"}))
        bad: Any = {"format": {"type": "json_schema", "schema": NOT_FOLLOWED}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: .*uniqueItems"):
            await client.messages.create(output_config=bad, **asked)


async def test_a_pattern_that_explodes_fails_by_name_and_leaves_nothing(
    guided_stack: Stack, client: QuartetClient
) -> None:
    bomb = guided({"type": "string", "pattern": "^(([a-z]{1,40}){1,40}){1,40}(x.*y.*z){20}$"})
    other = asyncio.create_task(client.complete("hi", sampling=Sampling(max_tokens=60, ignore_eos=True)))
    with pytest.raises(Exception, match="can't be followed any further"):
        # Not every sampled answer meets the explosion.
        await client.complete("hi", sampling=Sampling(guided=bomb, max_tokens=100, temperature=0.0))
    assert len((await other).choices[0].token_ids) == 60
    await asyncio.to_thread(guided_stack.wait_blocks_returned, timeout_s=WAIT_S)


async def test_lark_and_choices_by_grpc(client: QuartetClient) -> None:
    lark = GuidedDecoding(GrammarKind.LARK, 'start: "x" /[0-9]{2}/')
    assert (await client.complete("hi", sampling=Sampling(guided=lark, max_tokens=20))).text[0] == "x"
