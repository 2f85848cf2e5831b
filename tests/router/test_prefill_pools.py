"""Routers of other namespaces that prefill, by their addresses or by discovery."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from quartet.api.convert.prefill import AskedPrefill, PrefilledFor
from quartet.api.router_link import RouterLink
from quartet.discovery.base import CONTRACT_VERSION, RouterRecord
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.file import FileConfig
from quartet.errors import (
    ConfigError,
    DrainingError,
    OutOfBlocksError,
    RouterUnavailableError,
    ServingError,
    WorkerUnavailableError,
)
from router import prefill_pools
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


ASKED, PREFILLED = cast("AskedPrefill", SimpleNamespace()), cast("PrefilledFor", SimpleNamespace())


class FakeLink:
    """A router that prefills, or fails with ``error``; notes its name in ``asked``."""

    def __init__(self, name: str, asked: list[str], error: ServingError | None = None) -> None:
        self.address = name
        self._asked = asked
        self._error = error

    async def prefill(self, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        assert (asked, timeout_s) == (ASKED, 5.0)
        self._asked.append(self.address)
        if self._error is not None:
            raise self._error
        return PREFILLED

    async def close(self) -> None:
        """Nothing is open."""


def pools_of(*links: FakeLink) -> PrefillPools:
    pools = PrefillPools({}, None)
    pools._links["near"] = [cast("RouterLink", link) for link in links]
    return pools


async def test_routers_of_a_pool_are_asked_in_turn() -> None:
    asked = list[str]()
    pools = pools_of(FakeLink("a", asked), FakeLink("b", asked), FakeLink("c", asked))
    for _ in range(6):
        assert await pools.prefill("near", ASKED, timeout_s=5.0) is PREFILLED
    assert sorted(asked[:3]) == ["a", "b", "c"]
    assert asked[3:] == asked[:3]


@pytest.mark.parametrize("error", [RouterUnavailableError("it is gone"), DrainingError("it goes")])
async def test_the_next_router_prefills_where_one_can_not(error: ServingError) -> None:
    asked = list[str]()
    pools = pools_of(FakeLink("bad", asked, error), FakeLink("good", asked))
    for _ in range(2):
        assert await pools.prefill("near", ASKED, timeout_s=5.0) is PREFILLED
    assert asked == ["good", "bad", "good"]


async def test_where_no_router_prefills_each_is_asked_once() -> None:
    asked = list[str]()
    gone = FakeLink("gone", asked, RouterUnavailableError("it is gone"))
    pools = pools_of(gone, FakeLink("leaving", asked, DrainingError("it goes")))
    with pytest.raises(WorkerUnavailableError, match=r"nothing prefills in near: it (is gone|goes)"):
        await pools.prefill("near", ASKED, timeout_s=5.0)
    assert sorted(asked) == ["gone", "leaving"]


async def test_what_a_router_refuses_no_other_is_asked() -> None:
    asked = list[str]()
    pools = pools_of(*(FakeLink(name, asked, OutOfBlocksError("it has no blocks")) for name in "ab"))
    with pytest.raises(OutOfBlocksError):
        await pools.prefill("near", ASKED, timeout_s=5.0)
    assert len(asked) == 1


async def test_a_router_that_leaves_is_closed_once_nothing_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_pools, "_IDLE_POLL_S", 0.0)
    seen = list[str]()

    class BusyLink:
        @property
        def is_idle(self) -> bool:
            seen.append("asked")
            return len(seen) == 3

        async def close(self) -> None:
            seen.append("closed")

    async with asyncio.timeout(TIMEOUT_S):
        await prefill_pools._leave(cast("RouterLink", BusyLink()))
    assert seen == ["asked", "asked", "asked", "closed"]
