"""A global router over pools that do everything: targets choose, a pool dies, and answers stay the same."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from quartet.api.fleet import Explanation
from quartet.client import Delta, QuartetClient, RequestPath, Sampling
from quartet.errors import RouterUnavailableError
from quartet.v1 import router_pb2 as pb
from router.config import AdmissionConfig
from router.explain import ExplainTurns
from router.fair_queue import FIXED_TOKENS
from router.global_router.grid import PoolState
from services.topology.launch import free_port
from tests.router.global_router.scene import Scene, Stub, running_pools
from tests.router.system import TIMEOUT_S, expected

PROMPT = [5, 6, 7, 8, 9]
SETTINGS: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["fast", "slow"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 2,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "agg_pool_mapping": [[0], [1]],
        "priority_overrides": [{"min_priority": 9, "max_priority": 9, "target_pool": 0}],
    },
}
_MORE_THAN_A_POOL_TAKES = 300
WORKERS = {"fast": ["decode-0"], "slow": ["decode-0"]}


def start(max_tokens: int = 8, **fields: Any) -> pb.GenerateStart:
    """A request of token ids."""
    message = pb.GenerateStart(token_ids=pb.TokenIds(ids=PROMPT), **fields)
    message.sampling.max_tokens = max_tokens
    message.sampling.temperature = 0
    return message


async def answer(stub: Stub, message: pb.GenerateStart) -> tuple[str, list[int]]:
    """Where a request ran, and its tokens."""
    call = stub.Generate(timeout=TIMEOUT_S)
    await call.write(pb.GenerateRequest(start=message))
    await call.done_writing()
    worker, tokens = "", list[int]()
    async for response in call:
        if response.HasField("accepted"):
            worker = response.accepted.choices[0].decode.worker_id
        tokens += response.delta.token_ids
    return worker, tokens


@pytest.fixture
async def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Scene, Stub]]:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS) as running:
        yield running


async def test_targets_and_priorities_choose_the_pool(pools: tuple[Scene, Stub]) -> None:
    _, stub = pools
    hasty, patient, urgent = start(), start(), start(priority=9)
    hasty.ttft_target.FromMilliseconds(100)
    patient.ttft_target.FromMilliseconds(900)
    urgent.ttft_target.FromMilliseconds(900)
    tokens = expected(PROMPT, 8)
    assert await answer(stub, hasty) == ("fast.decode-0", tokens)
    assert await answer(stub, patient) == ("slow.decode-0", tokens)
    assert await answer(stub, urgent) == ("fast.decode-0", tokens)
    # The middle of the grid, which is in its upper half.
    assert await answer(stub, start()) == ("slow.decode-0", tokens)


@pytest.mark.parametrize("path", list(RequestPath))
async def test_an_answer_is_whole_on_each_path(pools: tuple[Scene, Stub], path: RequestPath) -> None:
    scene, _ = pools
    async with QuartetClient(scene.address) as client:
        whole = await client.complete(
            token_ids=PROMPT, path=path, num_choices=3, sampling=Sampling(max_tokens=8), logprobs=1
        )
    assert [list(choice.token_ids) for choice in whole.choices] == [expected(PROMPT, 8, choice=n) for n in range(3)]
    assert [len(choice.logprobs) for choice in whole.choices] == [8, 8, 8]
    assert {placement.decode.worker_id for placement in whole.accepted.choices} == {"slow.decode-0"}
    assert [choice.finished.usage.num_prompt_tokens for choice in whole.choices] == [5, 5, 5]


async def test_an_answer_that_runs_is_no_prompt_that_waits(pools: tuple[Scene, Stub]) -> None:
    scene, stub = pools
    assert scene.pipeline is not None
    call = stub.Generate(timeout=TIMEOUT_S)
    await call.write(pb.GenerateRequest(start=start(100)))
    await call.done_writing()
    response = await call.read()
    assert response.HasField("accepted") and scene.pipeline.num_running == 1
    assert scene.pipeline.context.prompts.num_bytes == 0
    call.cancel()


async def test_ids_that_a_client_does_not_want_stay_here(pools: tuple[Scene, Stub]) -> None:
    scene, _ = pools
    async with QuartetClient(scene.address) as client:
        whole = await client.complete(token_ids=PROMPT, sampling=Sampling(max_tokens=8))
        text_only = await client.complete(token_ids=PROMPT, sampling=Sampling(max_tokens=8), omit_token_ids=True)
    assert (text_only.choices[0].token_ids, text_only.text) == ((), whole.text)
    assert text_only.choices[0].finished.usage.num_output_tokens == 8


async def test_explain_names_the_pool_and_why_and_then_its_workers(pools: tuple[Scene, Stub]) -> None:
    scene, _ = pools
    async with QuartetClient(scene.address) as client:
        explanation = await client.explain(token_ids=PROMPT, ttft_target_s=0.9, sampling=Sampling(max_tokens=8))
    found = [(option.rank.worker_id, option.is_chosen, option.reason) for option in explanation.options]
    assert found[:2] == [("slow", True, "the grid names it"), ("fast", False, "another pool comes first")]
    assert [worker for worker, is_chosen, _ in found[2:] if is_chosen] == ["slow.decode-0"]
    assert explanation.policy == "grid, then least_loaded"


async def test_explaining_is_charged_and_logged_here_and_in_the_pool(
    pools: tuple[Scene, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    scene, stub = pools
    caplog.set_level(logging.INFO, logger="router")
    assert scene.pipeline is not None
    share = scene.pipeline.context.admission.share
    await stub.Explain(pb.ExplainRequest(start=start(tenant="acme")))
    assert share.start("acme") == FIXED_TOKENS + len(PROMPT)
    lines = [record.quartet_fields for record in caplog.records if record.name == "router.explain"]
    assert [(line["path"], line["outcome"], line["tenant"], line["num_prompt_tokens"]) for line in lines] == [
        ("explain", "explained", "acme", len(PROMPT))
    ] * 2


async def test_calls_of_explain_take_turns(pools: tuple[Scene, Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    scene, stub = pools
    assert scene.pipeline is not None
    full = ExplainTurns(scene.pipeline.context.admission.share, max_waiting=0)
    monkeypatch.setattr(scene.pipeline, "_explain_turns", full)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Explain(pb.ExplainRequest(start=start()))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_explaining_goes_on_in_another_pool_when_one_has_gone(
    pools: tuple[Scene, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, stub = pools
    assert scene.pipeline is not None
    [link] = scene.pipeline.pools.of("slow").links

    async def lost(*_arguments: object, **_options: object) -> Explanation:
        raise RouterUnavailableError("it has gone, and the watch of its workers does not know yet")

    monkeypatch.setattr(link, "explain", lost)
    explained = await stub.Explain(pb.ExplainRequest(start=start()))
    chosen = [option.rank.worker_id for option in explained.options if option.is_chosen]
    assert chosen == ["fast", "fast.decode-0"]


async def test_http_carries_targets_and_leaves_ids_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    settings = {**SETTINGS, "router": {"http": {"port": port}}}
    async with (
        running_pools(tmp_path, monkeypatch, WORKERS, settings),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        body = {"prompt": PROMPT, "max_tokens": 8, "return_placement": True, "ttft_target": 100, "temperature": 0}
        async with http.post("/v1/completions", json=body) as response:
            found = await response.json()
        assert found["usage"]["completion_tokens"] == 8, found
        assert "fast.decode-0" in json.dumps(found) and "slow" not in json.dumps(found)
        patient = {**body, "ttft_target": 900, "return_token_ids": True}
        async with http.post("/v1/completions", json=patient) as response:
            other = await response.json()
        assert "slow.decode-0" in json.dumps(other)
        assert other["choices"][0]["token_ids"] == expected(PROMPT, 8)
        assert other["choices"][0]["text"] == found["choices"][0]["text"]
        async with http.get("/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        async with http.post("/tokenize", json={"prompt": "abc"}) as response:
            assert (await response.json())["count"] == 4


async def test_a_full_pool_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"]) as (scene, stub),
        QuartetClient(scene.address) as client,
    ):
        statuses = await client.list_workers()
        max_running = {one.record.worker_id: one.load.ranks[0].max_running for one in statuses if one.load}
        gate = scene.pools["slow"].gates["decode-0"]
        others = [asyncio.create_task(answer(stub, start(2))) for _ in range(max_running["slow.decode-0"])]
        assert scene.pipeline is not None
        async with asyncio.timeout(TIMEOUT_S):
            while scene.pipeline.pools.of("slow").num_relayed < len(others):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        assert (await answer(stub, start()))[0] == "fast.decode-0"
        explanation = await client.explain(token_ids=PROMPT, sampling=Sampling(max_tokens=8))
        reasons = {option.rank.worker_id: option.reason for option in explanation.options}
        assert (reasons["slow"], reasons["fast"]) == ("full", "the first that can take it")
        gate.release(10_000)
        assert {worker for worker, _ in await asyncio.gather(*others)} == {"slow.decode-0"}


async def test_without_a_pool_a_request_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS) as (scene, stub):
        for pool in scene.pools.values():
            assert pool.router is not None
            await pool.router.end()
        await scene.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answer(stub, start())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_refused_request_goes_to_a_faster_pool_only_where_that_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = {"slow": {"admission": AdmissionConfig(max_queue_length=1)}}
    for is_on in (False, True):
        directory = tmp_path / str(is_on)
        directory.mkdir()
        settings = {**SETTINGS, "enable_priority_retry": is_on}
        running = running_pools(directory, monkeypatch, WORKERS, settings, gated=["slow"], routers=narrow)
        async with running as (scene, stub):
            # As if the pool said nothing of its size: then it is never passed over for being full.
            monkeypatch.setattr(PoolState, "is_full", False)
            asked = [asyncio.create_task(answer(stub, start(2))) for _ in range(_MORE_THAN_A_POOL_TAKES)]
            done, _ = await asyncio.wait(asked, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            if is_on:
                assert first.result()[0] == "fast.decode-0"
            else:
                assert isinstance(first.exception(), grpc.aio.AioRpcError)
            scene.pools["slow"].gates["decode-0"].release(10_000)
            await asyncio.gather(*asked, return_exceptions=True)


async def test_cancelling_ends_the_request_at_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"]) as (scene, _):
        gate = scene.pools["slow"].gates["decode-0"]
        gate.release(3)
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            stream = client.generate(token_ids=PROMPT, path=RequestPath.SESSION, sampling=Sampling(max_tokens=50))
            async for part in stream:
                if isinstance(part, Delta):
                    await stream.cancel()
                    gate.release(100)
            await scene.pools["slow"].wait_idle()


async def test_a_request_goes_on_in_another_pool_when_its_own_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"]) as (scene, _):
        slow = scene.pools["slow"]
        slow.gates["decode-0"].release(4)
        tokens, texts = dict[int, list[int]](), Counter[int]()
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            stream = client.generate(token_ids=PROMPT, num_choices=2, sampling=Sampling(max_tokens=20), path="session")
            async for part in stream:
                if isinstance(part, Delta):
                    tokens.setdefault(part.choice, []).extend(part.token_ids)
                    texts[part.choice] += len(part.text)
                    assert part.token_offset + len(part.token_ids) == len(tokens[part.choice])
                    if slow.router is not None and not slow.router.task.done():
                        slow.router.task.cancel()
            assert tokens == {choice: expected(PROMPT, 20, choice=choice) for choice in range(2)}
            whole = await client.complete(token_ids=PROMPT, num_choices=2, sampling=Sampling(max_tokens=20))
        assert [texts[choice] for choice in range(2)] == [len(choice.text) for choice in whole.choices]
        await scene.wait_ready("fast.decode-0")
        # What comes now is not sent there any more.
        async with grpc.aio.insecure_channel(scene.address) as channel:
            assert (await answer(Stub(channel), start()))[0] == "fast.decode-0"
