"""A client that takes nothing loses its call; others keep theirs, also while this process does not run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from quartet.errors import RequestTimeoutError, StalledStreamError
from quartet.rpc import server as rpc_server
from quartet.rpc.server import RpcServer, ServerConfig, StalledCalls
from tests.rpc.services import generic_service

_METHOD = "/test.Chatter/Talk"
_PART = bytes(1 << 20)
#: Of writes: short where one must pass, and longer than a busy machine takes where none may.
_VERY_SHORT_S, _SHORT_S, _LONG_S = 0.1, 0.3, 30.0


class Chatter:
    """Writes parts for ever, through ``StalledCalls``, and notes how each call ended."""

    def __init__(self, stalled: StalledCalls) -> None:
        self._stalled = stalled
        self.ended: asyncio.Queue[BaseException] = asyncio.Queue()

    async def talk(self, _request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The handler."""
        try:
            with self._stalled.watch(context) as call:
                while True:
                    await call.write(_PART)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise


@asynccontextmanager
async def chatting(timeout_s: float) -> AsyncIterator[tuple[Chatter, grpc.aio.Channel]]:
    """A server whose writes may take ``timeout_s``, and a channel to it."""
    chatter = Chatter(StalledCalls(timeout_s))
    handler = grpc.unary_stream_rpc_method_handler(chatter.talk)
    server = RpcServer(ServerConfig(), [generic_service("test.Chatter", {"Talk": handler})])
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield chatter, channel
    await server.drain(0)


async def test_a_client_that_never_reads_loses_its_call_in_bounded_time() -> None:
    async with chatting(_SHORT_S) as (server, channel):
        call = channel.unary_stream(_METHOD)(b"")
        error = await asyncio.wait_for(server.ended.get(), 30)
        assert isinstance(error, StalledStreamError)
        with pytest.raises(grpc.aio.AioRpcError) as status:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert status.value.code() == grpc.StatusCode.ABORTED


async def test_a_client_that_takes_nothing_of_what_a_handler_yields_loses_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = asyncio.Event()

    async def talk(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                yield _PART
        finally:
            closed.set()

    monkeypatch.setattr(rpc_server, "_REQUEST_TIMEOUT_S", _SHORT_S)
    handler = grpc.unary_stream_rpc_method_handler(talk)
    server = RpcServer(ServerConfig(), [generic_service("test.Chatter", {"Talk": handler})])
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
        call = channel.unary_stream(_METHOD)(b"")
        await closed.wait()
        with pytest.raises(grpc.aio.AioRpcError) as status:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert status.value.code() == grpc.StatusCode.ABORTED
    await server.drain(0)


async def test_a_connection_that_takes_no_answers_gets_no_further_calls_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_UNTAKEN", 2)
    async with chatting(_SHORT_S) as (server, channel), asyncio.timeout(60):
        stuck: list[Any] = []
        while True:  # gRPC may have room for all of a call's answer and its status: nothing is kept of such a one
            call = channel.unary_stream(_METHOD)(b"")
            ends = asyncio.create_task(server.ended.get())
            refused = asyncio.create_task(call.code())
            await asyncio.wait([ends, refused], return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                ends.cancel()
                break
            assert isinstance(await ends, StalledStreamError)
            refused.cancel()
            stuck.append(call)
        assert await refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(stuck) >= 2
        with pytest.raises(grpc.aio.AioRpcError):
            while await stuck[0].read() is not grpc.aio.EOF:
                pass
        for call in stuck[1:]:
            call.cancel()
        while True:  # until the server has heard of it
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await channel.unary_stream(_METHOD)(b"").read() == _PART
                break


async def test_a_client_that_reads_keeps_its_call_while_another_stalls() -> None:
    async with chatting(1.0) as (server, channel):
        reading = channel.unary_stream(_METHOD)(b"")
        silent = channel.unary_stream(_METHOD)(b"")

        async def read() -> None:
            while await reading.read() is not grpc.aio.EOF:
                pass

        reader = asyncio.create_task(read())
        assert isinstance(await asyncio.wait_for(server.ended.get(), 30), StalledStreamError)
        assert not reader.done()
        reader.cancel()
        reading.cancel()
        silent.cancel()


async def test_a_cancel_from_elsewhere_stays_a_cancel() -> None:
    async with chatting(_LONG_S) as (server, channel):
        call = channel.unary_stream(_METHOD)(b"")
        await call.read()
        call.cancel()
        assert isinstance(await asyncio.wait_for(server.ended.get(), 30), asyncio.CancelledError)


class Context:
    """A client that takes a message when it may."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()

    async def write(self, _message: object) -> None:
        await self.may_take.wait()


async def test_a_process_that_got_no_cpu_blames_no_client() -> None:
    context, loop = Context(), asyncio.get_running_loop()
    with StalledCalls(_VERY_SHORT_S).watch(context) as call:  # type: ignore[arg-type]
        loop.call_soon(time.sleep, 2 * _VERY_SHORT_S)
        # In the turn after the one in which timers run that were due meanwhile.
        loop.call_soon(loop.call_soon, loop.call_soon, context.may_take.set)
        await call.write(b"")
    assert not call.is_stalled


class Quiet:
    """A call's context whose client sends ``first``, or nothing."""

    def __init__(self, first: object = None) -> None:
        self._first = first

    async def read(self) -> object:
        if self._first is None:
            await asyncio.Event().wait()
        return self._first


async def test_a_first_message_has_a_bound_of_time_and_one_timer_for_all() -> None:
    stalled = StalledCalls(_VERY_SHORT_S)
    async with asyncio.timeout(30):
        assert await stalled.read_first(Quiet(b"hello")) == b"hello"  # type: ignore[arg-type]
        silent = [asyncio.create_task(stalled.read_first(Quiet())) for _ in range(1_000)]  # type: ignore[arg-type]
        ended = await asyncio.gather(*silent, return_exceptions=True)
    assert all(isinstance(error, RequestTimeoutError) for error in ended)
    assert not stalled._unsaid


async def test_a_cancelled_wait_for_a_first_message_is_cancelled() -> None:
    stalled = StalledCalls(_LONG_S)
    waiting = asyncio.create_task(stalled.read_first(Quiet()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not stalled._unsaid
