"""The least that a relay in Python can cost: nothing but gRPC, paced like the real one, bytes passed on unread.

A worker writes one message a step; a router reads it and writes either one message to the only client stream
(``session``), or a small one to each of the tenth of its client streams whose turn it is (``generate``). No parsing, no
text, no metrics, no bookkeeping: what the real Router spends beyond this is its own.

    python -m benchmarks.relay_floor worker|router|client OPTIONS      (``measure_floor`` starts all three)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

import grpc
import uvloop

from benchmarks.paced_engine import PERIOD, STEP_S
from benchmarks.processes import process_cpu_s
from benchmarks.relay_job import Way
from benchmarks.relay_measure import Windows
from quartet.rpc.channels import create_channel
from quartet.rpc.server import RpcServer, ServerConfig, Service
from services.local_etcd import free_port

_SERVICE = "quartet.floor.Floor"
_PATH = f"/{_SERVICE}/Stream"
# A token of a step's message takes about so many bytes: slot, offset, count and id.
_BYTES_PER_TOKEN = 8
_TOKEN_BYTES = 12
_TIMEOUT_S = 60.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True)
class _Measured:
    """What the router says of itself: CPU microseconds for each token by window, and the tokens of all windows."""

    router_us: Sequence[float]
    num_tokens: float


class _Worker:
    """Writes one message a step to whoever opens a stream."""

    def __init__(self, num_streams: int) -> None:
        self._message = bytes(_BYTES_PER_TOKEN * num_streams // PERIOD)

    async def stream(self, _requests: object, context: _Context) -> None:
        due_at = time.monotonic()
        while True:
            due_at = max(due_at + STEP_S, time.monotonic())
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            await context.write(self._message)


class _Router:
    """Reads the worker's stream, and writes to its clients' streams."""

    def __init__(self, worker_address: str, num_streams: int, way: Way) -> None:
        self._worker_address = worker_address
        self._num_tokens_per_step = num_streams / PERIOD
        self._way = way
        self._num_client_streams = num_streams if way is Way.GENERATE else 1
        self._due: list[asyncio.Event] = []
        self._num_steps = 0
        self._all_connected = asyncio.Event()

    async def stream(self, _requests: object, context: _Context) -> None:
        due = asyncio.Event()
        self._due.append(due)
        if len(self._due) == self._num_client_streams:
            self._all_connected.set()
        message = bytes(
            _TOKEN_BYTES if self._way is Way.GENERATE else int(_BYTES_PER_TOKEN * self._num_tokens_per_step)
        )
        while True:
            await due.wait()
            due.clear()
            await context.write(message)

    async def measure(self, windows: Windows, on_begin: Callable[[], None]) -> _Measured:
        """Relay; ``on_begin`` is called when the first window does."""
        await self._all_connected.wait()
        async with create_channel(self._worker_address, None) as channel:
            relaying = asyncio.create_task(self._relay(channel))
            await asyncio.sleep(windows.warm_up_s)
            on_begin()
            first_step, found = self._num_steps, []
            for _ in range(windows.round_size):
                num_steps, cpu_s = self._num_steps, time.process_time()
                await asyncio.sleep(windows.window_s)
                num_tokens = (self._num_steps - num_steps) * self._num_tokens_per_step
                found.append(1e6 * (time.process_time() - cpu_s) / num_tokens)
            relaying.cancel()
        return _Measured(found, (self._num_steps - first_step) * self._num_tokens_per_step)

    async def _relay(self, channel: grpc.aio.Channel) -> None:
        call: _Call = channel.stream_stream(_PATH)(wait_for_ready=True)
        while await call.read() is not grpc.aio.EOF:
            turn = self._num_steps % PERIOD if self._way is Way.GENERATE else 0
            self._num_steps += 1
            for due in self._due[turn::PERIOD]:
                due.set()


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What the bare relay's router and worker spent for each token that passed; the worker's pacing counts in."""

    router_cpu_us_per_token: float
    decode_cpu_us_per_token: float


async def measure_floor(way: Way, num_streams: int, windows: Windows) -> Floor:
    """Start the three processes, and take the median of a round of windows.

    Raises:
        RuntimeError: one of them failed.
    """
    ports = {"worker": free_port(), "router": free_port()}
    options = {
        **{f"{role}-address": f"127.0.0.1:{port}" for role, port in ports.items()},
        "way": way,
        "streams": num_streams,
        "warm-up-s": windows.warm_up_s,
        "window-s": windows.window_s,
        "round-size": windows.round_size,
    }
    worker, router, client = [await _start(role, options) for role in ("worker", "router", "client")]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _read_line(router)  # it begins
            cpu_s = process_cpu_s(worker.pid)
            measured = _Measured(**json.loads(await _read_line(router)))
            cpu_s = process_cpu_s(worker.pid) - cpu_s
    finally:
        for process in (client, router, worker):
            if process.returncode is None:
                process.kill()
            await process.wait()
    return Floor(
        router_cpu_us_per_token=median(measured.router_us), decode_cpu_us_per_token=1e6 * cpu_s / measured.num_tokens
    )


async def _read_line(process: Process) -> bytes:
    assert process.stdout is not None, "made with a pipe"
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the bare relay ended without a figure")
    return line


async def _start(role: str, options: Mapping[str, object]) -> Process:
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.relay_floor", role, *arguments]
    # They end when their standard input does: with whoever started them.
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


async def _serve(address: str, part: _Worker | _Router, work: Coroutine[None, None, None]) -> None:
    """Serve ``part`` at ``address`` while ``work`` is done."""
    handler = grpc.method_handlers_generic_handler(
        _SERVICE, {"Stream": grpc.stream_stream_rpc_method_handler(part.stream)}
    )
    service = Service(_SERVICE, lambda server: server.add_generic_rpc_handlers((handler,)))
    server = RpcServer(ServerConfig(address=address), [service])
    await server.start()
    try:
        await work
    finally:
        await server.drain(0)


async def _read(router_address: str, num_streams: int) -> None:
    async with create_channel(router_address, None) as channel, asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(_read_one(channel))


async def _read_one(channel: grpc.aio.Channel) -> None:
    call: _Call = channel.stream_stream(_PATH)(wait_for_ready=True)
    while await call.read() is not grpc.aio.EOF:
        continue


async def _run(arguments: argparse.Namespace) -> None:
    work = asyncio.create_task(_work(arguments))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()


async def _work(arguments: argparse.Namespace) -> None:
    """One process's part; it goes on until the process is killed, unless it fails."""
    way = Way(arguments.way)
    if arguments.role == "client":
        await _read(arguments.router_address, arguments.streams if way is Way.GENERATE else 1)
    elif arguments.role == "worker":
        await _serve(arguments.worker_address, _Worker(arguments.streams), _rest())
    else:
        router = _Router(arguments.worker_address, arguments.streams, way)
        windows = Windows(
            warm_up_s=arguments.warm_up_s,
            window_s=arguments.window_s,
            round_size=arguments.round_size,
            num_rounds=1,
        )
        await _serve(arguments.router_address, router, _measure(router, windows))


async def _measure(router: _Router, windows: Windows) -> None:
    measured = await router.measure(windows, lambda: print("begin", flush=True))
    print(json.dumps(asdict(measured)), flush=True)
    await _rest()


async def _rest() -> None:
    """Wait to be killed."""
    await asyncio.Event().wait()


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay_floor")
    parser.add_argument("role", choices=("worker", "router", "client"))
    for name in ("worker-address", "router-address", "way"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("streams", "round-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("warm-up-s", "window-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
