"""Routers of other namespaces that prefill, by their addresses or by discovery."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.discovery.base import CONTRACT_VERSION, RouterRecord
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.file import FileConfig
from quartet.errors import ConfigError
from router.config import RouterConfig
from router.prefill_pools import PrefillPools
from tests.router.system import TIMEOUT_S


def record(router_id: str, address: str, version: str = CONTRACT_VERSION) -> RouterRecord:
    return RouterRecord(router_id=router_id, epoch=1, grpc_address=address, contract_version=version)


async def test_routers_of_a_pool_without_addresses_come_and_go_with_their_records(tmp_path: Path) -> None:
    files = FileConfig(directory=tmp_path, poll_interval_s=0.02, ttl_s=60)
    discovery = DiscoveryConfig(kind=DiscoveryKind.FILE, file=files)
    pools = PrefillPools({"near": (), "far": ("10.0.0.9:1",)}, None, discovery)
    registry = create_registry(discovery.of_namespace("near"))
    following = asyncio.create_task(pools.follow())

    async def until_known(*addresses: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while sorted(link.address for link in pools._links["near"]) != [*addresses]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    try:
        assert pools.has_discovered and pools.namespaces == {"near", "far"}
        first = await registry.register(record("a", "10.0.0.1:1"))
        await registry.register(record("later", "10.0.0.3:1", "quartet.v9"))
        await until_known("10.0.0.1:1")
        await registry.register(record("b", "10.0.0.2:1"))
        await until_known("10.0.0.1:1", "10.0.0.2:1")
        await first.close()
        await until_known("10.0.0.2:1")
        assert [link.address for link in pools._links["far"]] == ["10.0.0.9:1"]
    finally:
        following.cancel()
        await asyncio.wait([following])
        await registry.close()
        await pools.close()


async def test_pools_with_addresses_follow_nothing() -> None:
    pools = PrefillPools({"far": ("10.0.0.9:1",)}, None, DiscoveryConfig())
    assert not pools.has_discovered
    await pools.close()


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"a/b": ()}, "prefill_pools.a/b must be"),
        ({"near": ("10.0.0.1:1", "10.0.0.2")}, r"prefill_pools.near\[1\]: must be host:port"),
    ],
)
def test_a_mistake_is_refused_by_its_name(pools: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(prefill_pools=pools)
