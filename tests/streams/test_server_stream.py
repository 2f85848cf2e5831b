"""The server's end of any stream: how much it reads ahead of a caller that takes nothing."""

from __future__ import annotations

import asyncio

import grpc

from quartet.rpc.server import StalledCalls
from quartet.streams.base import ServerStream
from quartet.streams.read_pace import Account
from quartet.v1 import decode_pb2, types_pb2

WAIT_S = 30.0
MAX_OWED_ENDS = 3


class Ends:
    """Ends that are not written yet."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.has_some = asyncio.Event()


class Refusing(ServerStream[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]):
    """Ends each request at once; a message takes all ends along."""

    def __init__(self, account: Account | None = None) -> None:
        self.ends = Ends()
        self.num_handled = 0
        super().__init__(self.ends, StalledCalls(WAIT_S), account, max_owed_ends=MAX_OWED_ENDS)

    def _handle(self, request: decode_pb2.DecodeRequest, group: asyncio.TaskGroup) -> None:
        self.num_handled += 1
        self.ends.num_ended += 1
        self.ends.has_some.set()

    def _half_closed(self) -> None:
        self.ends.has_some.set()

    async def _next(self) -> decode_pb2.DecodeResponse | None:
        await self.ends.has_some.wait()
        if self._is_half_closed and not self.ends.num_ended:
            return None
        self.ends.num_ended = 0
        if not self._is_half_closed:
            self.ends.has_some.clear()
        return decode_pb2.DecodeResponse()

    async def _end(self) -> None:
        return


class Caller:
    """Sends cancels without end, and takes messages as it may."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.num_taken = 0
        self.may_take = asyncio.Semaphore(0)

    async def send_initial_metadata(self, _metadata: object) -> None:
        return

    async def read(self) -> object:
        if not self.num_requests:
            return grpc.aio.EOF
        self.num_requests -= 1
        return decode_pb2.DecodeRequest(cancel=types_pb2.Cancel())

    async def write(self, _message: object) -> None:
        await self.may_take.acquire()
        self.num_taken += 1


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_nothing_is_read_while_too_many_ends_wait_and_reading_goes_on_once_they_are_written() -> None:
    stream, caller = Refusing(), Caller(num_requests=20)
    serving = asyncio.create_task(stream.serve(caller))  # type: ignore[arg-type]
    await settle()
    assert stream.ends.num_ended == MAX_OWED_ENDS + 1
    num_handled = stream.num_handled
    caller.may_take.release()
    await settle()
    assert num_handled < stream.num_handled < 20
    for _ in range(20):
        caller.may_take.release()
    async with asyncio.timeout(WAIT_S):
        await serving
    assert stream.num_handled == 20
