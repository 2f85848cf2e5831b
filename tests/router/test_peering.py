"""A router among others: what it announces, and when it tells what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from unittest import mock

import pytest

from quartet.discovery.base import AnyRecord, RouterRecord
from quartet.errors import ConfigError, DiscoveryError, WorkerReplacedError
from quartet.events.bookings import BookedStart
from quartet.events.publisher import BookingsPublisher
from quartet.rpc.server import ServerConfig
from router import peers
from router.config import RouterConfig
from router.http.config import HttpConfig
from router.peers import PeerBookings, Peering
from router.workers import WorkerTable
from tests.discovery.records import make_router
from tests.fakes.memory_registry import MemoryRegistration, MemoryRegistry

TIMEOUT_S = 30.0
PORTS = {"grpc_port": 50050, "http_port": 8000, "metrics_port": 9090}


class FakePublisher:
    """Notes what is published."""

    def __init__(self) -> None:
        self.published: list[Sequence[BookedStart]] = []

    def publish(self, starts: Sequence[BookedStart]) -> None:
        self.published.append(starts)


class FakeFleet:
    """Notes to whom it listens."""

    def __init__(self) -> None:
        self.endpoints: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    def listen_to_routers(self, endpoints: frozenset[str]) -> None:
        self.endpoints.put_nowait(endpoints)


class AwayRegistry(MemoryRegistry):
    """Can't be reached the first time."""

    num_tries = 0

    async def register(self, record: AnyRecord) -> MemoryRegistration:
        self.num_tries += 1
        if self.num_tries == 1:
            raise DiscoveryError("away")
        return await super().register(record)


class SlowRegistry(MemoryRegistry):
    """Registers once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may = asyncio.Event(), asyncio.Event()

    async def register(self, record: AnyRecord) -> MemoryRegistration:
        self.is_asked.set()
        await self.may.wait()
        return await super().register(record)


def start(number: int) -> BookedStart:
    return BookedStart("decode-0", 1, 0, number, 10, 1)


@pytest.fixture
async def peering() -> AsyncIterator[Peering]:
    peering = Peering(RouterConfig(router_id="r-1", http=HttpConfig(port=8000)), None)
    yield peering
    peering.close()


async def test_starts_of_one_turn_are_told_together() -> None:
    publisher = FakePublisher()
    bookings = PeerBookings(publisher)  # type: ignore[arg-type]
    bookings.note(start(2))
    bookings.note(start(3))
    await asyncio.sleep(0)
    bookings.note(start(4))
    await asyncio.sleep(0)
    assert publisher.published == [[start(2), start(3)], [start(4)]]


async def test_a_router_listens_to_all_others_of_its_version_and_tells_only_while_there_are_some(
    peering: Peering,
) -> None:
    registry, fleet, table = MemoryRegistry(), FakeFleet(), WorkerTable("r-1-1", heartbeat_timeout_s=30.0)
    watch = registry.watch_routers()
    following = asyncio.create_task(peering.follow(watch, fleet, table))  # type: ignore[arg-type]
    async with asyncio.timeout(TIMEOUT_S):
        assert await fleet.endpoints.get() == frozenset()
        record = peering.record(**PORTS)
        assert record is not None
        await registry.register(record)
        assert await fleet.endpoints.get() == frozenset()
        assert peering.routers == [record]
        await registry.register(make_router("old", contract_version="quartet.v0"))
        assert await fleet.endpoints.get() == frozenset()
        assert table.on_sent is None
        other = await registry.register(make_router("other", contract_version=record.contract_version))
        assert await fleet.endpoints.get() == {"tcp://127.0.0.1:50049"}
        assert table.on_sent is not None
        await other.close()
        assert await fleet.endpoints.get() == frozenset()
        assert table.on_sent is None
        await registry.close()
        await following


async def test_a_router_announces_itself_once_discovery_is_back_and_withdraws(peering: Peering) -> None:
    registry = AwayRegistry()
    with mock.patch.object(peers, "_ANNOUNCE_AGAIN_S", 0.0):
        announcing = asyncio.create_task(peering.announce(registry, **PORTS))
        async with asyncio.timeout(TIMEOUT_S):
            seen = await anext(listed async for listed in registry.watch_routers() if listed)
        [record] = seen
        assert record == peering.record(**PORTS)
        assert (record.router_id, record.grpc_address) == ("r-1", "127.0.0.1:50050")
        assert (record.http_address, record.metrics_address) == ("127.0.0.1:8000", "127.0.0.1:9090")
        assert record.events_address.startswith("tcp://127.0.0.1:")
        assert record.max_generates == RouterConfig().calls.max_generates
        await peering.withdraw()
        assert await registry.routers() == []
        assert not announcing.done()
        announcing.cancel()


async def test_a_router_that_withdraws_while_it_is_being_registered_is_not_left_there(peering: Peering) -> None:
    registry = SlowRegistry()
    announcing = asyncio.create_task(peering.announce(registry, **PORTS))
    async with asyncio.timeout(TIMEOUT_S):
        await registry.is_asked.wait()
        await peering.withdraw()
        seen = registry.watch_routers()
        assert await anext(seen) == []
        registry.may.set()
        [_there] = await anext(seen)
        assert await anext(seen) == []
    assert not announcing.done()
    announcing.cancel()


async def test_a_router_whose_id_another_takes_ends(peering: Peering) -> None:
    registry = MemoryRegistry()
    announcing = asyncio.create_task(peering.announce(registry, **PORTS))
    async with asyncio.timeout(TIMEOUT_S):
        await anext(listed async for listed in registry.watch_routers() if listed)
        await registry.register(make_router("r-1"))
        with pytest.raises(WorkerReplacedError, match="another process has registered as router r-1"):
            await announcing


@pytest.mark.parametrize(
    ("host", "advertised", "wanted"),
    [
        ("0.0.0.0", "", None),
        ("0.0.0.0", "r1.example.com", "r1.example.com:50050"),
        ("127.0.0.1", "r1", "127.0.0.1:50050"),
    ],
)
def test_an_address_that_nobody_can_dial_is_not_announced(host: str, advertised: str, wanted: str | None) -> None:
    server = ServerConfig(address=f"{host}:50050", insecure=True)
    peering = Peering(RouterConfig(server=server, advertise_host=advertised), None)
    record: RouterRecord | None = peering.record(**PORTS)
    peering.close()
    assert (record and record.grpc_address) == wanted


def test_each_start_has_a_name_of_its_own_at_workers() -> None:
    starts = [Peering(RouterConfig(router_id="r-1"), None) for _ in range(2)]
    for peering in starts:
        peering.close()
    assert starts[0].start_id != starts[1].start_id


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"router_id": "a/b"}, "router_id"),
        ({"advertise_host": "a b"}, "advertise_host"),
        ({"events_address": "0.0.0.0:0"}, "events_address"),
    ],
)
def test_impossible_names_and_open_ports_without_a_key_are_refused(settings: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        RouterConfig(**settings)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_refused() -> None:
    taken = BookingsPublisher("127.0.0.1", router_id="r")
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            Peering(RouterConfig(events_address=f"127.0.0.1:{taken.port}"), None)
    finally:
        taken.close()
