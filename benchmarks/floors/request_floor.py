"""The least that a request through a relay in Python can cost: only gRPC, passing bytes on unread.

Clients ask in a closed loop. Their starts are as long as real ones with prompts of token ids. The router passes them to
the worker on one stream: all waiting starts go in one message. It answers each request as the real router would. With
``generate``, placement, tokens and end are a message each on the request's own stream. With ``session``, they are parts
of the messages of one stream that all requests share, at most one message a tick. ``place`` is a unary call; the client
then sends the placement to the worker. The worker has the pace of the real one's engine: each request has its turn in
one of ten steps. No process reads the messages, which have the real ones' lengths: the request that has waited longest
gets the next answer.

    python -m benchmarks.floors.request_floor worker|router|client JOB      (``open_request_floor`` starts all three)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from benchmarks.floors.bare_processes import (
    BareCall,
    BareContext,
    BareControl,
    BareHandler,
    BareJob,
    BareRelay,
    BareRole,
    bare_relay,
    method_path,
    paced_steps,
    rest,
    run_bare_role,
    serve,
    tell_windows,
)
from benchmarks.paced_engine import PERIOD
from benchmarks.relay_load import Way, make_start
from benchmarks.relay_measure import Windows
from quartet.api.request import SessionLimits
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2

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
class RequestFloor:
    """CPU time of the bare relay's router for each request, and the number of requests."""

    router_cpu_ms_per_request: float
    requests_per_s: float


class BareRequests:
    """A closed loop of requests through a bare relay. ``open_request_floor`` makes it.

    Attributes:
        found: the figures of each window so far.
    """

    def __init__(self, relay: BareRelay) -> None:
        self.found: list[RequestFloor] = []
        self._relay = relay

    async def window(self) -> None:
        """Measure one more window. Raises ``RuntimeError``, ``TimeoutError``: a process failed."""
        window = await self._relay.window()
        self.found.append(
            RequestFloor(
                router_cpu_ms_per_request=1e3 * window.cpu_s / window.count,
                requests_per_s=window.count / window.duration_s,
            )
        )


@asynccontextmanager
async def open_request_floor(
    way: Way, num_clients: int, num_prompt_tokens: int, windows: Windows
) -> AsyncIterator[BareRequests]:
    """Start the three processes; they rest between windows. Both Place ways are the same to the router.

    Raises:
        RuntimeError, TimeoutError: a process failed.
    """
    module = "benchmarks.floors.request_floor"
    async with bare_relay(module, way, num_clients, windows, num_prompt_tokens=num_prompt_tokens) as relay:
        await relay.begun()
        yield BareRequests(relay)


class Method(StrEnum):
    """The methods: the first three are the router's, the last is the worker's."""

    GENERATE = "Generate"
    SESSION = "Session"
    PLACE = "Place"
    WORK = "Work"


async def run_clients(job: BareJob, control: BareControl) -> None:
    """Ask until cancelled. The first request that fails ends it."""
    async with (
        create_channel(job.router_address, None) as router,
        create_channel(job.worker_address, None) as worker,
        asyncio.TaskGroup() as group,
    ):
        clients = _Clients(job, control, router, worker)
        if clients.shared is not None:
            group.create_task(clients.shared.read())
        for _ in range(job.count):
            group.create_task(clients.run_one())


def make_start_bytes(num_prompt_tokens: int) -> bytes:
    """A start with ``num_prompt_tokens`` token ids."""
    rng = random.Random(0)
    start = make_start(rng, seed=_LONG_SEED, num_prompt_tokens=num_prompt_tokens, num_output_tokens=1, with_text=False)
    return bytes(router_pb2.GenerateRequest(start=start).ByteSize())


def make_place_response(num_prompt_tokens: int) -> bytes:
    """A placement of a start with ``num_prompt_tokens`` token ids."""
    return bytes(_PLACE_BYTES + _PLACE_BYTES_PER_TOKEN * num_prompt_tokens)


