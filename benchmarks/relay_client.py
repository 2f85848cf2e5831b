"""One process of load: it gets a job, makes its load, and counts on command (see ``benchmarks.relay_load``).

It uses raw stubs, and ``Tally`` does little work for each token, so the load costs little compared to what it measures.
``Requester`` sends requests by each of the ways. It reports what they do to a ``Listener``; each load has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import uvloop

from benchmarks.children import answer, orders
from benchmarks.paced_clock import MAX_STREAMS, PacedClock
from benchmarks.relay_http import HttpAsker, HttpFailedError, chat_body, completion_body, open_stream
from benchmarks.relay_load import (
    Command,
    Job,
    Load,
    Opened,
    Outcome,
    Way,
    Window,
    make_chat_start,
    make_chat_text,
    make_start,
)
from quartet.config import build
from quartet.rpc.channels import create_channel
from quartet.v1 import decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc

_OPEN_TIMEOUT_S, _FIRST_REQUEST_TIMEOUT_S = 60.0, 30.0
_POLL_S = 0.005
_NS_PER_US = 1_000
_ENDED_EARLY = "the stream ended"

_SLOT_RESPONSES = (router_pb2.SessionResponse, decode_pb2.DecodeResponse)
_SlotRequest: TypeAlias = router_pb2.SessionRequest | decode_pb2.DecodeRequest
_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


def main() -> None:
    """Run until the standard input ends."""
    uvloop.run(_run())


async def _run() -> None:
    commands = orders()
    job = build(Job, await anext(commands))
    if job.load is Load.BURST:
        answer(await run_burst(job))
        return
    tally = Tally(PacedClock(Path(job.clock_path)))
    load = StreamLoad(job, tally) if job.load is Load.STREAMS else RequestLoad(job, tally)
    try:
        answer(await load.open())
        async for command in commands:
            if command == Command.BEGIN:
                tally.begin()
            answer(tally.read())
    finally:
        await load.close()


class Listener:
    """Receives what the requests of a load do (``key`` names one); ignores what the load does not read."""

    def accepted(self, count: int) -> None:
        """So many more requests run."""

    def message(self) -> int:
        """A message with tokens came; returns the time, for ``tokens``."""
        return time.monotonic_ns()

    def tokens(self, key: int, offset: int, num_tokens: int, now_ns: int) -> None:
        """The message has tokens of a request; the first is output token number ``offset``."""

    def finished(self, key: int) -> None:
        """A request has its last token."""

    def failed(self, key: int, why: str) -> None:
        """A request failed, or its stream ended before it did."""


class Requester:
    """Sends the requests of one job to the router, or to the worker where the router placed them."""

    def __init__(self, job: Job, listener: Listener) -> None:
        self._job = job
        self._listener = listener
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._router = router_pb2_grpc.RouterServiceStub(self._channel(job.router_address))
        self._opening = asyncio.Semaphore(job.num_opening)
        self._connections: list[asyncio.BaseTransport] = []

    async def generate(self, key: int, start: router_pb2.GenerateStart) -> None:
        """Run one request on a Generate stream of its own."""
        listener, is_finished, why = self._listener, False, _ENDED_EARLY
        try:
            async with self._opening:
                call: _Call = self._router.Generate()
                with _leaving_errors_to_the_reader():
                    await call.write(router_pb2.GenerateRequest(start=start))
                    await call.done_writing()
                if isinstance(await call.read(), router_pb2.GenerateResponse):
                    listener.accepted(1)
            while isinstance(response := await call.read(), router_pb2.GenerateResponse):
                if num_tokens := len(response.delta.token_ids):
                    listener.tokens(key, response.delta.token_offset, num_tokens, listener.message())
                elif response.HasField("finished"):
                    is_finished = True
                    listener.finished(key)
        except grpc.aio.AioRpcError as error:
            why = _describe(error)
        if not is_finished:
            listener.failed(key, why)

    async def http(self, key: int, start: router_pb2.GenerateStart) -> None:
        """Run one request as a streamed completion. Each event with text counts as a token: one word."""
        listener, num_tokens = self._listener, 0

        def take(count: int) -> None:
            nonlocal num_tokens
            listener.tokens(key, num_tokens, count, listener.message())
            num_tokens += count

        body = completion_body(start, streams=True)
        why = _ENDED_EARLY
        try:
            async with self._opening:
                transport, stream = await open_stream(
                    self._job.router_address, "/v1/completions", body, lambda: listener.accepted(1), take
                )
            self._connections.append(transport)
            await stream.ended
        except (HttpFailedError, OSError) as error:
            why = str(error)
        listener.failed(key, why)

    def session(self) -> SlotStream:
        """A new Session stream."""
        return SlotStream(self._router.Session(), self._listener)

    def decode(self, placed: router_pb2.SignedPlacement) -> SlotStream:
        """A new Decode stream to the worker of ``placed``."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(placed.address))
        return SlotStream(stub.Decode(), self._listener)

    async def place(self, start: router_pb2.GenerateStart) -> router_pb2.SignedPlacement:
        """Have the router place a request. Raises ``grpc.aio.AioRpcError``."""
        async with self._opening:
            response = await self._router.Place(router_pb2.PlaceRequest(start=start))
        return response.choices[0].stream

    async def close(self) -> None:
        """Drop all streams; this ends their requests."""
        for connection in self._connections:
            connection.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = create_channel(address, None)
        return self._channels[address]


