"""The least that tokens and requests through a relay in Python can cost: only gRPC, passing bytes on unread.

A worker, a router and a client run as processes, with none of Quartet's code between ``read`` and ``write``: no
parsing, text, metrics or bookkeeping. The real Router is responsible for whatever it spends beyond this.

*Streams*: the worker writes one message a step, at the real engine's pace. With ``session`` the router
writes one message to its only client stream. With ``http`` it pushes one prepared event to a tenth of its clients,
which are on connections of their own. With ``generate`` it writes a small message to a tenth of its client
streams: those whose turn it is.

*Requests*: clients ask in a closed loop. Their starts are as long as real ones with prompts of
token ids. The router passes them to the worker on one stream: all queued starts go in one message. It answers each
request as the real router would. With ``generate``, placement, tokens and end are a message each on the request's own
stream. With ``session``, they are parts of the messages of one stream that all requests share, at most one message a
tick. ``place`` is a unary call; the client then sends the placement to the worker. Each request has its turn in one of
the worker's ten steps. No process reads the messages, which have the real ones' lengths: the request that has waited
longest gets the next answer.

    python -m benchmarks.relay_floor ROLE JOB      (``open_floor`` starts all three)
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import grpc
import uvloop
from aiohttp import web

from benchmarks.children import Child, answer, argument, orders, start_child
from benchmarks.paced_engine import PERIOD, STEP_S
from benchmarks.processes import process_cpu_s
from benchmarks.relay_http import EVENT, completion_body, open_stream
from benchmarks.relay_load import Load, Way, make_start
from benchmarks.relay_measure import SETTLE_S, Windows
from quartet.api.request import SessionLimits
from quartet.config import build
from quartet.rpc.channels import create_channel, yielding_poller
from quartet.v1 import router_pb2
from services.topology.launch import free_port

# gRPC's own types: messages are bytes.
_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Place: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"

_SERVICE = "quartet.floor.Floor"
_TIMEOUT_S = 60.0
_OPTIONS = [
    # By default gRPC silently answers part of a burst of calls with CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.so_reuseport", 0),
]
# One token takes about this many bytes of a step's message: slot, offset, count and id.
_BYTES_PER_TOKEN = 8
_TOKEN_BYTES = 12
_RECONNECT_S = 0.05
# The event loop's timers count milliseconds, so a wait of less than half of one needs no timer.
_TIMER_RESOLUTION_S = 0.0005
#: Ends each answer's last message and occurs in no other message, so a client can count the answers.
MARK = b"\1"
#: The router's answer to a request with one token out, without the field that names the request on a shared stream.
ACCEPTED, DELTA, FINISHED = bytes(122), bytes(6), bytes(46) + MARK
#: The worker's answer to one request.
WORKER_ANSWER = bytes(39) + MARK
_LONG_SEED = 1 << 13
# The signed start contains the prompt, four bytes a token.
_PLACE_BYTES, _PLACE_BYTES_PER_TOKEN = 360, 4


@dataclass(frozen=True, kw_only=True)
class Floor:
    """CPU time of the bare relay's router and worker for each token that passed; the worker's includes its pacing."""

    router_cpu_us_per_token: float
    decode_cpu_us_per_token: float


@dataclass(frozen=True, kw_only=True)
class RequestFloor:
    """CPU time of the bare relay's router for each request, and the number of requests."""

    router_cpu_ms_per_request: float
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class BareWindow:
    """One window of the router.

    Attributes:
        cpu_s, worker_cpu_s: CPU seconds of the router's process, and of the worker's.
        count: steps that were relayed in the window, or requests that ended in it.
    """

    duration_s: float
    cpu_s: float
    worker_cpu_s: float
    count: int

    def per_token(self, num_streams: int) -> Floor:
        """The figures of a window of ``num_streams`` streams."""
        num_tokens = self.count * num_streams / PERIOD
        return Floor(
            router_cpu_us_per_token=1e6 * self.cpu_s / num_tokens,
            decode_cpu_us_per_token=1e6 * self.worker_cpu_s / num_tokens,
        )

    def per_request(self) -> RequestFloor:
        """The figures of a window of requests."""
        return RequestFloor(
            router_cpu_ms_per_request=1e3 * self.cpu_s / self.count, requests_per_s=self.count / self.duration_s
        )


class _Role(StrEnum):
    """The part that a process plays."""

    WORKER = "worker"
    ROUTER = "router"
    CLIENT = "client"