class _Worker:
    """Answers each start when its turn comes; starts of one stream and one step are answered together."""

    def __init__(self, job: BareJob, control: BareControl) -> None:
        self._control = control
        self._start_bytes = len(make_start_bytes(job.num_prompt_tokens))

    async def stream(self, _requests: object, context: BareContext) -> None:
        due = [0] * PERIOD
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(context, due))
            async for step in paced_steps(self._control):
                turn = step % PERIOD
                if num_answers := due[turn]:
                    due[turn] = 0
                    await context.write(WORKER_ANSWER * num_answers)

    async def _read(self, context: BareContext, due: list[int]) -> None:
        num_starts = 0
        while (message := await context.read()) is not grpc.aio.EOF:
            for _ in range(len(message) // self._start_bytes):
                due[num_starts % PERIOD] += 1
                num_starts += 1


class _Router:
    """Passes starts to the worker, and its answers to the clients."""

    def __init__(self, job: BareJob, control: BareControl) -> None:
        self._job = job
        self._control = control
        self._place_response = make_place_response(job.num_prompt_tokens)
        self._tick_s = SessionLimits().tick_s
        self._starts: list[bytes] = []
        self._has_starts = asyncio.Event()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_requests = 0
        self._has_ended_one = asyncio.Event()

    async def generate(self, _requests: object, context: BareContext) -> None:
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

    async def session(self, _requests: object, context: BareContext) -> None:
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

    async def place(self, _request: bytes, _context: BareContext) -> bytes:
        self._count()
        return self._place_response

    async def measure(self) -> None:
        """Relay, and report the windows."""
        async with create_channel(self._job.worker_address, None) as channel, asyncio.TaskGroup() as group:
            call: BareCall = channel.stream_stream(method_path(Method.WORK))(wait_for_ready=True)
            group.create_task(self._write_starts(call))
            group.create_task(self._read_answers(call))
            await self._has_ended_one.wait()
            await tell_windows(self._control, self._job.windows, lambda: self._num_requests)

    async def _write_ticks(self, context: BareContext, pending: list[bytes], has_pending: asyncio.Event) -> None:
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

    async def _write_starts(self, call: BareCall) -> None:
        while True:
            await self._has_starts.wait()
            self._has_starts.clear()
            message = b"".join(self._starts)
            self._starts.clear()
            await call.write(message)

    async def _read_answers(self, call: BareCall) -> None:
        while isinstance(message := await call.read(), bytes):
            for _ in range(len(message) // len(WORKER_ANSWER)):
                self._waiting.popleft()()

    def _count(self) -> None:
        self._num_requests += 1
        self._has_ended_one.set()


async def _work(role: BareRole, job: BareJob, control: BareControl) -> None:
    """Play one process's part until the process is killed or fails."""
    if role is BareRole.CLIENT:
        await run_clients(job, control)
    elif role is BareRole.WORKER:
        worker = _Worker(job, control)
        await serve(job.worker_address, {Method.WORK: grpc.stream_stream_rpc_method_handler(worker.stream)}, rest())
    else:
        router = _Router(job, control)
        methods: dict[str, BareHandler] = {
            Method.GENERATE: grpc.stream_stream_rpc_method_handler(router.generate),
            Method.SESSION: grpc.stream_stream_rpc_method_handler(router.session),
            Method.PLACE: grpc.unary_unary_rpc_method_handler(router.place),
        }
        await serve(job.router_address, methods, router.measure())


async def _read_out(context: BareContext) -> None:
    while await context.read() is not grpc.aio.EOF:
        continue


class _SharedStream:
    """One stream for the requests of all clients. Answers are unread: the request that waits longest gets the next."""

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

    def __init__(self, job: BareJob, control: BareControl, router: grpc.aio.Channel, worker: grpc.aio.Channel) -> None:
        self._control = control
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
        """Run one client: it sends a request, and the next one when that has ended."""
        while True:
            await self._control.loaded()
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


if __name__ == "__main__":
    run_bare_role(_work)
