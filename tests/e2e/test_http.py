"""OpenAI's API of a real fleet, by OpenAI's own client and by hand: the same answers as by gRPC."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from quartet.client import ChatMessage, QuartetClient, Sampling
from services.topology.launch import free_port
from tests.e2e import documentation
from tests.e2e.conftest import StartStack
from tests.e2e.picture_site import PictureSite, picture_site
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig

KEY = "acme-0123456789abcdef"
MODEL = "tiny"
QUESTION: Any = [{"role": "user", "content": "Tell me a short story about a rabbit named Olive."}]
PICTURE = Path(__file__).parents[2] / "models/tiny/pictures/shapes.jpg"
CAPTION_BEGIN = "A small blue circle at the top"
RETURN_S = 40.0
ENDLESS: Any = {"temperature": 1.0, "max_tokens": 1_500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def site() -> Iterator[PictureSite]:
    """It has the picture."""
    with picture_site(PICTURE.read_bytes()) as started:
        yield started


@pytest.fixture(scope="module")
def http_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory, site: PictureSite) -> Stack:
    """An encode and a prefill worker, two decodes, and a router with HTTP and keys that fetches from the site."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {KEY}\n")
    settings = {
        **REMOTE_PREFILL,
        "http.port": free_port(),
        "http.keys_file": str(keys),
        "http.operators": ["acme"],
        "media.allowed_schemes": ["http"],
        "media.allowed_hosts": [site.host],
        "media.allowed_private_networks": ["127.0.0.1/32"],
    }
    return start_stack(StackConfig(num_encode=1, num_decode=2, routers={"router": settings}))


def url_of(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.config.routers['router']['http.port']}"


@pytest.fixture
async def openai(http_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url_of(http_stack)}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_a_chat_is_answered_as_by_grpc_whole_and_streamed(http_stack: Stack, openai: AsyncOpenAI) -> None:
    async with QuartetClient(http_stack.router_address) as client:
        messages = [ChatMessage("user", QUESTION[0]["content"])]
        known = await client.complete(messages=messages, sampling=Sampling(temperature=0.0, max_tokens=24))
    [choice] = known.choices
    whole = await openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content == choice.text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == known.accepted.num_prompt_tokens
    assert whole.usage.completion_tokens == choice.finished.usage.num_output_tokens
    stream = await openai.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens // 32 * 32


async def test_completions_take_texts_lists_and_token_ids(openai: AsyncOpenAI) -> None:
    two = await openai.completions.create(
        model=MODEL, prompt=["Once upon a time", "The sun"], max_tokens=8, temperature=0, n=2, logprobs=2
    )
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.choices[0].text == two.choices[1].text != two.choices[2].text
    logprobs = two.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens).strip() == two.choices[0].text.strip() and len(logprobs.top_logprobs[0]) == 2
    async with aiohttp.ClientSession(str(openai.base_url.copy_with(path="/"))) as session:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with session.post("/tokenize", json={"prompt": "Once upon a time"}, headers=headers) as response:
            ids = (await response.json())["tokens"]
    by_ids = await openai.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0)
    assert by_ids.choices[0].text == two.choices[0].text


async def test_a_picture_comes_as_a_data_url_or_is_fetched(openai: AsyncOpenAI, site: PictureSite) -> None:
    picture: dict[str, str] = {"detail": "original"}
    parts = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": "Describe the picture."}]
    messages: Any = [{"role": "user", "content": parts}]
    data = f"data:image/jpeg;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    for url in (data, f"http://{site.host}/picture"):
        picture["url"] = url
        answer = await openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
        assert (answer.choices[0].message.content or "").startswith(CAPTION_BEGIN), url[:40]
    picture["url"] = "file:///etc/passwd"
    with pytest.raises(APIStatusError) as refusal:
        await openai.chat.completions.create(model=MODEL, messages=messages)
    assert refusal.value.status_code == 403