class _Order(StrEnum):
    """What the parent can order a process to do."""

    LOAD = "load"  # make the load; the processes start in this state
    REST = "rest"  # make no load: another measurement has the machine
    MEASURE = "measure"  # only for the router: measure one window and report it


class _Method(StrEnum):
    """The methods: the first three are the router's, the last is the worker's."""

    GENERATE = "Generate"
    SESSION = "Session"
    PLACE = "Place"
    WORK = "Work"

    @property
    def path(self) -> str:
        """The path by which a client calls it."""
        return f"/{_SERVICE}/{self}"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The job that all three processes are given.

    Attributes:
        count: streams, or clients of a closed loop.
        num_prompt_tokens: of each request of a closed loop.
        worker_address, router_address: ``host:port`` where they listen.
    """

    way: Way
    load: Load
    count: int
    num_prompt_tokens: int = 0
    windows: Windows
    worker_address: str
    router_address: str


class BareRelay:
    """A load through a bare relay, whose processes rest between windows.

    Attributes:
        found: each window so far.
    """

    def __init__(self, children: Mapping[_Role, Child], windows: Windows) -> None:
        self.found: list[BareWindow] = []
        self._children = children
        self._windows = windows

    async def begun(self) -> None:
        """Wait until all are connected and warm, then rest. Raises ``RuntimeError``, ``TimeoutError``: they failed."""
        await self._children[_Role.ROUTER].read(_TIMEOUT_S)
        self._send_all(_Order.REST)

    async def window(self) -> None:
        """Measure one more window. Raises ``RuntimeError``, ``TimeoutError``: a process failed, or was silent."""
        self._send_all(_Order.LOAD)
        await asyncio.sleep(SETTLE_S)
        worker_pid = self._children[_Role.WORKER].pid
        worker_cpu_s = process_cpu_s(worker_pid)
        window = await self._children[_Role.ROUTER].ask(_Order.MEASURE, self._windows.window_s + _TIMEOUT_S)
        worker_cpu_s = process_cpu_s(worker_pid) - worker_cpu_s
        self._send_all(_Order.REST)
        self.found.append(BareWindow(**window, worker_cpu_s=worker_cpu_s))

    def _send_all(self, order: _Order) -> None:
        for child in self._children.values():
            child.send(order)


@asynccontextmanager
async def open_floor(
    way: Way, load: Load, count: int, windows: Windows, *, num_prompt_tokens: int = 0
) -> AsyncIterator[BareRelay]:
    """Start the three processes, with ``count`` streams or clients. Both Place ways are the same to the router.

    Raises:
        RuntimeError, TimeoutError: a process failed.
    """
    worker_address, router_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    job = _Job(
        way=way,
        load=load,
        count=count,
        num_prompt_tokens=num_prompt_tokens,
        windows=windows,
        worker_address=worker_address,
        router_address=router_address,
    )
    async with AsyncExitStack() as exits:
        children = {role: await exits.enter_async_context(start_child(__name__, role, job)) for role in _Role}
        relay = BareRelay(children, windows)
        await relay.begun()
        yield relay


class _Part:
    """What one process does; it makes load while ``loaded`` is set.

    Attributes:
        num_done: steps that the router has relayed, or requests that have ended at it.
    """

    def __init__(self, job: _Job) -> None:
        """The load begins at once."""
        self.num_done = 0
        self.job = job
        self.loaded = asyncio.Event()
        self.loaded.set()

    async def run(self) -> None:
        """Play the part until the process ends or fails."""
        raise NotImplementedError

    async def obey(self) -> None:
        """Take orders until the standard input ends."""
        async for order in orders():
            if order == _Order.MEASURE:
                answer(await self._measure())
            elif order == _Order.LOAD:
                self.loaded.set()
            else:
                self.loaded.clear()

    async def paced_steps(self) -> AsyncIterator[int]:
        """The number of each step of an engine, from 0, when it is due. Later steps don't make up for a late one."""
        due_at = time.monotonic()
        for step in itertools.count():
            await self.loaded.wait()
            due_at = max(due_at + STEP_S, time.monotonic())
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            yield step

    async def begin(self) -> None:
        """In the router: report that all are connected and warm."""
        await asyncio.sleep(self.job.windows.warm_up_s)
        answer("begin")

    async def _measure(self) -> Mapping[str, float]:
        """In the router: measure a window of this process, which goes on until ``num_done`` has grown."""
        began, num_before, cpu_s = time.monotonic(), self.num_done, time.process_time()
        while True:
            await asyncio.sleep(self.job.windows.window_s)
            if self.num_done > num_before:  # otherwise the machine is far too busy
                break
        cpu_s = time.process_time() - cpu_s
        return {"cpu_s": cpu_s, "count": self.num_done - num_before, "duration_s": time.monotonic() - began}