class SlotStream:
    """One stream with many requests, each in its own slot: a Session, or a Decode stream."""

    def __init__(self, call: _Call, listener: Listener) -> None:
        """Over ``call``, which was just opened."""
        self._call = call
        self._listener = listener
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._keys: dict[int, int] = {}  # of the open requests, by slot
        self._reader = asyncio.create_task(self._read())

    async def send(self, slot: int, key: int, message: _SlotRequest) -> None:
        """Begin a request with ``message``, its start in ``slot``."""
        self._keys[slot] = key
        async with self._writing:
            with _leaving_errors_to_the_reader():
                await self._call.write(message)

    async def done_writing(self) -> None:
        """Send no more requests: the stream ends with the last of those that were sent."""
        with _leaving_errors_to_the_reader():
            await self._call.done_writing()

    async def ended(self) -> None:
        """Return when the stream has ended."""
        await self._reader

    async def _read(self) -> None:
        why = _ENDED_EARLY
        try:
            while isinstance(response := await self._call.read(), _SLOT_RESPONSES):
                self._take(response)
        except grpc.aio.AioRpcError as error:
            why = _describe(error)
        for key in self._keys.values():
            self._listener.failed(key, why)

    def _take(self, response: router_pb2.SessionResponse | decode_pb2.DecodeResponse) -> None:
        listener, keys = self._listener, self._keys
        begun = response.accepted if isinstance(response, router_pb2.SessionResponse) else response.started
        listener.accepted(len(begun))
        if response.slots:
            now_ns = listener.message()
            columns = zip(response.slots, response.token_offsets, response.num_tokens, strict=True)
            for slot, offset, num_tokens in columns:
                listener.tokens(keys[slot], offset, num_tokens, now_ns)
        for finished in response.finished:
            listener.finished(keys.pop(finished.slot))
        for failed in response.failures:
            listener.failed(keys.pop(failed.slot), f"{failed.failure.reason}: {failed.failure.message}")


class Streams:
    """The requests of one job, each with a seed of its own, by which ``listener`` knows it."""

    def __init__(self, job: Job, listener: Listener) -> None:
        """Open nothing before ``run``."""
        self._job = job
        self._listener = listener
        self._requester = Requester(job, listener)

    async def run(self) -> None:
        """Open all of them, and follow each to its end."""
        job = self._job
        seeds = range(job.first_seed, job.first_seed + job.count)
        if job.way is Way.GENERATE:
            await asyncio.gather(*(self._requester.generate(seed, self._start(seed)) for seed in seeds))
        elif job.way is Way.HTTP:
            await asyncio.gather(*(self._requester.http(seed, self._start(seed)) for seed in seeds))
        elif job.way is Way.PLACE_PER_REQUEST:
            await asyncio.gather(*(self._watch(seeds[number : number + 1]) for number in range(job.count)))
        else:
            await asyncio.gather(*(self._watch(seeds[first :: job.num_sessions]) for first in range(job.num_sessions)))

    async def close(self) -> None:
        """Drop all of them."""
        await self._requester.close()

    async def _watch(self, seeds: range) -> None:
        share = self._session if self._job.way is Way.SESSION else self._decode
        try:
            slots = await share(seeds)
            if self._job.load is Load.BURST:
                await slots.done_writing()
            await slots.ended()
        except grpc.aio.AioRpcError as error:
            for seed in seeds:
                self._listener.failed(seed, _describe(error))

    async def _session(self, seeds: range) -> SlotStream:
        """Send the requests ``seeds`` on one Session stream."""
        slots = self._requester.session()
        for slot, seed in enumerate(seeds):
            start = router_pb2.SessionStart(slot=slot, start=self._start(seed))
            await slots.send(slot, seed, router_pb2.SessionRequest(start=start))
        return slots

    async def _decode(self, seeds: range) -> SlotStream:
        """Have the router place the requests ``seeds``; send them on one Decode stream, as there is only one worker."""
        placements = await asyncio.gather(*(self._requester.place(self._start(seed)) for seed in seeds))
        slots = self._requester.decode(placements[0])
        for slot, (seed, placed) in enumerate(zip(seeds, placements, strict=True)):
            await slots.send(slot, seed, _signed_request(placed, slot))
        return slots

    def _start(self, seed: int) -> router_pb2.GenerateStart:
        return _start(self._job, random.Random(seed), seed, self._job.num_output_tokens)


