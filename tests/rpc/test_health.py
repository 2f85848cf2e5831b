"""What watchers of health can make a server keep: nothing by their own words, and few calls."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import InvalidRequestError, QueueFullError
from quartet.rpc import health
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer
from tests.rpc.conftest import StartServer
from tests.services.stream_workers import until

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVING = health_pb2.HealthCheckResponse.SERVING


def watch(channel: grpc.aio.Channel, service: str = "") -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))


def connect(address: str) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def is_refused(call: Any) -> bool:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(from_rpc_error(error), QueueFullError)
        return True
    return False


def num_watches(server: RpcServer) -> int:
    return len(server._health._watches)


async def test_watches_of_made_up_services_stay_open_and_leave_no_entry(start_server: StartServer) -> None:
    server, address = await start_server([])
    async with connect(address) as channel, asyncio.timeout(30):
        calls = [watch(channel, f"made.up.{number}") for number in range(20)]
        assert [(await call.read()).status for call in calls] == [UNKNOWN] * 20
        assert not server._health._server_watchers
        assert set(server._health._server_status) == {""}
        await server.set_serving("made.up.7", True)
        assert (await calls[7].read()).status == SERVING
        assert not any(call.done() for call in calls)


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_service_with_a_long_name_is_refused_by_field(start_server: StartServer, method: str) -> None:
    server, address = await start_server([])
    request = health_pb2.HealthCheckRequest(service="s" * 257)
    async with connect(address) as channel:
        call = getattr(health_pb2_grpc.HealthStub(channel), method)(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if method == "Check" else call.read())
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (InvalidRequestError, "service")
    assert num_watches(server) == 0


async def test_a_connection_has_few_watches_and_others_have_theirs(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_MAX_WATCHES_OF_CONNECTION", 2)
    server, address = await start_server([])
    async with connect(address) as greedy, connect(address) as other, asyncio.timeout(30):
        calls = [watch(greedy) for _ in range(3)]
        assert [await is_refused(call) for call in calls].count(True) == 1
        assert not await is_refused(watch(other))
        assert num_watches(server) == 3
        for call in calls:
            call.cancel()
        await until(lambda: num_watches(server) == 1)
        assert not await is_refused(watch(greedy))


async def test_a_server_has_so_many_watches_in_all(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MAX_WATCHES", 2)
    server, address = await start_server([])
    async with connect(address) as channel, connect(address) as other, asyncio.timeout(30):
        first, second = watch(channel), watch(other)
        assert not await is_refused(first)
        assert not await is_refused(second)
        assert await is_refused(watch(other))
        first.cancel()
        await until(lambda: num_watches(server) == 1)
        assert not await is_refused(watch(other))
        assert sum(server._health._watches._by_caller.values()) == 2