def main() -> None:
    """Play the role that the command line names until the standard input ends, or the work fails."""
    uvloop.run(_run(_Role(argument(0)), build(_Job, argument(1))))


async def _run(role: _Role, job: _Job) -> None:
    # The Router's poller yields (``router.__main__``). This one must too, or the ratio would show that difference.
    with yielding_poller() if role is _Role.ROUTER else nullcontext():
        parts = _PARTS[job.load] if job.way is not Way.HTTP else {**_PARTS[job.load], **_HTTP_PARTS}
        part = parts[role](job)
        working = asyncio.create_task(part.run())
        ended = asyncio.create_task(part.obey())
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()


async def _serve(address: str, methods: dict[str, _Handler], work: Awaitable[object]) -> None:
    """Serve ``methods`` at ``address`` while ``work`` runs."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    server.add_insecure_port(address)
    await server.start()
    try:
        await work
    finally:
        await server.stop(None)


def _streaming(handler: Callable[[object, _Context], Awaitable[None]]) -> _Handler:
    return grpc.stream_stream_rpc_method_handler(handler)


class _StreamWorker(_Part):
    """Writes one message a step to each client that opens a stream."""

    async def run(self) -> None:
        await _serve(self.job.worker_address, {_Method.WORK: _streaming(self._work)}, asyncio.Event().wait())

    async def _work(self, _requests: object, context: _Context) -> None:
        message = bytes(_BYTES_PER_TOKEN * self.job.count // PERIOD)
        async for _ in self.paced_steps():
            await context.write(message)


class _StreamRouter(_Part):
    """Reads the worker's stream, and writes to its clients' streams."""

    def __init__(self, job: _Job) -> None:
        super().__init__(job)
        self._is_each = job.way in (Way.GENERATE, Way.HTTP)
        self._due: list[asyncio.Event] = []
        self._all_connected = asyncio.Event()

    async def run(self) -> None:
        await _serve(self.job.router_address, {_Method.GENERATE: _streaming(self._stream)}, self._relay())

    async def _stream(self, _requests: object, context: _Context) -> None:
        due = asyncio.Event()
        self._due.append(due)
        if len(self._due) == _num_client_streams(self.job):
            self._all_connected.set()
        message = bytes(_TOKEN_BYTES if self._is_each else _BYTES_PER_TOKEN * self.job.count // PERIOD)
        while True:
            await due.wait()
            due.clear()
            await context.write(message)

    async def _relay(self) -> None:
        await self._all_connected.wait()
        async with create_channel(self.job.worker_address, None) as channel, asyncio.TaskGroup() as group:
            group.create_task(self.begin())
            call: _Call = channel.stream_stream(_Method.WORK.path)(wait_for_ready=True)
            while await call.read() is not grpc.aio.EOF:
                turn = self.num_done % PERIOD if self._is_each else 0
                self.num_done += 1
                self._pass_on(turn)

    def _pass_on(self, turn: int) -> None:
        for due in self._due[turn::PERIOD]:
            due.set()


class _HttpStreamRouter(_StreamRouter):
    """Reads the worker's stream, and pushes one prepared event a token through aiohttp, past its own writer."""

    def __init__(self, job: _Job) -> None:
        super().__init__(job)
        self._transports: list[asyncio.Transport] = []

    async def run(self) -> None:
        host, _, port = self.job.router_address.rpartition(":")
        loop = asyncio.get_running_loop()
        server = await loop.create_server(web.Server(self._answer, access_log=None), host, int(port), backlog=1024)
        async with server:
            await self._relay()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": begin\n\n")
        assert request.transport is not None, "the client stays"
        self._transports.append(request.transport)
        if len(self._transports) == self.job.count:
            self._all_connected.set()
        await asyncio.Event().wait()
        return response

    def _pass_on(self, turn: int) -> None:
        for transport in self._transports[turn::PERIOD]:
            transport.write(EVENT)