class Tally(Listener):
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
        self._began_at = time.monotonic()
        self._num_tokens = self._num_messages = self._num_requests = 0
        self._latencies_us = array("i")

    def read(self) -> Window:
        """The counts."""
        return Window(
            duration_s=time.monotonic() - self._began_at,
            num_tokens=self._num_tokens,
            num_messages=self._num_messages,
            num_requests=self._num_requests,
            errors=dict(self.errors),
            latencies_us=self._latencies_us.tolist(),
        )

    def accepted(self, count: int) -> None:
        """So many more streams run."""
        self.num_waiting -= count

    def message(self) -> int:
        """Count a message with tokens; returns the time, for ``tokens``."""
        self._num_messages += 1
        return time.monotonic_ns()

    def tokens(self, key: int, offset: int, num_tokens: int, now_ns: int) -> None:
        """Count the message's tokens of the request with the seed ``key``; the first is output token ``offset``."""
        self._num_tokens += num_tokens
        for number in range(offset, offset + num_tokens):
            self._latencies_us.append((now_ns - self._clock.made_at_ns(key, number)) // _NS_PER_US)

    def finished(self, key: int) -> None:
        """Count a failure: these streams have no end."""
        self.failed(key, _ENDED_EARLY)

    def failed(self, _key: int, why: str) -> None:
        """Count a request that failed."""
        self.errors[why] += 1
        self.num_waiting -= 1

    def request(self) -> None:
        """Count a request that ended well, with its one token."""
        self._num_requests += 1
        self._num_tokens += 1


class StreamLoad:
    """Endless streams, from ``open`` to ``close``."""

    def __init__(self, job: Job, tally: Tally) -> None:
        """Open nothing yet; ``tally`` will count the tokens."""
        self._tally = tally
        self._tally.num_waiting = job.count
        self._streams = Streams(job, tally)
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> Opened:
        """Open all, and wait until each runs, has failed, or has taken too long."""
        began, tally = time.monotonic(), self._tally
        self._running = asyncio.create_task(self._streams.run())
        while tally.num_waiting > 0 and not self._running.done():
            await asyncio.sleep(_POLL_S)
            if time.monotonic() - began > _OPEN_TIMEOUT_S:
                tally.errors[f"{tally.num_waiting} did not begin within {_OPEN_TIMEOUT_S:g} s"] += 1
                break
        return Opened(duration_s=time.monotonic() - began, errors=dict(tally.errors))

    async def close(self) -> None:
        """Drop all streams; this ends their requests."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._streams.close()


class RequestFailedError(Exception):
    """A request ended badly; the message says how."""


class RequestLoad(Listener):
    """A closed loop of requests with one token out: the cost of a request, whatever the length of its answer.

    Each of its clients has a slot, by which it is known.
    """

    def __init__(self, job: Job, tally: Tally) -> None:
        """Open nothing yet; ``tally`` will count the requests."""
        self._job = job
        self._tally = tally
        self._rng = random.Random(job.first_seed)
        self._first_ended = asyncio.Event()
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._clients: list[asyncio.Task[None]] = []
        self._requester = Requester(job, self)
        self._slots: SlotStream | None = None
        self._askers: dict[int, HttpAsker] = {}

    async def open(self) -> Opened:
        """Start the clients, and wait until a request has ended, well or badly."""
        began = time.monotonic()
        self._clients = [asyncio.create_task(self._client(slot)) for slot in range(self._job.count)]
        async with asyncio.timeout(_FIRST_REQUEST_TIMEOUT_S):
            await self._first_ended.wait()
        return Opened(duration_s=time.monotonic() - began, errors=dict(self._tally.errors))

    async def close(self) -> None:
        """End the clients."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        for asker in self._askers.values():
            asker.close()
        await self._requester.close()

    def finished(self, key: int) -> None:
        """Let the client of that slot go on."""
        if not self._ended[key].done():
            self._ended[key].set_result(None)

    def failed(self, key: int, why: str) -> None:
        """End the client of that slot."""
        if not self._ended[key].done():
            self._ended[key].set_exception(RequestFailedError(why))

    async def _client(self, slot: int) -> None:
        """Run one client of the loop; it stops at its first failure, because no request here may fail."""
        try:
            while True:
                self._ended[slot] = asyncio.get_running_loop().create_future()
                await self._send(slot)
                await self._ended[slot]
                self._tally.request()
                self._first_ended.set()
        except (RequestFailedError, HttpFailedError, EOFError, OSError) as error:
            self._tally.failed(slot, str(error))
        except grpc.aio.AioRpcError as error:
            self._tally.failed(slot, _describe(error))
        self._first_ended.set()

    async def _send(self, slot: int) -> None:
        """Send a request; under Place, have the router place it, then send it on one Decode stream, as clients do."""
        if self._job.way is Way.HTTP:
            await self._ask(slot)
            self.finished(slot)
            return
        # No client asks when its token was made.
        if self._job.is_chat:
            start = make_chat_start(make_chat_text(self._rng, self._job.num_prompt_tokens), seed=MAX_STREAMS)
        else:
            start = _start(self._job, self._rng, MAX_STREAMS, num_output_tokens=1)
        if self._job.way is Way.GENERATE:
            await self._requester.generate(slot, start)
        elif self._job.way is Way.SESSION:
            self._slots = self._slots or self._requester.session()
            message = router_pb2.SessionRequest(start=router_pb2.SessionStart(slot=slot, start=start))
            await self._slots.send(slot, slot, message)
        else:
            placed = await self._requester.place(start)
            self._slots = self._slots or self._requester.decode(placed)
            await self._slots.send(slot, slot, _signed_request(placed, slot))

    async def _ask(self, slot: int) -> None:
        asker = self._askers.setdefault(slot, HttpAsker(self._job.router_address))
        if self._job.is_chat:
            text = make_chat_text(self._rng, self._job.num_prompt_tokens)
            await asker.ask("/v1/chat/completions", chat_body(text, MAX_STREAMS))
        else:
            start = _start(self._job, self._rng, MAX_STREAMS, num_output_tokens=1)
            await asker.ask("/v1/completions", completion_body(start, streams=False))


class Burst(Listener):
    """Requests that are opened all at once; each has to get every token once, in order.

    Attributes:
        outcome: how they ended so far.
    """

    def __init__(self, num_requests: int, num_output_tokens: int) -> None:
        """The clock starts."""
        self.outcome = Outcome()
        self._began_at = time.monotonic()
        self._num_output_tokens = num_output_tokens
        self._num_open = 0
        self._received = [0] * num_requests

    def accepted(self, count: int) -> None:
        """So many more are open."""
        if count:
            self._num_open += count
            self.outcome.num_accepted += count
            self.outcome.max_open = max(self.outcome.max_open, self._num_open)
            self.outcome.accepted_s = self._now()

    def tokens(self, key: int, offset: int, num_tokens: int, _now_ns: int) -> None:
        """Check that they are the next ones."""
        if not offset:
            self.outcome.first_token_s = self._now()
        # After a missing token, or one that came twice, the count stops growing: the request is then not complete.
        if offset == self._received[key]:
            self._received[key] += num_tokens

    def finished(self, key: int) -> None:
        """Count the request as complete if it got every token."""
        self._num_open -= 1
        self.outcome.ended_s = self._now()
        if self._received[key] == self._num_output_tokens:
            self.outcome.num_complete += 1
        else:
            self.outcome.errors["tokens are missing"] += 1

    def failed(self, _key: int, why: str) -> None:
        """Keep the reason."""
        self.outcome.ended_s = self._now()
        self.outcome.errors[why] += 1

    def _now(self) -> float:
        return time.monotonic() - self._began_at


async def run_burst(job: Job) -> Outcome:
    """Open all requests of ``job``, and follow each to its end."""
    burst = Burst(job.count, job.num_output_tokens)
    streams = Streams(job, burst)
    await streams.run()
    await streams.close()
    return burst.outcome


def _start(job: Job, rng: random.Random, seed: int, num_output_tokens: int) -> router_pb2.GenerateStart:
    return make_start(
        rng,
        seed=seed,
        num_prompt_tokens=job.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        with_text=job.with_text,
    )


def _signed_request(placed: router_pb2.SignedPlacement, slot: int) -> decode_pb2.DecodeRequest:
    """The start that the router signed, as a request to the decode worker."""
    start = decode_pb2.SignedDecodeStart(
        slot=slot, signed_start=placed.signed_start, key_id=placed.key_id, mac=placed.mac
    )
    return decode_pb2.DecodeRequest(signed_start=start)


def _leaving_errors_to_the_reader() -> contextlib.AbstractContextManager[None]:
    """Ignore that the stream to write to is over: its reader gets the error."""
    return contextlib.suppress(asyncio.InvalidStateError)


def _describe(error: grpc.aio.AioRpcError) -> str:
    """Its status and message, on one line."""
    return f"{error.code().name}: {error.details()}"


if __name__ == "__main__":
    main()
