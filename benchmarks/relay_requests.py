"""A closed loop of requests with one token out: the cost of a request, whatever the length of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from benchmarks.paced_clock import MAX_STREAMS
from benchmarks.relay_load import Job, Opened, Tally, Way, describe, describe_failure, make_start, signed_request
from quartet.rpc.channels import create_channel
from quartet.v1 import decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc

_OPEN_TIMEOUT_S = 30.0

_SLOT_RESPONSES = (router_pb2.SessionResponse, decode_pb2.DecodeResponse)

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


class RequestFailedError(Exception):
    """A request ended badly; the message says how."""


class SlotStream:
    """One stream with many short requests, each in its own slot: a Session, or a Decode stream."""

    def __init__(self, call: _Call) -> None:
        """Over ``call``, which was just opened."""
        self._call = call
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._reader = asyncio.create_task(self._read())

    async def run(self, slot: int, message: router_pb2.SessionRequest | decode_pb2.DecodeRequest) -> None:
        """Send the start ``message``, of ``slot``, and wait for its end. Raises ``RequestFailedError``."""
        ended = self._ended[slot] = asyncio.get_running_loop().create_future()
        async with self._writing:
            with contextlib.suppress(asyncio.InvalidStateError):  # the stream is over: the reader gets the error
                await self._call.write(message)
        await ended

    async def _read(self) -> None:
        try:
            while isinstance(response := await self._call.read(), _SLOT_RESPONSES):
                for item in response.finished:
                    self._ended.pop(item.slot).set_result(None)
                for failed in response.failures:
                    error = RequestFailedError(describe_failure(failed.failure))
                    self._ended.pop(failed.slot).set_exception(error)
        except grpc.aio.AioRpcError as error:
            for ended in self._ended.values():
                ended.set_exception(error)
                ended.exception()  # some clients do not wait for it

    async def close(self) -> None:
        """Drop the stream."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class RequestLoad:
    """The closed loop of one job, from ``open`` to ``close``."""

    def __init__(self, job: Job, tally: Tally) -> None:
        """Open nothing yet; ``tally`` will count the requests."""
        self._job = job
        self._tally = tally
        self._rng = random.Random(job.first_seed)
        self._first_ended = asyncio.Event()
        self._is_running = asyncio.Event()
        self._is_running.set()
        self._clients: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []
        self._router = router_pb2_grpc.RouterServiceStub(self._channel(job.router_address))
        self._slots: SlotStream | None = None

    async def open(self) -> Opened:
        """Start the clients, and wait until a request has ended, well or badly."""
        began = time.monotonic()
        request = self._way()
        self._clients = [asyncio.create_task(self._client(slot, request)) for slot in range(self._job.count)]
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            await self._first_ended.wait()
        return Opened(duration_s=time.monotonic() - began, errors=dict(self._tally.errors))

    def set_paused(self, is_paused: bool) -> None:
        """If ``is_paused``, clients send no new requests; those already sent end normally."""
        if is_paused:
            self._is_running.clear()
        else:
            self._is_running.set()

    async def close(self) -> None:
        """End the clients."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        if self._slots is not None:
            await self._slots.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _way(self) -> Callable[[int], Awaitable[None]]:
        if self._job.way is Way.GENERATE:
            return self._generate
        return self._session if self._job.way is Way.SESSION else self._place

    async def _client(self, slot: int, request: Callable[[int], Awaitable[None]]) -> None:
        """Run one client of the loop; it stops at its first failure, because no request here may fail."""
        try:
            while True:
                await self._is_running.wait()
                await request(slot)
                self._tally.request(1)
                self._first_ended.set()
        except RequestFailedError as error:
            self._tally.failed(str(error))
        except grpc.aio.AioRpcError as error:
            self._tally.failed(describe(error))
        self._first_ended.set()

    async def _generate(self, _slot: int) -> None:
        call: _Call = self._router.Generate()
        await call.write(router_pb2.GenerateRequest(start=self._start()))
        await call.done_writing()
        is_finished = False
        while isinstance(response := await call.read(), router_pb2.GenerateResponse):
            is_finished = is_finished or response.HasField("finished")
        if not is_finished:
            raise RequestFailedError("cut short")

    async def _session(self, slot: int) -> None:
        if self._slots is None:
            self._slots = SlotStream(self._router.Session())
        start = router_pb2.SessionStart(slot=slot, start=self._start())
        await self._slots.run(slot, router_pb2.SessionRequest(start=start))

    async def _place(self, slot: int) -> None:
        """Have the router place a request, then send it on one Decode stream, as clients do."""
        response = await self._router.Place(router_pb2.PlaceRequest(start=self._start()))
        placed = response.choices[0].stream
        if self._slots is None:
            self._slots = SlotStream(decode_pb2_grpc.DecodeServiceStub(self._channel(placed.address)).Decode())
        await self._slots.run(slot, signed_request(placed, slot))

    def _start(self) -> router_pb2.GenerateStart:
        return make_start(
            self._rng,
            seed=MAX_STREAMS,  # no client asks when its token was made
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_output_tokens=1,
            with_text=self._job.with_text,
        )

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = create_channel(address, None)
        self._channels.append(channel)
        return channel