def _num_client_streams(job: _Job) -> int:
    return job.count if job.way is Way.GENERATE else 1


class _StreamClient(_Part):
    """Reads its streams, as fast as they come."""

    async def run(self) -> None:
        async with create_channel(self.job.router_address, None) as channel, asyncio.TaskGroup() as group:
            for _ in range(_num_client_streams(self.job)):
                group.create_task(_read_out(channel.stream_stream(_Method.GENERATE.path)(wait_for_ready=True)))


class _HttpStreamClient(_Part):
    """Opens its streams, and counts their events, as fast as they come."""

    async def run(self) -> None:
        body = completion_body(
            make_start(random.Random(0), seed=0, num_prompt_tokens=16, num_output_tokens=1, with_text=True),
            streams=True,
        )
        async with asyncio.TaskGroup() as group:
            for _ in range(self.job.count):
                group.create_task(self._stream(body))

    async def _stream(self, body: bytes) -> None:
        while True:
            try:
                _, stream = await open_stream(
                    self.job.router_address, "/v1/completions", body, lambda: None, lambda _count: None
                )
            except ConnectionError:  # the router does not listen yet
                await asyncio.sleep(_RECONNECT_S)
                continue
            await stream.ended


async def _read_out(stream: _Call | _Context) -> None:
    while await stream.read() is not grpc.aio.EOF:
        continue


def make_start_bytes(num_prompt_tokens: int) -> bytes:
    """A start with ``num_prompt_tokens`` token ids."""
    rng = random.Random(0)
    start = make_start(rng, seed=_LONG_SEED, num_prompt_tokens=num_prompt_tokens, num_output_tokens=1, with_text=False)
    return bytes(router_pb2.GenerateRequest(start=start).ByteSize())


def make_place_response(num_prompt_tokens: int) -> bytes:
    """A placement of a start with ``num_prompt_tokens`` token ids."""
    return bytes(_PLACE_BYTES + _PLACE_BYTES_PER_TOKEN * num_prompt_tokens)


