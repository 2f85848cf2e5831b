"""The three processes of ``benchmarks.bare_chain``: gRPC, an event loop, a thread, and nothing of Quartet.

    python -m benchmarks.bare_chain_processes prefill | decode PREFILL | router PREFILL DECODE

``prefill`` and ``decode`` print the port that they listen on. ``router`` makes one ``Sample`` for each line that it
reads, and prints it as JSON. All end when their input does; addresses are ``host:port``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import uvloop

_SERVICE = "quartet.bare_chain"
# As a single request comes: to processes and threads that have slept for a while.
_PAUSE_S = 0.01
# About as long as the messages of a request with a prompt of 128 tokens.
_START, _ANSWER_PADDING = bytes(1000), bytes(400)
_BEGIN, _GRANTED, _FINISH, _FINISHED = bytes(100), bytes(120), bytes(2), bytes(3)
_STAMP_BYTES = 8

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "Callable[[object, _Context], Any]"
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at what a machine makes such processes pay, each after a pause. In milliseconds.

    Attributes:
        chain_ms: from the end of the prefill's step to the beginning of the decode's, both in their threads.
        thread_change_ms: from an event loop to a thread that sleeps, and back.
        round_trip_ms: a message there and one back over an open stream.
    """

    chain_ms: float
    thread_change_ms: float
    round_trip_ms: float


@dataclass(frozen=True)
class _Job(Generic[ResultT]):
    work: Callable[[], ResultT]
    done: asyncio.Future[ResultT]


class _StepThread:
    """A thread that waits as ``quartet.engine.thread.EngineThread`` does, and answers as that does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[_Job[Any]] = deque()
        self._wake_up = threading.Event()
        threading.Thread(target=self._main, daemon=True).start()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """A change to the thread, ``work`` there, a change back."""
        job: _Job[ResultT] = _Job(work, self._loop.create_future())
        self._inbox.append(job)
        self._wake_up.set()
        return await job.done

    def _main(self) -> None:
        while True:
            if not self._inbox:
                self._wake_up.wait()
            self._wake_up.clear()
            for job in [self._inbox.popleft() for _ in range(len(self._inbox))]:
                self._loop.call_soon_threadsafe(job.done.set_result, job.work())


async def _run_prefill() -> None:
    thread = _StepThread()

    async def prefill(_requests: object, context: _Context) -> None:
        while await context.read() is not grpc.aio.EOF:
            stamp = await thread.run(_step)
            await context.write(stamp + _ANSWER_PADDING)

    async def pull(_requests: object, context: _Context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(_GRANTED if message == _BEGIN else _FINISHED)

    await _serve({"Prefill": prefill, "Pull": pull, "Echo": _echo})


async def _run_decode(prefill_address: str) -> None:
    thread = _StepThread()
    async with grpc.aio.insecure_channel(prefill_address) as channel:
        pull = _open(channel, "Pull")

        async def decode(_requests: object, context: _Context) -> None:
            while await context.read() is not grpc.aio.EOF:
                await thread.run(_nothing)
                answers = asyncio.ensure_future(_read_two(pull))
                await pull.write(_BEGIN)
                await pull.write(_FINISH)
                await answers
                await context.write(await thread.run(_stamp))

        await _serve({"Decode": decode})


async def _run_router(prefill_address: str, decode_address: str) -> None:
    thread = _StepThread()
    async with AsyncExitStack() as exits:
        to_prefill = await exits.enter_async_context(grpc.aio.insecure_channel(prefill_address))
        to_decode = await exits.enter_async_context(grpc.aio.insecure_channel(decode_address))
        prefill, decode, echo = _open(to_prefill, "Prefill"), _open(to_decode, "Decode"), _open(to_prefill, "Echo")
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            sample = Sample(
                chain_ms=await _chain_ms(prefill, decode),
                thread_change_ms=await _thread_change_ms(thread),
                round_trip_ms=await _round_trip_ms(echo),
            )
            print(json.dumps(asdict(sample)), flush=True)


async def _chain_ms(prefill: _Call, decode: _Call) -> float:
    await prefill.write(_START)
    answer: object = await prefill.read()
    await decode.write(_START)
    joined: object = await decode.read()
    # The clock is the host's: one process's reading of it can be told from another's.
    return (_read_stamp(joined) - _read_stamp(answer)) / 1e6


async def _thread_change_ms(thread: _StepThread) -> float:
    await asyncio.sleep(_PAUSE_S)
    began = time.perf_counter()
    await thread.run(_nothing)
    return 1e3 * (time.perf_counter() - began)


async def _round_trip_ms(echo: _Call) -> float:
    await asyncio.sleep(_PAUSE_S)
    began = time.perf_counter()
    await echo.write(_ANSWER_PADDING)
    await echo.read()
    return 1e3 * (time.perf_counter() - began)


async def _read_two(call: _Call) -> None:
    await call.read()
    await call.read()


async def _echo(_requests: object, context: _Context) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def _serve(methods: Mapping[str, _Handler]) -> None:
    """Serve until the input ends."""
    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


def _open(channel: grpc.aio.Channel, method: str) -> _Call:
    return channel.stream_stream(f"/{_SERVICE}/{method}")(wait_for_ready=True)


def _step() -> bytes:
    time.sleep(_PAUSE_S)
    return _stamp()


def _stamp() -> bytes:
    return time.monotonic_ns().to_bytes(_STAMP_BYTES, "big")


def _read_stamp(message: object) -> int:
    assert isinstance(message, bytes), "an open stream gives messages"
    return int.from_bytes(message[:_STAMP_BYTES], "big")


def _nothing() -> None:
    """Only the changes of thread."""


if __name__ == "__main__":
    _RUNS: Mapping[str, Callable[..., Any]] = {"prefill": _run_prefill, "decode": _run_decode, "router": _run_router}
    uvloop.run(_RUNS[sys.argv[1]](*sys.argv[2:]))
