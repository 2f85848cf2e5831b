"""Routers of pools that stand still: their connections stay, and nothing comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.client import ChoiceFinished, Delta, FinishReason, QuartetClient, Sampling
from quartet.v1 import router_pb2 as pb
from router.generate import GenerateRun
from router.global_router.relay import RelayRun
from router.servicer import RouterServicer
from tests.router.global_router.scene import running_pools
from tests.router.global_router.stillness import Stillness
from tests.router.global_router.test_aggregated import PROMPT, SETTINGS, WORKERS, answer, start
from tests.router.system import TIMEOUT_S, expected

# A pool's router is asked after a second of silence, and has a second to answer.
HASTY: dict[str, Any] = {**SETTINGS, "router": {"heartbeat_timeout_s": 2.0}}


async def test_a_pool_that_says_nothing_of_its_workers_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stillness = Stillness(monkeypatch, "slow", lasts=True)
    async with running_pools(tmp_path, monkeypatch, WORKERS, HASTY, answering=["fast"]) as (scene, stub):
        async with scene.channel() as channel, asyncio.timeout(TIMEOUT_S):
            async for health in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        assert await answer(stub, start()) == ("fast.decode-0", expected(PROMPT, 8))
        stillness.end()
        await scene.wait_ready("fast.decode-0", "slow.decode-0")
        assert (await answer(stub, start()))[0] == "slow.decode-0"


async def test_what_runs_in_a_pool_that_falls_silent_goes_on_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stillness = Stillness(monkeypatch, "slow", lasts=False)
    async with running_pools(tmp_path, monkeypatch, WORKERS, HASTY, gated=["slow"]) as (scene, stub):
        scene.pools["slow"].gates["decode-0"].release(4)
        tokens = list[int]()
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            async for part in client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=20), path="session"):
                if isinstance(part, Delta):
                    tokens += part.token_ids
                    stillness.begin()
        assert tokens == expected(PROMPT, 20)
        await scene.wait_ready("fast.decode-0")
        assert (await answer(stub, start()))[0] == "fast.decode-0"
        stillness.end()
        await scene.wait_ready("fast.decode-0", "slow.decode-0")


async def test_a_pool_without_changes_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()
    list_workers = RouterServicer.ListWorkers

    async def note(servicer: RouterServicer, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersResponse:
        response = await list_workers(servicer, request, context)
        asked.set()
        return response

    monkeypatch.setattr(RouterServicer, "ListWorkers", note)
    async with running_pools(tmp_path, monkeypatch, WORKERS, HASTY) as (scene, stub):
        assert scene.pipeline is not None
        [link] = scene.pipeline.pools.of("slow").links
        async with asyncio.timeout(TIMEOUT_S):
            await asked.wait()
        assert scene.pipeline.pools.of("slow").hears(link)
        assert (await answer(stub, start()))[0] == "slow.decode-0"


async def test_a_cancelled_request_ends_though_its_pool_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"]) as (scene, _):
        assert scene.pipeline is not None
        monkeypatch.setattr(GenerateRun, "cancel", lambda _run: None)  # of pools' routers: the global one has its own
        assert "cancel" in vars(RelayRun)
        scene.pools["slow"].gates["decode-0"].release(3)
        ends = list[ChoiceFinished]()
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            stream = client.generate(token_ids=PROMPT, num_choices=2, sampling=Sampling(max_tokens=50), path="session")
            tokens = {0: list[int](), 1: list[int]()}
            async for part in stream:
                if isinstance(part, Delta):
                    tokens[part.choice] += part.token_ids
                    await stream.cancel()
                if isinstance(part, ChoiceFinished):
                    ends.append(part)
        assert {end.choice: end.reason for end in ends} == dict.fromkeys(range(2), FinishReason.CANCELLED)
        assert {end.choice: end.usage.num_output_tokens for end in ends} == {
            choice: len(found) for choice, found in tokens.items()
        }
        assert all(end.usage.num_prompt_tokens == len(PROMPT) for end in ends)
        # Its pool has it still: nothing that this says now reaches the client.
        assert scene.pipeline.num_running == scene.pipeline.pools.of("slow").num_relayed == 0
        [link] = scene.pipeline.pools.of("slow").links
        assert scene.pipeline.pools.of("slow").hears(link) and not link.is_idle
