"""The clients of the bare relay of requests: a closed loop of them, in one process."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import StrEnum

import grpc

from benchmarks.bare_processes import BareCall, BareJob, method_path
from benchmarks.relay_job import Way
from benchmarks.request_floor_messages import MARK, make_start_bytes
from quartet.rpc.channels import create_channel


class Method(StrEnum):
    """What is called: the first three of the router, the last of the worker."""

    GENERATE = "Generate"
    SESSION = "Session"
    PLACE = "Place"
    WORK = "Work"


async def run_clients(job: BareJob) -> None:
    """Ask until cancelled; it fails with the first request that does."""
    async with (
        create_channel(job.router_address, None) as router,
        create_channel(job.worker_address, None) as worker,
        asyncio.TaskGroup() as group,
    ):
        clients = _Clients(job, router, worker)
        if clients.shared is not None:
            group.create_task(clients.shared.read())
        for _ in range(job.count):
            group.create_task(clients.run_one())


class _SharedStream:
    """One stream for the requests of all clients. Nobody reads whose an answer is: who waits longest has it."""

    def __init__(self, call: BareCall) -> None:
        self._call = call
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._waiting: deque[asyncio.Event] = deque()

    async def run(self, start: bytes) -> None:
        ended = asyncio.Event()
        async with self._writing:
            self._waiting.append(ended)
            await self._call.write(start)
        await ended.wait()

    async def read(self) -> None:
        while isinstance(message := await self._call.read(), bytes):
            for _ in range(message.count(MARK)):
                self._waiting.popleft().set()


class _Clients:
    """What all clients of the closed loop share; ``shared`` is a stream to the router or the worker, or ``None``."""

    def __init__(self, job: BareJob, router: grpc.aio.Channel, worker: grpc.aio.Channel) -> None:
        self._way = job.way
        self._start = make_start_bytes(job.num_prompt_tokens)
        self._generate_method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = router.stream_stream(
            method_path(Method.GENERATE)
        )
        self._place_method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = router.unary_unary(
            method_path(Method.PLACE)
        )
        self.shared: _SharedStream | None = None
        if job.way is not Way.GENERATE:
            channel, method = (router, Method.SESSION) if job.way is Way.SESSION else (worker, Method.WORK)
            self.shared = _SharedStream(channel.stream_stream(method_path(method))(wait_for_ready=True))

    async def run_one(self) -> None:
        """One client: a request, and when it has its end, the next."""
        while True:
            if self.shared is None:
                await self._generate()
            else:
                if self._way is not Way.SESSION:
                    await self._place_method(self._start, wait_for_ready=True)
                await self.shared.run(self._start)

    async def _generate(self) -> None:
        call: BareCall = self._generate_method(wait_for_ready=True)
        await call.write(self._start)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            continue
