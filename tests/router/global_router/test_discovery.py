"""Routers of pools that the global router finds where they announce themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quartet.client import Delta, QuartetClient, Sampling
from quartet.discovery.base import CONTRACT_VERSION, Role
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.file import FileConfig
from quartet.v1 import router_pb2 as pb
from router.global_router.pools import Pool
from tests.discovery.records import make_router
from tests.router.global_router import test_disaggregated
from tests.router.global_router.scene import Scene, Stub, running_pools
from tests.router.global_router.test_aggregated import PROMPT, SETTINGS, WORKERS, answer, start
from tests.router.global_router.test_disaggregated import run
from tests.router.system import TIMEOUT_S, Running, expected


@pytest.fixture
async def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Scene, Stub]]:
    running = running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["slow"], with_discovery=True)
    async with running as scene:
        yield scene


def pool_of(scene: Scene, namespace: str) -> Pool:
    assert scene.pipeline is not None
    return scene.pipeline.pools.of(namespace)


async def until_routers(pool: Pool, num_routers: int) -> None:
    """Return when so many routers of ``pool`` are known, all of which answer."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(pool.links) != num_routers or not all(map(pool.hears, pool.links)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_routers_of_pools_are_found_and_clients_find_the_global_router(found: tuple[Scene, Stub]) -> None:
    scene, _ = found
    scene.pools["slow"].gates["decode-0"].release(100)
    files = FileConfig(directory=scene.pools["slow"].directory.parent / "registry", namespace="global")
    source = DiscoveryConfig(kind=DiscoveryKind.FILE, file=files)
    async with await QuartetClient.discover(source) as client:
        whole = await client.complete(token_ids=PROMPT, sampling=Sampling(max_tokens=8))
    assert list(whole.choices[0].token_ids) == expected(PROMPT, 8)
    assert whole.accepted.choices[0].decode.worker_id == "slow.decode-0"


async def test_a_router_that_comes_is_used_and_one_that_leaves_ends_what_it_has(found: tuple[Scene, Stub]) -> None:
    scene, stub = found
    slow, gate = scene.pools["slow"], scene.pools["slow"].gates["decode-0"]
    pool = pool_of(scene, "slow")
    [first] = pool.links
    first_router = slow.router
    assert isinstance(first_router, Running)
    gate.release(2)
    tokens = list[int]()
    async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
        async for part in client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=20), path="session"):
            if not isinstance(part, Delta):
                continue
            if not tokens:
                await slow.start_router()
                await until_routers(pool, 2)
                first_router.stop.set()
                await until_routers(pool, 1)
                assert first not in pool.links and not first.is_idle
                gate.release(100)
            tokens += part.token_ids
        await first_router.task
    assert tokens == expected(PROMPT, 20)
    assert await answer(stub, start()) == ("slow.decode-0", expected(PROMPT, 8))
    assert first.is_idle


async def test_a_router_that_answers_is_used_though_its_record_is_gone(found: tuple[Scene, Stub]) -> None:
    scene, stub = found
    scene.pools["slow"].gates["decode-0"].release(100)
    pool, registry = pool_of(scene, "slow"), scene.pools["slow"].directory.parent / "registry"
    [record] = (registry / "slow").glob("router.*.json")
    record.rename(registry / "record")
    async with asyncio.timeout(TIMEOUT_S):
        assert scene.pipeline is not None
        while scene.pipeline.pools._is_listed(pool, pool.links[0]):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.005)
    assert (await answer(stub, start()))[0] == "slow.decode-0"


async def test_routers_of_a_version_that_is_not_spoken_are_left_alone(found: tuple[Scene, Stub]) -> None:
    scene, _ = found
    pool, registry = pool_of(scene, "slow"), create_registry(scene.pools["slow"].discovery)
    [first] = pool.links
    try:
        await registry.register(make_router("later", grpc_address="127.0.0.1:1", contract_version="quartet.v9"))
        await registry.register(make_router("dead", grpc_address="127.0.0.1:2", contract_version=CONTRACT_VERSION))
        async with asyncio.timeout(TIMEOUT_S):
            while len(pool.links) < 2:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        assert [link.address for link in pool.links] == [first.address, "127.0.0.1:2"]
    finally:
        await registry.close()


async def test_a_pool_without_routers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "num_agg_pools": 3, "agg_pool_dynamo_namespaces": ["fast", "slow", "nowhere"]}
    async with running_pools(tmp_path, monkeypatch, WORKERS, settings, with_discovery=True) as (_, stub):
        explained = await stub.Explain(pb.ExplainRequest(start=start()))
    reasons = {option.rank.worker_id: option.reason for option in explained.options}
    assert reasons["nowhere"] == "discovery lists no router of it"


async def test_routers_that_prefill_are_found_by_those_that_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, settings = test_disaggregated.WORKERS, test_disaggregated.SETTINGS
    async with running_pools(tmp_path, monkeypatch, workers, settings, with_discovery=True) as (scene, stub):

        async def until_prefilled(namespace: str) -> None:
            """Return when a prompt is prefilled there: the pool that decodes hears of the router a little later."""
            async with asyncio.timeout(TIMEOUT_S):
                while (ran := await run(stub, ttft_ms=100, itl_ms=10)).prefill != namespace:
                    assert ran.tokens == expected(PROMPT, 8)
            assert ran.num_moved_bytes > 0 and ran.tokens == expected(PROMPT, 8)

        await until_prefilled("p0")
        router = scene.pools["p0"].router
        assert router is not None
        await router.end()
        await until_prefilled("p1")
        await scene.pools["p0"].start_router(required_roles=(Role.PREFILL,))
        await until_prefilled("p0")
