"""Two routers of one deployment: both announce themselves, and a client goes on when one is killed."""

from __future__ import annotations

import asyncio

import pytest

from quartet.client import QuartetClient
from quartet.discovery.create import DiscoveryConfig
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.engine.sampling import Sampling
from tests.e2e.conftest import StartStack
from tests.e2e.process import wait_until
from tests.e2e.stack import LOCAL_PREFILL, Stack, StackConfig

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
