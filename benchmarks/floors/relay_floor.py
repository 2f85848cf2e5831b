"""The least that a relay in Python can cost: only gRPC, at the real one's pace, passing bytes on unread.

A worker writes one message a step. A router reads it. With ``session`` the router writes one message to its only client
stream. With ``generate`` it writes a small message to a tenth of its client streams: those whose turn it is. It does no
parsing, text, metrics or bookkeeping: the real Router is responsible for whatever it spends beyond this.

    python -m benchmarks.floors.relay_floor worker|router|client JOB      (``open_floor`` starts all three)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from benchmarks.floors.bare_processes import (
    BareCall,
    BareContext,
    BareControl,
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
from benchmarks.relay_load import Way
from benchmarks.relay_measure import Windows
from quartet.rpc.channels import create_channel

_METHOD = "Stream"
# One token takes about this many bytes of a step's message: slot, offset, count and id.
_BYTES_PER_TOKEN = 8
_TOKEN_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Floor:
    """CPU time of the bare relay's router and worker for each token that passed; the worker's includes its pacing."""

    router_cpu_us_per_token: float
    decode_cpu_us_per_token: float


class BareStreams:
    """Endless streams through a bare relay. ``open_floor`` makes it.

    Attributes:
        found: the figures of each window so far.
    """

    def __init__(self, relay: BareRelay, num_streams: int) -> None:
        self.found: list[Floor] = []
        self._relay = relay
        self._num_tokens_per_step = num_streams / PERIOD

    async def window(self) -> None:
        """Measure one more window. Raises ``RuntimeError``, ``TimeoutError``: a process failed."""
        window = await self._relay.window()
        num_tokens = window.count * self._num_tokens_per_step
        self.found.append(
            Floor(
                router_cpu_us_per_token=1e6 * window.cpu_s / num_tokens,
                decode_cpu_us_per_token=1e6 * window.worker_cpu_s / num_tokens,
            )
        )


@asynccontextmanager
async def open_floor(way: Way, num_streams: int, windows: Windows) -> AsyncIterator[BareStreams]:
    """Start the three processes; they rest between windows.

    Raises:
        RuntimeError, TimeoutError: a process failed.
    """
    async with bare_relay("benchmarks.floors.relay_floor", way, num_streams, windows) as relay:
        await relay.begun()
        yield BareStreams(relay, num_streams)


class _Worker:
    """Writes one message a step to each client that opens a stream."""

    def __init__(self, num_streams: int, control: BareControl) -> None:
        self._control = control
        self._message = bytes(_BYTES_PER_TOKEN * num_streams // PERIOD)

    async def stream(self, _requests: object, context: BareContext) -> None:
        async for _ in paced_steps(self._control):
            await context.write(self._message)


class _Router:
    """Reads the worker's stream, and writes to its clients' streams."""

    def __init__(self, job: BareJob, control: BareControl) -> None:
        self._job = job
        self._control = control
        self._is_each = job.way is Way.GENERATE
        self._due: list[asyncio.Event] = []
        self._num_steps = 0
        self._all_connected = asyncio.Event()

    async def stream(self, _requests: object, context: BareContext) -> None:
        due = asyncio.Event()
        self._due.append(due)
        if len(self._due) == _num_client_streams(self._job):
            self._all_connected.set()
        message = bytes(_TOKEN_BYTES if self._is_each else _BYTES_PER_TOKEN * self._job.count // PERIOD)
        while True:
            await due.wait()
            due.clear()
            await context.write(message)

    async def measure(self) -> None:
        """Relay, and report the windows."""
        await self._all_connected.wait()
        async with create_channel(self._job.worker_address, None) as channel, asyncio.TaskGroup() as group:
            group.create_task(self._relay(channel))
            await tell_windows(self._control, self._job.windows, lambda: self._num_steps)

    async def _relay(self, channel: grpc.aio.Channel) -> None:
        call: BareCall = channel.stream_stream(method_path(_METHOD))(wait_for_ready=True)
        while await call.read() is not grpc.aio.EOF:
            turn = self._num_steps % PERIOD if self._is_each else 0
            self._num_steps += 1
            for due in self._due[turn::PERIOD]:
                due.set()


def _num_client_streams(job: BareJob) -> int:
    return job.count if job.way is Way.GENERATE else 1


async def _read(job: BareJob) -> None:
    async with create_channel(job.router_address, None) as channel, asyncio.TaskGroup() as group:
        for _ in range(_num_client_streams(job)):
            group.create_task(_read_one(channel))


async def _read_one(channel: grpc.aio.Channel) -> None:
    call: BareCall = channel.stream_stream(method_path(_METHOD))(wait_for_ready=True)
    while await call.read() is not grpc.aio.EOF:
        continue


async def _work(role: BareRole, job: BareJob, control: BareControl) -> None:
    """Play one process's part until the process is killed or fails."""
    if role is BareRole.CLIENT:
        await _read(job)
    elif role is BareRole.WORKER:
        await _serve(job.worker_address, _Worker(job.count, control), rest())
    else:
        router = _Router(job, control)
        await _serve(job.router_address, router, router.measure())


async def _serve(address: str, part: _Worker | _Router, work: Awaitable[None]) -> None:
    await serve(address, {_METHOD: grpc.stream_stream_rpc_method_handler(part.stream)}, work)


if __name__ == "__main__":
    run_bare_role(_work)
