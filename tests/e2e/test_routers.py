"""Two routers of one deployment: both announce themselves, and clients and their answers go on when one is killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from quartet.client import QuartetClient, RequestPath
from quartet.discovery.create import DiscoveryConfig
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.engine.sampling import Sampling
from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Ask, Crowd, mixed_asks
from tests.e2e.process import wait_until
from tests.e2e.stack import LOCAL_PREFILL, Stack, StackConfig
from tests.schemas import SCHEMAS, guided

LEASE_GONE_S = 30.0


@pytest.fixture(scope="module")
def two(start_stack: StartStack) -> Stack:
    """One decode worker and two routers."""
    routers = {name: {**LOCAL_PREFILL, "router_id": name} for name in ("router", "other")}
    return start_stack(StackConfig(num_prefill=0, routers=routers))


def listed(stack: Stack) -> dict[str, str]:
    """The routers in etcd: their gRPC addresses, by id."""

    async def ask() -> dict[str, str]:
        registry = EtcdRegistry(EtcdConfig(endpoints=(stack.etcd.endpoint,), namespace="e2e"))
        try:
            return {record.router_id: record.grpc_address for record in await registry.routers()}
        finally:
            await registry.close()

    return asyncio.run(ask())


async def answer(stack: Stack, num_requests: int) -> set[str]:
    """Answers of clients that find the routers in etcd; the routers that gave them."""
    discovery, routers = DiscoveryConfig(etcd=EtcdConfig(endpoints=(stack.etcd.endpoint,), namespace="e2e")), set[str]()
    for _ in range(num_requests):
        async with await QuartetClient.discover(discovery) as client:
            routers.add((await client.complete("Hi", sampling=Sampling(max_tokens=2))).router)
    return routers


RETURN_S = 60.0
# The one with a stop string.
LATE = 2
BY_ROUTER = (RequestPath.GENERATE, RequestPath.SESSION)


def asks_for(text: str) -> list[Ask]:
    """Greedy and sampled ones, one with two choices, and one that ends late by a stop string of its ``text``."""
    asks = mixed_asks("router dies", 4, num_prompt_tokens=range(20, 60), num_tokens=range(150, 170))
    asks[1] = replace(asks[1], num_choices=2)
    if text:
        asks[LATE] = replace(asks[LATE], stop=(text[len(text) * 3 // 4 :][:6],))
    schema = SCHEMAS["numbers"]
    sampling = Sampling(temperature=1.0, max_tokens=400, guided=guided(schema))
    return [*asks, Ask(token_ids=asks[0].token_ids, sampling=sampling, seed=5)]


async def test_no_client_notices_that_a_router_is_killed(two: Stack) -> None:
    addresses = [two.processes[name].grpc_address for name in ("other", "router")]
    async with QuartetClient(addresses[1:]) as client:
        async with Crowd(client, [asks_for("")[LATE]]) as first:
            await first.finish()
        asks = asks_for(first.answers[0].choices[0].text)
        async with Crowd(client, asks) as undisturbed:
            await undisturbed.finish()
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(QuartetClient(addresses, resume_timeout_s=RETURN_S))
        crowds = [await exits.enter_async_context(Crowd(client, asks, path=path)) for path in RequestPath]
        for crowd in crowds:
            await crowd.wait_for(lambda: all(len(answer.token_ids) > 4 for answer in crowd.answers))  # noqa: B023
        await asyncio.to_thread(two.kill, "other")
        for crowd in crowds:
            await crowd.finish()
    for path, crowd in zip(RequestPath, crowds, strict=True):
        assert crowd.shown == undisturbed.shown, path
        assert (max(crowd.num_attempts) == 2) == (path in BY_ROUTER), "one at each router; direct answers need none"
    await asyncio.to_thread(two.wait_blocks_returned, timeout_s=RETURN_S)
    await asyncio.to_thread(two.restart_dead)


async def test_tokens_that_break_the_grammar_are_not_gone_on_after(two: Stack) -> None:
    async with grpc.aio.insecure_channel(two.router_address) as channel, asyncio.timeout(RETURN_S):
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        start = router_pb2.GenerateStart(
            text="Hi",
            sampling=types_pb2.Sampling(max_tokens=20, guided=types_pb2.GuidedDecoding(json_schema='{"type": "null"}')),
        )
        resume = router_pb2.Resume(
            request_id="00ff" * 8, attempt=1, seed=1, generated_token_ids=router_pb2.TokenIds(ids=tiny.PLAIN_IDS[:3])
        )
        call = stub.Generate(iter([router_pb2.GenerateRequest(start=start, resume=resume)]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await asyncio.to_thread(two.wait_blocks_returned, timeout_s=RETURN_S)


def test_clients_find_both_routers_and_go_on_when_one_is_killed(two: Stack) -> None:
    addresses = {name: two.processes[name].grpc_address for name in ("router", "other")}
    wait_until(lambda: listed(two) == addresses, LEASE_GONE_S, lambda: f"both are listed, but {listed(two)}")
    assert asyncio.run(answer(two, 20)) == set(addresses.values())
    two.kill("other")
    # While its record is still there, clients that begin with it go on to the next one.
    assert asyncio.run(answer(two, 6)) == {addresses["router"]}
    wait_until(lambda: set(listed(two)) == {"router"}, LEASE_GONE_S, lambda: f"one is listed, but {listed(two)}")
    # Without etcd it answers as before, and withdraws in bounded time.
    two.etcd.kill()
    two.terminate("router")
    assert two.processes["router"].wait(LEASE_GONE_S) == 0
