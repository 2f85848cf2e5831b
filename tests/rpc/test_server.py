"""A server: where it listens, the health that it reports, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quartet.errors import ConfigError, DrainingError
from quartet.rpc import server as rpc_server
from quartet.rpc.channels import create_channel, open_channel
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer, ServerConfig, Service
from tests.rpc import raw_http2
from tests.rpc.conftest import StartServer
from tests.rpc.services import generic_service
from tests.stopwatch import Stopwatch

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "quartet.v1.DecodeService"


class Echo:
    """A raw stream that answers each message until the caller half-closes."""

    def __init__(self) -> None:
        self.running = asyncio.Event()

    async def decode(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.running.set()
        async for request in requests:
            yield request

    def service(self) -> Service:
        return generic_service(NAME, {"Decode": grpc.stream_stream_rpc_method_handler(self.decode)})


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


def echo_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{NAME}/Decode")()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:50051", "worker-1:50051"])
def test_beyond_loopback_it_takes_tls_or_a_clear_word(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        ServerConfig(address=address)
    assert ServerConfig(address=address, insecure=True).with_reflection is False


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.0.0.2:1", "[::1]:0", "localhost:50051"])
def test_loopback_offers_reflection_and_channelz(address: str) -> None:
    config = ServerConfig(address=address)
    assert (config.with_reflection, config.with_channelz) == (True, True)


@pytest.mark.parametrize("address", ["50051", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", ":50051"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        ServerConfig(address=address, insecure=True)


@pytest.mark.parametrize("num_listeners", [1, 3])
@pytest.mark.parametrize("num_others", [1, 3])
async def test_a_port_that_is_taken_is_named(start_server: StartServer, num_others: int, num_listeners: int) -> None:
    _, address = await start_server([], num_listeners=num_others)
    with pytest.raises(ConfigError, match=address):
        await RpcServer(ServerConfig(address=address), [], num_listeners=num_listeners).start()


async def test_all_listeners_of_an_address_take_connections_and_end_together(start_server: StartServer) -> None:
    server, address = await start_server([Echo().service()], num_listeners=3)
    own_connection = {"grpc.use_local_subchannel_pool": 1}
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address, None, own_connection)) for _ in range(16)]
        calls = [echo_call(channel) for channel in channels]
        for call in calls:
            await call.write(b"said")
            assert await call.read() == b"said"
        found = await channelz_pb2_grpc.ChannelzStub(channels[0]).GetServers(channelz_pb2.GetServersRequest())
        port = int(address.rpartition(":")[2])
        ours = [one for one in found.server if any(f":{port}" in socket.name for socket in one.listen_socket)]
        assert len([one for one in ours if one.data.calls_started]) > 1
        assert server.num_active_calls == 16
        await server.drain(0)
        assert server.num_active_calls == 0
    await start_server([], ServerConfig(address=address), num_listeners=3)


async def test_health_is_per_service_and_overall(start_server: StartServer) -> None:
    server, address = await start_server([Echo().service(), Service("test.Other", lambda server: None)])
    async with create_channel(address, None) as channel:
        assert [await health_of(channel, name) for name in ("", NAME, "test.Other")] == [NOT_SERVING] * 3
        await server.set_serving(None, True)
        assert [await health_of(channel, name) for name in ("", NAME, "test.Other")] == [SERVING] * 3
        await server.set_serving(NAME, False)
        assert [await health_of(channel, name) for name in ("", NAME, "test.Other")] == [SERVING, NOT_SERVING, SERVING]


@pytest.mark.parametrize(("num_requests", "timeout_s"), [(0, 0.1), (2, 1.0)])
async def test_a_reflection_stream_on_which_nothing_comes_ends(
    num_requests: int, timeout_s: float, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_REQUEST_TIMEOUT_S", timeout_s)
    _, address = await start_server([])
    async with create_channel(address, None) as channel, asyncio.timeout(30):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        for _ in range(num_requests):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await call.read()).list_services_response.service
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_reflection_lists_every_service(start_server: StartServer) -> None:
    _, address = await start_server([Echo().service()])
    async with create_channel(address, None) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
    assert listed == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.channelz.v1.Channelz",
    }


async def test_channelz_shows_the_server(start_server: StartServer) -> None:
    _, address = await start_server([])
    async with create_channel(address, None) as channel:
        response = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
    assert len(response.server) >= 1


async def test_only_methods_that_are_called_often_have_a_wait_of_their_own(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs every call of the server something; health has one, so that no flood of calls delays it."""
    waiting = []

    def note(_server: grpc.aio.Server, service_name: str, _handlers: object) -> None:
        waiting.append(service_name)

    monkeypatch.setattr("grpc.aio._server.Server.add_registered_method_handlers", note)
    await start_server([])
    assert waiting == ["grpc.health.v1.Health"]


