"""The load of the relay benchmarks: jobs for client processes, and streams of endless answers, in each of the ways.

A client gets its ``Job`` and then ``Command``s, and answers with ``Opened`` and ``Window``s: lines of JSON over its
standard input and output. It uses raw stubs, and ``Tally`` does little work for each token, so the load costs little
compared to what it measures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import grpc

from benchmarks.paced_clock import MAX_STREAMS, PacedClock
from quartet.rpc.channels import create_channel
from quartet.v1 import decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

#: Output tokens of a stream: so many that it does not end while it is measured.
ENDLESS = 500_000
_MICROSECONDS = "i"
# The tiny model has 2048 ids; those below the first one here are special tokens.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_OFFER_TIMEOUT_S = 10.0
# The servers were built without this way, or not configured for it.
_ABSENT_CODES = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION})
_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
_NS_PER_US = 1_000
_OPEN_TIMEOUT_S = 60.0
_POLL_S = 0.005
_ENDED_EARLY = "the stream ended"


class Way(StrEnum):
    """How the client gets answers."""

    GENERATE = "generate"  # a Generate stream for each request
    SESSION = "session"  # all requests on one Session stream
    PLACE_PER_REQUEST = "place_per_request"  # the router places the request, then it has its own Decode stream
    PLACE_PER_CLIENT = "place_per_client"  # the router places the request, then one Decode stream carries all


class Load(StrEnum):
    """What clients ask for."""

    STREAMS = "streams"  # answers that don't end while they are measured
    REQUESTS = "requests"  # a closed loop of requests with one token out


class Command(StrEnum):
    """What a client can be told after its job."""

    BEGIN = "begin"  # count from now on
    END = "end"  # tell what was counted
    PAUSE = "pause"  # send no new requests
    RESUME = "resume"  # send requests again
    QUIT = "quit"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's part of a load.

    Attributes:
        clock_path: file of the engine's ``PacedClock``.
        count: streams, or clients of the closed loop.
        first_seed: seed of its first request; the streams of all clients together have different seeds.
        num_opening: requests that are opened at the same time.
        num_sessions: Session or Decode streams over which the requests are spread, if many share one.
        num_output_tokens: output tokens of each stream; a request of the closed loop has one.
    """

    router_address: str
    clock_path: str
    way: Way
    load: Load = Load.STREAMS
    count: int
    first_seed: int = 0
    num_opening: int = 64
    num_sessions: int = 1
    num_prompt_tokens: int = 16
    num_output_tokens: int = ENDLESS
    with_text: bool = False


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Whether the load runs, or why it does not.

    Attributes:
        duration_s: until all streams ran, or one request of a closed loop had ended.
        errors: requests that failed, by error message.
        absent: the servers' message if they do not offer this way at all.
    """

    duration_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    absent: str | None = None


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a client counted.

    Attributes:
        num_messages: messages that held tokens.
        cpu_s: CPU seconds of the client.
        errors: requests that failed.
        latencies_us: of each token: from when the engine emitted it until the client had parsed its message.
    """

    duration_s: float
    num_tokens: int
    num_messages: int
    num_requests: int
    cpu_s: float
    errors: Mapping[str, int]
    latencies_us: array[int] = field(repr=False)

    def encode(self) -> str:
        """As a line of JSON."""
        values = asdict(self) | {"latencies_us": base64.b64encode(self.latencies_us.tobytes()).decode("ascii")}
        return json.dumps(values)

    @classmethod
    def decode(cls, line: str | bytes) -> Window:
        """From a line of JSON."""
        values = json.loads(line)
        latencies_us = new_latencies()
        latencies_us.frombytes(base64.b64decode(values.pop("latencies_us")))
        return cls(latencies_us=latencies_us, **values)


def new_latencies() -> array[int]:
    """An empty list of whole microseconds."""
    return array(_MICROSECONDS)


def encode_job(job: Job) -> str:
    """As a line of JSON."""
    return json.dumps(asdict(job))


def decode_job(line: str | bytes) -> Job:
    """From a line of JSON."""
    values = json.loads(line)
    return Job(**values | {"way": Way(values["way"]), "load": Load(values["load"])})


def make_start(
    rng: random.Random, *, seed: int, num_prompt_tokens: int, num_output_tokens: int, with_text: bool
) -> router_pb2.GenerateStart:
    """A start with a prompt of random token ids, so that no two share a prefix."""
    ids = rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_prompt_tokens)
    return router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=ids),
        sampling=types_pb2.Sampling(max_tokens=num_output_tokens, ignore_eos=True),
        seed=seed,
        text_options=router_pb2.TextOptions(omit_text=not with_text),
    )


