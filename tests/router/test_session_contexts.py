"""Each request of a session has a tenant and a trace of its own, and may come long after the one before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from quartet.client import QuartetClient
from quartet.rpc.server import RpcServer, ServerConfig, StalledCalls
from quartet.v1 import router_pb2_grpc
from router.fleet import FetchedTexts
from router.servicer import RouterServicer, router_service
from tests.router.fakes import Fleet
from tests.router.session_reader import SessionReader
from tests.router.test_servicer import make_start

OWN, SHARED = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")


@pytest.fixture
async def fleet_and_channel() -> AsyncIterator[tuple[Fleet, grpc.aio.Channel]]:
    fleet = Fleet("prefill-0", "decode-0")
    texts = FetchedTexts(lambda _key: [])
    servicer = RouterServicer(fleet.pipeline, fleet.table, texts, stalled=StalledCalls(30), is_loopback=True)
    server = RpcServer(ServerConfig(), [router_service(servicer)])
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield fleet, channel
    await server.drain(0)


async def test_a_start_has_its_own_trace_or_else_the_streams(
    fleet_and_channel: tuple[Fleet, grpc.aio.Channel],
) -> None:
    fleet, channel = fleet_and_channel
    session = SessionReader(router_pb2_grpc.RouterServiceStub(channel), metadata=(("traceparent", SHARED),))
    for slot, traceparent in enumerate((OWN, "", "nonsense")):
        await session.start(slot, make_start(), traceparent=traceparent)
        await session.read_ends(slot)
    traces = [call.start.context.traceparent for call in fleet.hops.calls if call.kind == "decode"]
    assert traces == [OWN, SHARED, SHARED]
    fleet.assert_nothing_left()


async def test_a_start_has_its_own_tenant(
    fleet_and_channel: tuple[Fleet, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    _fleet, channel = fleet_and_channel
    caplog.set_level(logging.INFO, logger="router")
    session = SessionReader(router_pb2_grpc.RouterServiceStub(channel))
    for slot, tenant in enumerate(("acme", "other")):
        await session.start(slot, make_start(tenant=tenant))
        await session.read_ends(slot)
    records = [record for record in caplog.records if record.name == "router.request_log"]
    assert [record.quartet_fields["tenant"] for record in records] == ["acme", "other"]


async def test_a_client_whose_session_was_idle_for_too_long_opens_another_one() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    stalled = StalledCalls(30)
    servicer = RouterServicer(
        fleet.pipeline, fleet.table, FetchedTexts(lambda _: []), stalled=stalled, is_loopback=True
    )
    server = RpcServer(ServerConfig(), [router_service(servicer)])
    port = await server.start()
    async with QuartetClient([f"127.0.0.1:{port}"]) as client, asyncio.timeout(30):
        answers = []
        for _ in range(2):
            completion = await client.complete(token_ids=[1, 2, 3], seed=1, path="session", omit_text=True)
            answers.append(completion.choices[0].token_ids)
            [session] = servicer._sessions
            while session in servicer._sessions:  # as its timer does in ten minutes and more
                session._idle_timer.cancel()
                session._poll_idle()
                await asyncio.sleep(0)
    assert answers[0] == answers[1]
    assert answers[0]
    await server.drain(0)
    fleet.assert_nothing_left()
