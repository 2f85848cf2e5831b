"""What every call passes: errors become statuses whatever shape the handler has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import (
    DrainingError,
    HandOffNotFoundError,
    InvalidRequestError,
    ProtocolError,
    QueueFullError,
    ServingError,
)
from quartet.rpc.channels import create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import Service
from quartet.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.rpc.conftest import StartServer
from tests.rpc.services import generic_service

Context = Any


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Unary and yielding handlers that fail as configured."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.closed = asyncio.Event()
        self.is_cancelled = False

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.GetInfoResponse:
        if self.error is not None:
            raise self.error
        return worker_pb2.GetInfoResponse()

    async def GetModelFiles(
        self, request: worker_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetModelFilesResponse]:
        try:
            yield worker_pb2.GetModelFilesResponse(data=b"1")
            if self.error is not None:
                raise self.error
            while True:
                yield worker_pb2.GetModelFilesResponse(data=b"x" * 60_000)
        except (asyncio.CancelledError, GeneratorExit):
            self.is_cancelled = True
            raise
        finally:
            self.closed.set()


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """A handler that reads and writes through its context."""

    async def Decode(self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Context) -> None:
        await context.write(decode_pb2.DecodeResponse(slots=[1]))
        while (request := await context.read()) is not grpc.aio.EOF:
            raise InvalidRequestError("no such slot", field=f"slot.{request.cancel.slot}")


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A handler that iterates over its requests and yields."""

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async for request in request_iterator:
            if request.HasField("cancel"):
                raise QueueFullError("full", retry_delay_s=2)
            yield prefill_pb2.PrefillResponse()


def worker_service(worker: Worker) -> Service:
    return Service(
        "quartet.v1.WorkerService", lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    )


def stream_services() -> list[Service]:
    return [
        Service(
            "quartet.v1.DecodeService",
            lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(), server),
        ),
        Service(
            "quartet.v1.PrefillService",
            lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Prefill(), server),
        ),
    ]


async def test_a_unary_handler_answers(start_server: StartServer) -> None:
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        assert await stub.GetInfo(worker_pb2.GetInfoRequest()) == worker_pb2.GetInfoResponse()