def signed_request(placed: router_pb2.SignedPlacement, slot: int) -> decode_pb2.DecodeRequest:
    """The start that the router signed, as a request to the decode worker."""
    start = decode_pb2.SignedDecodeStart(
        slot=slot, signed_start=placed.signed_start, key_id=placed.key_id, mac=placed.mac
    )
    return decode_pb2.DecodeRequest(signed_start=start)


def describe(error: grpc.aio.AioRpcError) -> str:
    """Its status and message, on one line."""
    return f"{error.code().name}: {error.details()}"


def describe_failure(failure: types_pb2.Failure) -> str:
    """Its reason and message, on one line."""
    return f"{failure.reason}: {failure.message}"


async def find_absence(job: Job) -> str | None:
    """The router's message if it does not offer the job's way; ``None`` if it does.

    Raises:
        grpc.aio.AioRpcError: the call failed in any other way.
    """
    async with create_channel(job.router_address, None) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        try:
            if job.way is Way.SESSION:
                call: _Call = router.Session(timeout=_OFFER_TIMEOUT_S)
                await call.done_writing()
                await call.read()
            elif job.way is not Way.GENERATE:
                # No client uses the placement; it ends by itself.
                await router.Place(_place(), timeout=_OFFER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _ABSENT_CODES:
                raise
            return describe(error)
    return None


class Tally:
    """Counts since the last ``begin``.

    Attributes:
        num_waiting: streams that do not run yet.
        errors: requests that failed, by error message.
    """

    def __init__(self, clock: PacedClock) -> None:
        self.num_waiting = 0
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start counting from zero, but keep all errors."""
        self._began_at, self._began_cpu_s = time.monotonic(), time.process_time()
        self._num_tokens = self._num_messages = self._num_requests = 0
        self._latencies_us = new_latencies()

    def read(self) -> Window:
        """The counts."""
        return Window(
            duration_s=time.monotonic() - self._began_at,
            num_tokens=self._num_tokens,
            num_messages=self._num_messages,
            num_requests=self._num_requests,
            cpu_s=time.process_time() - self._began_cpu_s,
            errors=dict(self.errors),
            latencies_us=self._latencies_us,
        )

    def message(self) -> int:
        """Count a message with tokens; returns the time, for ``tokens``."""
        self._num_messages += 1
        return time.monotonic_ns()

    def tokens(self, seed: int, offset: int, num_tokens: int, now_ns: int) -> None:
        """Count the message's tokens of the request ``seed``; the first is output token number ``offset``."""
        self._num_tokens += num_tokens
        for number in range(offset, offset + num_tokens):
            self._latencies_us.append((now_ns - self._clock.made_at_ns(seed, number)) // _NS_PER_US)

    def request(self, num_tokens: int) -> None:
        """Count a request that ended well."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def failed(self, why: str) -> None:
        """Count a request that failed."""
        self.errors[why] += 1


class StreamLoad:
    """The streams of one job, from ``open`` to ``close``."""

    def __init__(self, job: Job, tally: Tally) -> None:
        """Open nothing yet; ``tally`` will count the tokens."""
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
        """Drop all streams; this ends their requests."""
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
        call: _Call = self._decode_stub(placements[0]).Decode()  # there is only one worker
        await self._share(call, seeds, [signed_request(placed, slot) for slot, placed in enumerate(placements)])

    async def _share(self, call: _Call, seeds: range, starts: Sequence[object]) -> None:
        """Send ``starts``, of ``seeds``, in slots from 0 on, and read the stream to its end."""
        reading = asyncio.create_task(self._read_columns(call, dict(enumerate(seeds))))
        try:
            for start in starts:
                await call.write(start)
            await reading
        finally:
            reading.cancel()

    async def _read_columns(self, call: _Call, seeds: dict[int, int]) -> None:
        """Read a Session or Decode stream on which the requests ``seeds`` have slots."""
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


def _place() -> router_pb2.PlaceRequest:
    start = make_start(random.Random(0), seed=MAX_STREAMS, num_prompt_tokens=1, num_output_tokens=1, with_text=False)
    return router_pb2.PlaceRequest(start=start)


def _count_begun(response: router_pb2.SessionResponse | decode_pb2.DecodeResponse) -> int:
    if isinstance(response, router_pb2.SessionResponse):
        return len(response.accepted)
    return len(response.started)
