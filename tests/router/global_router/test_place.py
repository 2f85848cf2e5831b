"""Calls of Place through a global router: its client streams from a pool's workers, whichever pool that is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.api.request import GenerateStart, TokenPrompt
from quartet.client import Delta, QuartetClient, RequestPath, Sampling
from quartet.errors import DrainingError, PromptTooLongError
from router.global_router.pipeline import RelayPipeline
from router.policy.create import PolicyConfig, PolicyName
from router.usage_log import UsageLog
from tests.router.global_router.scene import Scene, running_pools
from tests.router.global_router.stillness import Stillness
from tests.router.global_router.test_aggregated import PROMPT, SETTINGS
from tests.router.system import MAX_MODEL_LEN, TIMEOUT_S, expected

# In the slow pool a call of Place waits for a worker that prefills.
WORKERS = {"fast": ["decode-0"], "slow": ["prefill-0", "decode-0"]}
POLICY = {"slow": {"policy": PolicyConfig(name=PolicyName.LEAST_LOADED, local_prefill_max_tokens=0)}}
START = GenerateStart(prompt=TokenPrompt(tuple(PROMPT)), sampling=Sampling(max_tokens=8))


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"], routers=POLICY) as (scene, _):
        yield scene


def pipeline_of(scene: Scene) -> RelayPipeline:
    assert scene.pipeline is not None
    return scene.pipeline


async def waiting_in_the_slow_pool(scene: Scene) -> None:
    """Return when a prompt is at its prefill worker, which has no permit to compute it."""
    began = scene.pools["slow"].runners["prefill-0"].step_began
    assert await asyncio.to_thread(began.wait, TIMEOUT_S)


async def test_a_drain_ends_calls_of_place(scene: Scene) -> None:
    pipeline = pipeline_of(scene)
    placing = asyncio.create_task(pipeline.place(START))
    await waiting_in_the_slow_pool(scene)
    assert pipeline.num_running == 1
    pipeline.abort_all(DrainingError("the router is going away", retry_delay_s=1.0))
    with pytest.raises(DrainingError):
        await placing
    assert pipeline.num_running == pipeline.pools.of("slow").num_relayed == 0


async def test_a_call_goes_to_another_pool_when_its_own_dies(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")
    async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
        asked = client.complete(token_ids=PROMPT, sampling=Sampling(max_tokens=8), path=RequestPath.DIRECT)
        running = asyncio.create_task(asked)
        await waiting_in_the_slow_pool(scene)
        router = scene.pools["slow"].router
        assert router is not None
        router.task.cancel()
        whole = await running
    assert list(whole.choices[0].token_ids) == expected(PROMPT, 8)
    assert whole.accepted.choices[0].decode.worker_id == "fast.decode-0"
    lines = [record.quartet_fields for record in caplog.records if record.name == "router.request_log"]
    assert [line["decode_worker"] for line in lines if line["outcome"] == "placed"] == ["decode-0", "fast.decode-0"]


async def test_a_call_goes_to_another_pool_when_its_router_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stillness = Stillness(monkeypatch, "slow", lasts=False)
    hasty = {**SETTINGS, "router": {"heartbeat_timeout_s": 2.0}}
    async with running_pools(tmp_path, monkeypatch, WORKERS, hasty, gated=["slow"], routers=POLICY) as (scene, _):
        placing = asyncio.create_task(pipeline_of(scene).place(START))
        await waiting_in_the_slow_pool(scene)
        stillness.begin()
        async with asyncio.timeout(TIMEOUT_S):
            [choice] = (await placing).choices
        assert choice.placement is not None and choice.placement.decode.worker_id == "fast.decode-0"


async def test_a_placed_request_is_recorded_with_its_prompt_and_first_token(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.jsonl"
    usage = UsageLog(path)
    pipeline = pipeline_of(scene)
    monkeypatch.setattr(pipeline, "_context", replace(pipeline.context, usage=usage))
    scene.pools["slow"].gates["prefill-0"].release()
    async with asyncio.timeout(TIMEOUT_S):
        await pipeline.place(START)
    usage.close()
    record = json.loads(path.read_text())
    assert (record["path"], record["outcome"]) == ("place", "placed")
    assert (record["num_prompt_tokens"], record["num_output_tokens"]) == (len(PROMPT), 1)


async def test_a_call_that_is_cancelled_leaves_nothing(scene: Scene) -> None:
    pipeline = pipeline_of(scene)
    [link] = pipeline.pools.of("slow").links
    placing = asyncio.create_task(pipeline.place(START))
    await waiting_in_the_slow_pool(scene)
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert link.is_idle and pipeline.num_running == pipeline.pools.of("fast").num_relayed == 0
    for gate in scene.pools["slow"].gates.values():
        gate.release(10)
    await scene.pools["slow"].wait_idle()


async def test_what_no_pool_could_take_is_refused_at_once(scene: Scene) -> None:
    long = GenerateStart(prompt=TokenPrompt((5,) * MAX_MODEL_LEN), sampling=Sampling(max_tokens=8))
    with pytest.raises(PromptTooLongError):
        await pipeline_of(scene).place(long)
    assert pipeline_of(scene).num_running == 0


async def test_a_placed_request_goes_on_in_another_pool_when_its_worker_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {"fast": ["decode-0"], "slow": ["decode-0"]}
    async with running_pools(tmp_path, monkeypatch, workers, SETTINGS, gated=["slow"]) as (scene, _):
        slow, tokens = scene.pools["slow"], list[int]()
        slow.gates["decode-0"].release(4)
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            stream = client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=20), path=RequestPath.DIRECT)
            async for part in stream:
                if isinstance(part, Delta):
                    tokens += part.token_ids
                    assert slow.router is not None
                    for one in (slow.router.task, slow.workers["decode-0"].task):
                        one.cancel()
        assert tokens == expected(PROMPT, 20)
