"""Clients find routers where these announce themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from quartet.client import Delta, QuartetClient
from quartet.client.discovery import find_routers
from quartet.client.sync import SyncClient
from quartet.discovery.base import CONTRACT_VERSION, RouterRecord
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.discovery.file import FileConfig, FileRegistry
from quartet.errors import DiscoveryError, RouterUnavailableError
from tests.client.breaking_router import WORDS, BreakingRouter, KnownAnswer, Script, serving
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter
from tests.discovery.records import make_router


@pytest.fixture
def discovery(tmp_path: Path) -> DiscoveryConfig:
    return DiscoveryConfig(kind=DiscoveryKind.FILE, file=FileConfig(directory=tmp_path))


@pytest.fixture
async def registry(discovery: DiscoveryConfig) -> AsyncIterator[FileRegistry]:
    assert discovery.file is not None
    registry = FileRegistry(discovery.file)
    yield registry
    await registry.close()


def record(router_id: str, address: str, version: str = CONTRACT_VERSION) -> RouterRecord:
    return make_router(router_id, grpc_address=address, contract_version=version)


async def test_all_routers_of_our_contract_are_found_in_any_order(
    registry: FileRegistry, discovery: DiscoveryConfig
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in range(5001, 5006)]
    for number, address in enumerate(addresses):
        await registry.register(record(f"r-{number}", address))
    await registry.register(record("r-other", "127.0.0.1:6000", "quartet.v0"))
    found = [tuple(await find_routers(discovery)) for _ in range(20)]
    assert all(sorted(each) == addresses for each in found)
    assert len({each[0] for each in found}) > 1, "all clients would begin with the same router"


async def test_a_client_goes_on_to_the_next_router_that_it_found(
    registry: FileRegistry, discovery: DiscoveryConfig, start_router: StartRouter, free_port: Callable[[], int]
) -> None:
    address = await start_router(FakeRouter())
    await registry.register(record("gone", f"127.0.0.1:{free_port()}"))
    await registry.register(record("there", address))
    for _ in range(12):  # the one that is gone comes first half of the time
        async with await QuartetClient.discover(discovery) as client:
            assert (await client.complete("Hi")).router == address


async def test_routers_that_come_later_are_found_once_the_known_ones_are_gone(
    registry: FileRegistry, discovery: DiscoveryConfig
) -> None:
    script = Script(KnownAnswer([WORDS]))
    async with asyncio.timeout(60), serving(BreakingRouter(script), BreakingRouter(script)) as served:
        first, second = served.addresses
        registration = await registry.register(record("first", first))
        async with await QuartetClient.discover(discovery) as client:
            assert (await client.complete("Hi")).router == first
            await registration.close()
            await registry.register(record("second", second))
            await served.kill(0)
            assert (await client.complete("Hi", path="session")).router == second
            assert client.router_addresses == [second], "the other one is gone for good"


async def test_an_answer_goes_on_at_a_router_that_came_later(
    registry: FileRegistry, discovery: DiscoveryConfig
) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3])
    async with asyncio.timeout(60), serving(BreakingRouter(script), BreakingRouter(script)) as served:
        await registry.register(record("first", served.addresses[0]))
        async with await QuartetClient.discover(discovery) as client:
            stream = client.generate("Hi")
            parts = [await anext(stream)]
            await registry.register(record("second", served.addresses[1]))
            await served.kill(0)
            parts += [part async for part in stream]
    assert stream.router == served.addresses[1]
    assert [token for part in parts if isinstance(part, Delta) for token in part.token_ids] == list(range(100, 106))


async def test_discovery_that_fails_changes_nothing(
    discovery: DiscoveryConfig, registry: FileRegistry, start_router: StartRouter, free_port: Callable[[], int]
) -> None:
    num_asked = 0

    async def find() -> list[str]:
        nonlocal num_asked
        num_asked += 1
        raise DiscoveryError("no registry answers")

    nobody = f"127.0.0.1:{free_port()}"
    async with asyncio.timeout(60), QuartetClient(nobody, find=find) as client:
        with pytest.raises(RouterUnavailableError, match=nobody):
            await client.complete("Hi")
        await asyncio.gather(*(client.complete("Hi") for _ in range(20)), return_exceptions=True)
    assert num_asked < 20, "requests ask together"


async def test_a_blocking_client_finds_them_too(
    registry: FileRegistry, discovery: DiscoveryConfig, start_router: StartRouter
) -> None:
    await registry.register(record("there", await start_router(FakeRouter())))

    def ask() -> str:
        with SyncClient.discover(discovery) as client:
            return client.complete("Hi").choices[0].text

    assert await asyncio.to_thread(ask) == "one two three"


async def test_no_router_is_said_so(discovery: DiscoveryConfig) -> None:
    with pytest.raises(RouterUnavailableError, match="discovery lists no router"):
        await QuartetClient.discover(discovery)