async def test_a_unary_handlers_error_becomes_its_status(start_server: StartServer) -> None:
    _, address = await start_server([worker_service(Worker(QueueFullError("full", retry_delay_s=2)))])
    async with create_channel(address, None) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(worker_pb2.GetInfoRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(caught.value)
    assert isinstance(error, QueueFullError)
    assert error.retry_delay_s == 2


async def test_an_unexpected_error_leaks_nothing(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    _, address = await start_server([worker_service(Worker(RuntimeError("a secret path")))])
    async with create_channel(address, None) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(worker_pb2.GetInfoRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "a secret path" in caplog.text


async def test_a_write_to_a_client_that_has_gone_is_no_error_of_ours(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(grpc.aio.InternalError("as gRPC fails such a write"))
    server, address = await start_server([worker_service(worker)])
    async with create_channel(address, None) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest())
        await call.read()
        await worker.closed.wait()
        call.cancel()
        await server.drain(30)  # returns after the last call
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_error_that_a_client_is_too_late_for_holds_up_no_drain(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(Worker):
        async def GetModelFiles(
            self, request: worker_pb2.GetModelFilesRequest, context: Context
        ) -> AsyncIterator[worker_pb2.GetModelFilesResponse]:
            yield worker_pb2.GetModelFilesResponse(data=b"1")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise DrainingError("the worker is going away") from None

    monkeypatch.setattr("quartet.rpc.server._CANCEL_FOLLOWS_S", 3600)
    server, address = await start_server([worker_service(Leaving(None))])
    async with create_channel(address, None) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest())
        await call.read()
        call.cancel()
        await server.drain(30)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_method_of_a_standard_service_that_is_left_out_is_unimplemented(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_yielding_handlers_error_comes_after_what_it_yielded(start_server: StartServer) -> None:
    worker = Worker(HandOffNotFoundError("gone"))
    _, address = await start_server([worker_service(worker)])
    async with create_channel(address, None) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest())
        assert (await call.read()).data == b"1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(from_rpc_error(caught.value), HandOffNotFoundError)
    assert worker.closed.is_set()


async def test_a_writing_handlers_error_comes_after_what_it_wrote(start_server: StartServer) -> None:
    _, address = await start_server(stream_services())
    async with create_channel(address, None) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
        assert list((await call.read()).slots) == [1]
        await call.write(decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=7)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "slot.7"


async def test_an_iterating_handlers_error_becomes_its_status(start_server: StartServer) -> None:
    _, address = await start_server(stream_services())
    async with create_channel(address, None) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill()
        await call.write(prefill_pb2.PrefillRequest())
        assert await call.read() == prefill_pb2.PrefillResponse()
        await call.write(prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(from_rpc_error(caught.value), QueueFullError)


@pytest.mark.parametrize(
    "method", ["/quartet.v1.DecodeService/Decode", "/quartet.v1.PrefillService/Prefill"], ids=["reads", "iterates"]
)
async def test_a_malformed_message_on_a_stream_is_the_callers_fault(start_server: StartServer, method: str) -> None:
    _, address = await start_server(stream_services())
    async with create_channel(address, None) as channel:
        call = channel.stream_stream(method)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(from_rpc_error(caught.value), ProtocolError)


async def test_a_malformed_unary_request_is_the_callers_fault(start_server: StartServer) -> None:
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/quartet.v1.WorkerService/GetModelFiles")(b"\xff\xff")
        assert isinstance(from_rpc_error(caught.value), ProtocolError)
        assert await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest()) is not None


@pytest.mark.parametrize("method", ["GetInfo", "GetModelFiles"])
async def test_a_unary_call_without_a_request_ends(start_server: StartServer, method: str) -> None:
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        call = channel.stream_stream(f"/quartet.v1.WorkerService/{method}")()
        await call.done_writing()
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_generator_is_closed_when_its_caller_goes(start_server: StartServer) -> None:
    worker = Worker(None)
    _, address = await start_server([worker_service(worker)])
    async with create_channel(address, None) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest())
        await call.read()
        call.cancel()
        async with asyncio.timeout(30):
            await worker.closed.wait()
    assert worker.is_cancelled


async def test_raw_handlers_get_and_give_bytes(start_server: StartServer) -> None:
    async def pull(requests: AsyncIterator[bytes], context: Context) -> None:
        async for request in requests:
            if request == b"bad":
                raise HandOffNotFoundError("no such hand-off")
            await context.write(request[::-1])

    handlers = {"Pull": grpc.stream_stream_rpc_method_handler(pull)}
    _, address = await start_server([generic_service("quartet.v1.TransferService", handlers)])
    async with create_channel(address, None) as channel:
        call = channel.stream_stream("/quartet.v1.TransferService/Pull")()
        await call.write(b"abc")
        assert await call.read() == b"cba"
        await call.write(b"bad")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(from_rpc_error(caught.value), HandOffNotFoundError)


async def test_a_handler_that_collects_a_stream_answers_once(start_server: StartServer) -> None:
    async def count(requests: AsyncIterator[bytes], context: Context) -> bytes:
        return b"%d" % len([request async for request in requests])

    handlers = {"Count": grpc.stream_unary_rpc_method_handler(count)}
    _, address = await start_server([generic_service("test.Service", handlers)])
    async with create_channel(address, None) as channel:
        assert await channel.stream_unary("/test.Service/Count")(iter([b"a", b"b"])) == b"2"


async def test_a_handlers_own_abort_is_left_as_it_is(start_server: StartServer) -> None:
    async def refuse(request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "its own words")
        raise AssertionError

    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    _, address = await start_server([generic_service("test.Service", handlers)])
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Refuse")(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "its own words")


async def test_an_unknown_method_is_unimplemented(start_server: StartServer) -> None:
    _, address = await start_server(stream_services())
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/quartet.v1.DecodeService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(from_rpc_error(caught.value), ServingError)
