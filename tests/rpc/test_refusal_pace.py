"""Who sends messages that are too large waits for the refusals, for longer the more come."""

from __future__ import annotations

import grpc
import pytest

from quartet.errors import MessageTooLargeError
from quartet.rpc import refusal_pace
from quartet.rpc.channels import create_channel
from quartet.rpc.refusal_pace import RefusalPace
from quartet.v1 import worker_pb2, worker_pb2_grpc
from tests.rpc.conftest import StartServer
from tests.rpc.test_interceptors import Worker, worker_service

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


def refusal(size_bytes: int) -> MessageTooLargeError:
    error = MessageTooLargeError("too large")
    error.size_bytes = size_bytes
    return error


async def test_the_first_is_refused_at_once_and_many_at_sixteen_mib_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for _ in range(6):
        await pace.wait(refusal(12 * _MIB))
    assert clock.slept == [0.5, 1.25, 2.0, 2.75, 3.5]
    clock.now += 10.0
    clock.slept.clear()
    await pace.wait(refusal(12 * _MIB))
    assert not clock.slept


async def test_nobody_waits_longer_than_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace()
    for _ in range(10):
        await pace.wait(refusal(60 * _MIB))
    assert max(clock.slept) == 5.0
    clock.now += 6.0
    clock.slept.clear()
    await pace.wait(refusal(_MIB))
    assert not clock.slept


async def test_a_message_is_let_go_before_its_sender_waits() -> None:
    message = b"x" * 1000
    try:
        held = message * 1000
        raise refusal(len(held))
    except MessageTooLargeError as error:
        await RefusalPace().wait(error)
        assert error.__traceback__ is None


async def test_a_call_waits_for_its_refusal_by_the_size_of_what_it_sent(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def wait(_pace: RefusalPace, error: MessageTooLargeError) -> None:
        sizes.append(error.size_bytes)

    monkeypatch.setattr(RefusalPace, "wait", wait)
    _, address = await start_server([worker_service(Worker(None))])
    async with create_channel(address, None) as channel:
        request = worker_pb2.GetModelFilesRequest(names=["x"] * 40_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sizes == [request.ByteSize()]
