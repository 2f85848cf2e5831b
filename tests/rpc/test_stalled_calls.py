"""A client that takes nothing loses its call; others keep theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from quartet.errors import StalledStreamError
from quartet.rpc.server import RpcServer, ServerConfig, StalledCalls
from tests.rpc.services import generic_service

_METHOD = "/test.Chatter/Talk"
_PART = bytes(1 << 20)
_TIMEOUT_S = 0.3


class Chatter:
    """Writes parts for ever, through ``StalledCalls``, and tells how each call ended."""

    def __init__(self, stalled: StalledCalls) -> None:
        self._stalled = stalled
        self.ended: asyncio.Queue[BaseException] = asyncio.Queue()

    async def talk(self, _request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The handler."""
        try:
            with self._stalled.watch() as watched:
                while True:
                    await watched.write(context, _PART)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise


@asynccontextmanager
async def chatting(timeout_s: float) -> AsyncIterator[tuple[Chatter, grpc.aio.Channel]]:
    """A server whose clients may take nothing for so long, and a channel to it."""
    stalled = StalledCalls(timeout_s)
    chatter = Chatter(stalled)
    handler = grpc.unary_stream_rpc_method_handler(chatter.talk)
    server = RpcServer(ServerConfig(), [generic_service("test.Chatter", {"Talk": handler})])
    port = await server.start()
    watch = asyncio.create_task(stalled.run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield chatter, channel
    watch.cancel()
    await server.drain(0)


@pytest.fixture
async def chatter() -> AsyncIterator[tuple[Chatter, grpc.aio.Channel]]:
    async with chatting(_TIMEOUT_S) as chatter:
        yield chatter


async def test_a_client_that_never_reads_loses_its_call_in_bounded_time(
    chatter: tuple[Chatter, grpc.aio.Channel],
) -> None:
    server, channel = chatter
    call = channel.unary_stream(_METHOD)(b"")
    error = await asyncio.wait_for(server.ended.get(), 10)
    assert isinstance(error, StalledStreamError)
    with pytest.raises(grpc.aio.AioRpcError) as status:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert status.value.code() == grpc.StatusCode.ABORTED


async def test_a_client_that_reads_keeps_its_call_while_another_stalls(
    chatter: tuple[Chatter, grpc.aio.Channel],
) -> None:
    server, channel = chatter
    reading = channel.unary_stream(_METHOD)(b"")
    silent = channel.unary_stream(_METHOD)(b"")

    async def read() -> None:
        while await reading.read() is not grpc.aio.EOF:
            pass

    reader = asyncio.create_task(read())
    assert isinstance(await asyncio.wait_for(server.ended.get(), 10), StalledStreamError)
    assert not reader.done()
    reader.cancel()
    reading.cancel()
    silent.cancel()


class NobodyReads:
    """The part of a context that writes, for ever."""

    async def write(self, _message: bytes) -> None:
        await asyncio.Event().wait()


async def test_while_the_server_itself_has_no_cpu_no_client_is_taken_for_stalled() -> None:
    stalled = StalledCalls(_TIMEOUT_S)
    watch = asyncio.create_task(stalled.run())
    context: Any = NobodyReads()

    async def write() -> None:
        with stalled.watch() as watched:
            await watched.write(context, _PART)

    writing = asyncio.create_task(write())
    for _ in range(3):
        await asyncio.sleep(0)
        time.sleep(_TIMEOUT_S * 1.5)  # noqa: ASYNC251 - it is the loop that stands still
    await asyncio.sleep(0)
    assert not writing.done()
    with pytest.raises(StalledStreamError):
        await asyncio.wait_for(writing, 10)
    watch.cancel()


async def test_a_cancel_from_elsewhere_stays_a_cancel() -> None:
    # Longer than any test: a client that is slow to cancel has not stalled by then.
    async with chatting(timeout_s=600.0) as (server, channel):
        call = channel.unary_stream(_METHOD)(b"")
        await call.read()
        call.cancel()
        assert isinstance(await asyncio.wait_for(server.ended.get(), 10), asyncio.CancelledError)