async def test_refusals_are_the_errors_that_openais_client_knows(http_stack: Stack, openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        await openai.chat.completions.create(model="huge", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as wrong:
        await openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(NotFoundError, match="embeddings"):
        await openai.embeddings.create(model=MODEL, input="hi")
    with pytest.raises(AuthenticationError):
        await openai.with_options(api_key="wrong").models.list()
    assert [model.id async for model in openai.models.list()] == [MODEL]


async def test_a_stream_that_its_client_leaves_returns_its_blocks(http_stack: Stack, openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, **ENDLESS)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.to_thread(http_stack.wait_blocks_returned, timeout_s=RETURN_S)


async def test_health_needs_no_key_and_lists_endpoints_to_operators(http_stack: Stack) -> None:
    listed = []
    async with aiohttp.ClientSession(url_of(http_stack)) as session:
        for headers in ({}, {"Authorization": f"Bearer {KEY}"}):
            async with session.get("/health", headers=headers) as response:
                shown = await response.json()
                assert response.status == 200 and shown["status"] == "healthy"
            assert shown["roles"] == {"encode": 1, "prefill": 1, "decode": 2}
            listed.append({endpoint.split("/")[-1] for endpoint in shown["endpoints"]})
    assert listed == [set(), set(http_stack.config.worker_names)]


async def test_prometheus_is_told_of_all_processes_and_each_shows_vllms_names(
    http_stack: Stack, openai: AsyncOpenAI
) -> None:
    await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(url_of(http_stack), headers=headers) as session:
        async with session.get("/prometheus/targets") as response:
            groups = await response.json()
        async with session.get("/metrics") as response:
            router = await response.text()
    labels = [group["labels"] for group in groups]
    assert {label["__meta_quartet_namespace"] for label in labels} == {"e2e"}
    addresses = {
        label["__meta_quartet_worker_id"]: group["targets"][0] for label, group in zip(labels, groups, strict=True)
    }
    names = set(http_stack.config.worker_names)
    assert names < set(addresses) and len(addresses) == len(names) + 1
    assert {name: http_stack.processes[name].http_address for name in names} == {
        name: address for name, address in addresses.items() if name in names
    }
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in router
    assert 'vllm:cache_config_info{block_size="' in router
    page = http_stack.metrics("router")
    sums = {
        name: page.value(f"vllm:{name}_sum", model_name="tiny", engine="0")
        for name in (
            *("request_decode_time_seconds", "request_inference_time_seconds", "e2e_request_latency_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
        )
    }
    decode_s, inference_s, whole_s, num_prompt_tokens, num_output_tokens = sums.values()
    assert 0 < decode_s < inference_s < whole_s, "a prompt is computed, and something comes before it"
    assert num_prompt_tokens > 0 and num_output_tokens >= 4
    prefill = http_stack.metrics("prefill-0")
    ours, theirs = "quartet_worker_prefill_seconds_count", "vllm:request_prefill_time_seconds_count"
    assert prefill.value(theirs, model_name="tiny", engine="0") == prefill.value(ours) > 0


async def test_a_stream_survives_the_death_of_its_decode_worker(http_stack: Stack, openai: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "seed": 3, "stream": True}
    limits: Any = {"temperature": 1.0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}

    async def read(kills: bool) -> str:
        text = ""
        async for chunk in await openai.chat.completions.create(**asked, **limits):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if kills and len(text) > 20:
                kills = False
                busy = [name for name in ("decode-0", "decode-1") if http_stack.processes[name].is_running]
                await asyncio.to_thread(http_stack.kill, await _decoding(http_stack, busy))
        return text

    undisturbed = await read(kills=False)
    assert await read(kills=True) == undisturbed


async def _decoding(stack: Stack, names: list[str]) -> str:
    """The decode worker at which the only request is."""
    async with QuartetClient(stack.router_address) as client:
        for worker in await client.list_workers():
            if worker.record.worker_id in names and worker.num_requests:
                return worker.record.worker_id
    raise AssertionError(json.dumps(names))


async def test_every_line_of_the_documentation_gives_what_it_shows(http_stack: Stack) -> None:
    lines = list(documentation.lines())
    assert len(lines) >= 24
    for line in lines:
        command = line.command.replace("localhost:8000", url_of(http_stack)).replace(
            "curl ", f"curl -sS -w '\\n%{{http_code}}\\n' -H 'Authorization: Bearer {KEY}' "
        )
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=documentation.ROOT
        )
        out, err = await process.communicate()
        shown = out.decode()
        assert line.shown and not [text for text in line.wanted if text not in shown], (line, shown[-2_000:], err)
        is_refused = '"param"' in line.shown or '"message": "' in line.shown
        expected = "404" if "/v1/embeddings" in line.command else "400" if is_refused else "200"
        assert set(re.findall(r"^\d{3}$", shown, re.MULTILINE)) == {expected}, (line, shown[-2_000:])
        assert shown.count(f"\n{expected}\n") == len(line.wanted), (line, shown[-2_000:])


def test_every_field_of_the_documentation_is_in_a_line_that_is_run() -> None:
    run = "\n".join([line.command for line in documentation.lines()])
    names = documentation.fields()
    assert len(names) > 100
    assert not [name for name in sorted(names) if re.search(rf"(?<!\w){name}(?!\w)", run) is None]


async def test_the_python_examples_of_the_documentation_run(http_stack: Stack) -> None:
    examples = dict(documentation.python_examples())
    assert set(examples) == {"README.md", *[page.name for page in documentation.PAGES]}
    for page, example in examples.items():
        printed = list[str]()
        code = example.replace("http://localhost:8000", url_of(http_stack)).replace('"none"', f'"{KEY}"')
        known = {"print": lambda text, printed=printed, **_how: printed.append(text)}
        await asyncio.to_thread(exec, compile(code, page, "exec"), known)
        assert "".join(printed).strip() not in ("", "None"), (page, printed)
