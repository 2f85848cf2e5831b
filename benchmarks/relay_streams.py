"""Many endless answers to one client, each of the ways; raw stubs, to cost little beside what is measured."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import grpc

from benchmarks.relay_job import Job, Opened, Way
from benchmarks.relay_messages import describe, describe_failure, make_start, signed_request
from benchmarks.relay_tally import Tally
from quartet.rpc.channels import create_channel
from quartet.v1 import decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc

_OPEN_TIMEOUT_S = 60.0
_POLL_S = 0.005
_ENDED_EARLY = "the stream ended"

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


class StreamLoad:
    """The streams of one job, from ``open`` to ``close``."""

    def __init__(self, job: Job, tally: Tally) -> None:
        """Nothing is opened yet; tokens are counted in ``tally``."""
        self._job = job
        self._tally = tally
        self._opening = asyncio.Semaphore(job.num_opening)
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._router = router_pb2_grpc.RouterServiceStub(self._channel(job.router_address))

    async def open(self) -> Opened:
        """Open all, and wait until each runs, has failed, or has taken too long."""
        began = time.monotonic()
        self._tally.num_waiting = self._job.count
        seeds = range(self._job.first_seed, self._job.first_seed + self._job.count)
        for work in self._works(seeds):
            self._tasks.append(asyncio.create_task(self._watch(work)))
        while self._tally.num_waiting > 0 and not all(task.done() for task in self._tasks):
            await asyncio.sleep(_POLL_S)
            if time.monotonic() - began > _OPEN_TIMEOUT_S:
                self._tally.failed(f"{self._tally.num_waiting} did not begin within {_OPEN_TIMEOUT_S:g} s")
                break
        return Opened(duration_s=time.monotonic() - began, errors=dict(self._tally.errors))

    async def close(self) -> None:
        """Drop all streams, which ends their requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _works(self, seeds: range) -> list[Coroutine[None, None, None]]:
        job = self._job
        if job.way is Way.GENERATE:
            return [self._generate(seed) for seed in seeds]
        if job.way is Way.PLACE_PER_REQUEST:
            return [self._decode_one(seed) for seed in seeds]
        share = self._session if job.way is Way.SESSION else self._decode_many
        return [share(seeds[number :: job.num_sessions]) for number in range(job.num_sessions)]

    async def _watch(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except grpc.aio.AioRpcError as error:
            self._tally.failed(describe(error))
        else:
            self._tally.failed(_ENDED_EARLY)

    async def _generate(self, seed: int) -> None:
        tally = self._tally
        async with self._opening:
            call: _Call = self._router.Generate()
            await call.write(router_pb2.GenerateRequest(start=self._start(seed)))
            await call.done_writing()
            if isinstance(await call.read(), router_pb2.GenerateResponse):
                tally.num_waiting -= 1  # accepted
        while isinstance(response := await call.read(), router_pb2.GenerateResponse):
            if num_tokens := len(response.delta.token_ids):
                tally.tokens(seed, response.delta.token_offset, num_tokens, tally.message())

    async def _session(self, seeds: range) -> None:
        call: _Call = self._router.Session()
        starts = [router_pb2.SessionStart(slot=slot, start=self._start(seed)) for slot, seed in enumerate(seeds)]
        await self._share(call, seeds, [router_pb2.SessionRequest(start=start) for start in starts])

    async def _decode_one(self, seed: int) -> None:
        async with self._opening:
            placed = await self._place(seed)
            call: _Call = self._decode_stub(placed).Decode()
            await call.write(signed_request(placed, 0))
            await call.done_writing()
        await self._read_columns(call, {0: seed})

    async def _decode_many(self, seeds: range) -> None:
        placements = await asyncio.gather(*map(self._place_in_turn, seeds))
        call: _Call = self._decode_stub(placements[0]).Decode()  # there is but one worker
        await self._share(call, seeds, [signed_request(placed, slot) for slot, placed in enumerate(placements)])

    async def _share(self, call: _Call, seeds: range, starts: Sequence[object]) -> None:
        """Send ``starts``, of ``seeds`` in slots from 0 on, and read the stream to its end."""
        reading = asyncio.create_task(self._read_columns(call, dict(enumerate(seeds))))
        try:
            for start in starts:
                await call.write(start)
            await reading
        finally:
            reading.cancel()

    async def _read_columns(self, call: _Call, seeds: dict[int, int]) -> None:
        """Read a Session or Decode stream, on which the requests ``seeds`` have slots."""
        tally = self._tally
        kinds = (router_pb2.SessionResponse, decode_pb2.DecodeResponse)
        while isinstance(response := await call.read(), kinds):
            tally.num_waiting -= _count_begun(response)
            if response.slots:
                now_ns = tally.message()
                columns = zip(response.slots, response.token_offsets, response.num_tokens, strict=True)
                for slot, offset, num_tokens in columns:
                    tally.tokens(seeds[slot], offset, num_tokens, now_ns)
            self._take_failures(response.failures)

    def _take_failures(self, failures: Iterable[router_pb2.SessionFailure | decode_pb2.SlotFailure]) -> None:
        for item in failures:
            self._tally.failed(describe_failure(item.failure))
            self._tally.num_waiting -= 1

    async def _place_in_turn(self, seed: int) -> router_pb2.SignedPlacement:
        async with self._opening:
            return await self._place(seed)

    async def _place(self, seed: int) -> router_pb2.SignedPlacement:
        response = await self._router.Place(router_pb2.PlaceRequest(start=self._start(seed)))
        return response.choices[0].stream

    def _decode_stub(self, placed: router_pb2.SignedPlacement) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return decode_pb2_grpc.DecodeServiceStub(self._channel(placed.address))

    def _start(self, seed: int) -> router_pb2.GenerateStart:
        return make_start(
            random.Random(seed),
            seed=seed,
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_output_tokens=self._job.num_output_tokens,
            with_text=self._job.with_text,
        )

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = create_channel(address, None)
        return self._channels[address]


def _count_begun(response: router_pb2.SessionResponse | decode_pb2.DecodeResponse) -> int:
    if isinstance(response, router_pb2.SessionResponse):
        return len(response.accepted)
    return len(response.started)