async def test_reflection_and_channelz_can_be_left_out(start_server: StartServer) -> None:
    _, address = await start_server([], ServerConfig(reflection=False, channelz=False))
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_ends_only_its_call(start_server: StartServer) -> None:
    _, address = await start_server([Echo().service()], ServerConfig(max_receive_message_bytes=1000))
    async with create_channel(address, None) as channel:
        call = echo_call(channel)
        await call.write(b"x" * 2000)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        again = echo_call(channel)
        await again.write(b"x" * 900)
        assert len(await again.read()) == 900


async def test_a_connection_has_so_many_calls_and_no_more(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_STREAMS", 2)
    _, address = await start_server([Echo().service()])
    async with create_channel(address, None) as channel:
        calls = [echo_call(channel), echo_call(channel)]
        for call in calls:
            await call.write(b"x")
            assert await call.read() == b"x"
        beyond = channel.stream_stream(f"/{NAME}/Decode")(timeout=0.3)
        assert await beyond.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for call in calls:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        again = echo_call(channel)
        await again.write(b"x")
        assert await again.read() == b"x"


async def test_drain_notifies_health_watchers_and_waits_for_running_calls(start_server: StartServer) -> None:
    echo = Echo()
    server, address = await start_server([echo.service()])
    await server.set_serving(None, True)
    async with create_channel(address, None) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        call = echo_call(channel)
        await echo.running.wait()
        assert server.num_active_calls == 1
        draining = asyncio.create_task(server.drain(30))
        assert (await watch.read()).status == NOT_SERVING
        await call.write(b"still here")
        assert await call.read() == b"still here"
        await call.done_writing()
        # The open watch must not hold up the end for the whole grace.
        async with asyncio.timeout(30):
            await draining
        assert await call.code() is grpc.StatusCode.OK


async def test_drain_takes_no_new_call_and_still_answers_probes(start_server: StartServer) -> None:
    echo = Echo()
    server, address = await start_server([echo.service()])
    async with create_channel(address, None) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        await watch.read()
        call = echo_call(channel)
        await echo.running.wait()
        draining = asyncio.create_task(server.drain(30))
        await asyncio.sleep(0)
        late = echo_call(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.read()
        assert isinstance(from_rpc_error(caught.value), DrainingError)
        assert await health_of(channel, "") == NOT_SERVING
        await call.done_writing()
        await draining


async def test_a_second_drain_with_a_shorter_grace_counts(start_server: StartServer) -> None:
    echo = Echo()
    server, address = await start_server([echo.service()])
    async with create_channel(address, None) as channel:
        call = echo_call(channel)
        await echo.running.wait()
        async with asyncio.timeout(30):
            await asyncio.gather(server.drain(30), server.drain(0), server.drain(0))
        assert await call.code() is not grpc.StatusCode.OK


async def test_a_health_watcher_that_takes_nothing_keeps_nobody_waiting(start_server: StartServer) -> None:
    server, address = await start_server([Echo().service()])
    watcher = await raw_http2.ask(address, "/grpc.health.v1.Health/Watch", window_bytes=0)
    async with asyncio.timeout(30):
        await watcher.answer_begins()
        await server.set_serving(None, True)
    async with create_channel(address, None) as channel:
        assert await health_of(channel, "") == SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await server.set_not_serving_for_good()
        assert (await watch.read()).status == NOT_SERVING
    watcher.close()


async def is_refused(channel: grpc.aio.Channel) -> bool:
    try:
        await health_of(channel, "")
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return True
    return False


async def test_drain_cuts_what_overstays(start_server: StartServer) -> None:
    echo = Echo()
    server, address = await start_server([echo.service()])
    async with create_channel(address, None) as channel:
        call = echo_call(channel)
        await echo.running.wait()
        stopwatch = Stopwatch()
        await server.drain(0.2)
        assert stopwatch.seconds < 10
        assert await call.code() is not grpc.StatusCode.OK
    assert server.num_active_calls == 0


async def test_health_says_not_serving_for_good_while_calls_go_on(start_server: StartServer) -> None:
    server, address = await start_server([Echo().service()])
    await server.set_serving(None, True)
    await server.set_not_serving_for_good()
    await server.set_serving(None, True)
    async with create_channel(address, None) as channel:
        assert await health_of(channel, "") == NOT_SERVING


async def test_a_server_that_never_started_can_be_drained() -> None:
    await RpcServer(ServerConfig(), []).drain(1)


async def test_a_burst_of_calls_is_answered_whole(start_server: StartServer) -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(0)
        return request

    _, address = await start_server([generic_service("test.S", {"M": grpc.unary_unary_rpc_method_handler(answer)})])
    async with create_channel(address, None) as channel:
        method = channel.unary_unary("/test.S/M")
        answers = await asyncio.gather(*(method(b"%d" % i) for i in range(1500)))
    assert answers == [b"%d" % i for i in range(1500)]


async def test_a_channel_finds_a_restarted_server_soon(start_server: StartServer) -> None:
    server, address = await start_server([])
    async with create_channel(address, None) as channel:
        await health_of(channel, "")
        await server.drain(0)
        assert await is_refused(channel)
        await start_server([], ServerConfig(address=address))
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60
        )
    assert response.status == NOT_SERVING