class _RequestWorker(_Part):
    """Answers each start when its turn comes; starts of one stream and one step are answered together."""

    async def run(self) -> None:
        await _serve(self.job.worker_address, {_Method.WORK: _streaming(self._work)}, asyncio.Event().wait())

    async def _work(self, _requests: object, context: _Context) -> None:
        due = [0] * PERIOD
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(context, due))
            async for step in self.paced_steps():
                turn = step % PERIOD
                if num_answers := due[turn]:
                    due[turn] = 0
                    await context.write(WORKER_ANSWER * num_answers)

    async def _read(self, context: _Context, due: list[int]) -> None:
        num_starts, start_bytes = 0, len(make_start_bytes(self.job.num_prompt_tokens))
        while (message := await context.read()) is not grpc.aio.EOF:
            for _ in range(len(message) // start_bytes):
                due[num_starts % PERIOD] += 1
                num_starts += 1


class _RequestRouter(_Part):
    """Passes starts to the worker, and its answers to the clients."""

    def __init__(self, job: _Job) -> None:
        super().__init__(job)
        self._place_response = make_place_response(job.num_prompt_tokens)
        self._tick_s = SessionLimits().tick_s
        self._starts: list[bytes] = []
        self._has_starts = asyncio.Event()
        self._waiting: deque[Callable[[], None]] = deque()
        self._has_ended_one = asyncio.Event()

    async def run(self) -> None:
        methods: dict[str, _Handler] = {
            _Method.GENERATE: _streaming(self._generate),
            _Method.SESSION: _streaming(self._session),
            _Method.PLACE: grpc.unary_unary_rpc_method_handler(self._place),
        }
        await _serve(self.job.router_address, methods, self._relay())

    async def _relay(self) -> None:
        async with create_channel(self.job.worker_address, None) as channel, asyncio.TaskGroup() as group:
            call: _Call = channel.stream_stream(_Method.WORK.path)(wait_for_ready=True)
            group.create_task(self._write_starts(call))
            group.create_task(self._read_answers(call))
            await self._has_ended_one.wait()
            await self.begin()

    async def _generate(self, _requests: object, context: _Context) -> None:
        answered = asyncio.Event()
        self._pass_on(await context.read(), answered.set)
        reading = asyncio.create_task(_read_out(context))  # as in the real router, which must see a cancel
        try:
            await context.write(ACCEPTED)
            await answered.wait()
            await context.write(DELTA)
            await context.write(FINISHED)
        finally:
            reading.cancel()
        self._count()

    async def _session(self, _requests: object, context: _Context) -> None:
        pending: list[bytes] = []
        has_pending = asyncio.Event()
        await context.send_initial_metadata(())

        def add(item: bytes) -> None:
            pending.append(item)
            has_pending.set()

        def end() -> None:
            add(DELTA + FINISHED)
            self._count()

        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_ticks(context, pending, has_pending))
            while (start := await context.read()) is not grpc.aio.EOF:
                self._pass_on(start, end)
                add(ACCEPTED)

    async def _place(self, _request: bytes, _context: _Context) -> bytes:
        self._count()
        return self._place_response

    async def _write_ticks(self, context: _Context, pending: list[bytes], has_pending: asyncio.Event) -> None:
        """Write at most one message a tick, but at once after a pause."""
        loop = asyncio.get_running_loop()
        next_at = 0.0
        while True:
            await has_pending.wait()
            now = loop.time()
            if now < next_at - _TIMER_RESOLUTION_S:
                await asyncio.sleep(next_at - now)
            has_pending.clear()
            message = b"".join(pending)
            pending.clear()
            next_at = loop.time() + self._tick_s
            await context.write(message)

    def _pass_on(self, start: bytes, on_answer: Callable[[], None]) -> None:
        self._waiting.append(on_answer)
        self._starts.append(start)
        self._has_starts.set()

    async def _write_starts(self, call: _Call) -> None:
        while True:
            await self._has_starts.wait()
            self._has_starts.clear()
            message = b"".join(self._starts)
            self._starts.clear()
            await call.write(message)

    async def _read_answers(self, call: _Call) -> None:
        while isinstance(message := await call.read(), bytes):
            for _ in range(len(message) // len(WORKER_ANSWER)):
                self._waiting.popleft()()

    def _count(self) -> None:
        self.num_done += 1
        self._has_ended_one.set()


class _SharedStream:
    """One stream for the requests of all clients. Answers are unread: the request that waits longest gets the next."""

    def __init__(self, call: _Call) -> None:
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


class _RequestClient(_Part):
    """Asks in a closed loop. The first request that fails ends it."""

    async def run(self) -> None:
        job = self.job
        async with (
            create_channel(job.router_address, None) as router,
            create_channel(job.worker_address, None) as worker,
            asyncio.TaskGroup() as group,
        ):
            if job.way is Way.GENERATE:
                ask = partial(self._generate, router.stream_stream(_Method.GENERATE.path))
            else:
                channel, method = (router, _Method.SESSION) if job.way is Way.SESSION else (worker, _Method.WORK)
                shared = _SharedStream(channel.stream_stream(method.path)(wait_for_ready=True))
                group.create_task(shared.read())
                place: _Place = router.unary_unary(_Method.PLACE.path)
                ask = partial(self._share, shared, None if job.way is Way.SESSION else place)
            for _ in range(job.count):
                group.create_task(self._run_one(ask))

    async def _run_one(self, ask: Callable[[bytes], Awaitable[None]]) -> None:
        """Run one client: it sends a request, and the next one when that has ended."""
        start = make_start_bytes(self.job.num_prompt_tokens)
        while True:
            await self.loaded.wait()
            await ask(start)

    async def _generate(self, method: grpc.aio.StreamStreamMultiCallable[bytes, bytes], start: bytes) -> None:
        call: _Call = method(wait_for_ready=True)
        await call.write(start)
        await call.done_writing()
        await _read_out(call)

    async def _share(self, shared: _SharedStream, place: _Place | None, start: bytes) -> None:
        if place is not None:
            await place(start, wait_for_ready=True)
        await shared.run(start)


_PARTS: Mapping[Load, Mapping[_Role, type[_Part]]] = {
    Load.STREAMS: {_Role.WORKER: _StreamWorker, _Role.ROUTER: _StreamRouter, _Role.CLIENT: _StreamClient},
    Load.REQUESTS: {_Role.WORKER: _RequestWorker, _Role.ROUTER: _RequestRouter, _Role.CLIENT: _RequestClient},
}


_HTTP_PARTS: Mapping[_Role, type[_Part]] = {_Role.ROUTER: _HttpStreamRouter, _Role.CLIENT: _HttpStreamClient}


if __name__ == "__main__":
    main()
