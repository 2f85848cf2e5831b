"""Who sends messages that are refused waits for the refusals, and to be read again, for longer the more come."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quartet.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    QueueFullError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.rpc import refusal_pace
from quartet.rpc.channels import create_channel
from quartet.rpc.refusal_pace import RefusalPace
from quartet.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.rpc.conftest import StartServer
from tests.rpc.test_interceptors import Worker, stream_services, worker_service

_MIB = 1 << 20


class Clock:
    """Time that only ``pass_s`` moves; sleeps are noted and end at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(refusal_pace, "time", self)
        monkeypatch.setattr(refusal_pace, "asyncio", self)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)


async def refuse(pace: RefusalPace, size_bytes: int, peer: str = "a", measure_s: float = 0.0) -> None:
    await pace.wait(peer, MessageTooLargeError("too large"), size_bytes, measure_s)


async def test_the_first_is_refused_at_once_and_many_at_five_mib_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for _ in range(6):
        await refuse(pace, 12 * _MIB)
    assert clock.slept == pytest.approx([1.8, 4.2, 6.6, 9.0, 11.4])
    clock.now += 15.0
    clock.slept.clear()
    await refuse(pace, 12 * _MIB)
    assert not clock.slept


async def test_nobody_waits_longer_than_fifteen_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for _ in range(10):
        await refuse(pace, 60 * _MIB)
    assert max(clock.slept) == 15.0
    clock.now += 18.0
    clock.slept.clear()
    await refuse(pace, _MIB)
    assert not clock.slept


async def test_a_message_is_let_go_before_its_sender_waits() -> None:
    message = b"x" * 1000
    try:
        held = message * 1000
        raise MessageTooLargeError(f"{len(held)} bytes")
    except MessageTooLargeError as error:
        await RefusalPace().wait("a", error, len(message))
        assert error.__traceback__ is None


async def test_what_it_takes_to_measure_a_message_is_paid_like_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for _ in range(3):
        await refuse(pace, 0, measure_s=0.02)
    assert clock.slept == pytest.approx([0.2, 3.4, 6.6])


async def test_a_connection_is_not_read_until_it_has_paid_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    assert not pace
    await refuse(pace, 12 * _MIB)
    await pace.wait_to_read("a")
    assert pace
    assert not clock.slept, "one by mistake costs no wait"
    await refuse(pace, 12 * _MIB)
    clock.slept.clear()
    await pace.wait_to_read("b")
    assert not clock.slept
    await pace.wait_to_read("a")
    assert clock.slept == pytest.approx([1.8])
    clock.now += 2.0
    await pace.wait_to_read("a")
    assert len(clock.slept) == 1


async def test_connections_that_have_to_pay_share_what_refusals_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for peer in ("a", "b", "c", "a"):
        await refuse(pace, 12 * _MIB, peer)
    clock.slept.clear()
    await pace.wait_to_read("a")
    assert clock.slept == pytest.approx([2.4 + 3 * 2.4 - 3.0])


async def test_few_calls_of_a_connection_wait_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = RefusalPace()
    with monkeypatch.context() as patch:
        Clock(patch)
        for _ in range(5):
            await refuse(pace, 60 * _MIB)
        now = refusal_pace.time.monotonic()
    monkeypatch.setattr(refusal_pace.time, "monotonic", lambda: now)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(pace.wait_to_read("a")) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="64 calls of this connection wait"):
            await pace.wait_to_read("a")
        for task in waiting:
            task.cancel()
    for task in waiting:
        assert task.cancelled()
    waiting = [asyncio.create_task(pace.wait_to_read("a"))]
    await asyncio.sleep(0)
    assert not waiting[0].done(), "those that have gone leave room"
    waiting[0].cancel()


async def test_connections_that_have_paid_are_forgotten_and_nobody_pays_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for number in range(500):
        await refuse(pace, _MIB, f"peer {number}")
    clock.now += 18.0
    clock.slept.clear()
    await refuse(pace, _MIB)
    await pace.wait_to_read("a")
    assert not clock.slept
    assert list(pace._paid_at) == ["a"]


@pytest.mark.parametrize("method", ["GetModelFiles", "Decode"])
async def test_a_call_waits_for_its_refusal_by_the_size_of_what_it_sent(
    method: str, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def wait(_pace: RefusalPace, _peer: str, _error: Exception, size_bytes: int, _measure_s: float) -> None:
        sizes.append(size_bytes)

    monkeypatch.setattr(RefusalPace, "wait", wait)
    _, address = await start_server([worker_service(Worker(None)), *stream_services()])
    request: Any
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "Decode":  # it reads its stream itself, and refuses what was within the limits
                request = decode_pb2.DecodeRequest(chunk=types_pb2.StartChunk(data=bytes(300 << 10)))
                call = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
                await call.write(request)
                await call.read()
                await call.read()
            else:
                request = worker_pb2.GetModelFilesRequest(names=["x"] * 100_000)
                await worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sizes == [request.ByteSize()]


@pytest.mark.parametrize(
    ("error", "num_waits"), [(InvalidRequestError("wrong"), 1), (WorkerUnavailableError("gone"), 0)]
)
async def test_nobody_waits_for_a_failure_that_is_not_the_clients(
    error: ServingError, num_waits: int, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def wait(_pace: RefusalPace, _peer: str, _error: Exception, size_bytes: int, _measure_s: float) -> None:
        sizes.append(size_bytes)

    monkeypatch.setattr(RefusalPace, "wait", wait)
    _, address = await start_server([worker_service(Worker(error))])
    request = worker_pb2.GetModelFilesRequest(names=["x" * (300 << 10)])
    async with create_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(request):
                pass
    assert sizes == [request.ByteSize()] * num_waits


async def test_a_call_after_a_refused_one_is_not_read_before_that_is_paid(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    async def wait_to_read(_pace: RefusalPace, peer: str) -> None:
        waited.append(peer)

    monkeypatch.setattr(RefusalPace, "wait_to_read", wait_to_read)
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        malformed = channel.unary_stream("/quartet.v1.WorkerService/GetModelFiles")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await malformed(b"\x0a\xff" + b"\x01" * (300 << 10)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not waited
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetModelFiles(worker_pb2.GetModelFilesRequest(names=["x"] * 100_000)).read()
    assert len(waited) == 2
    assert len(set(waited)) == 1
