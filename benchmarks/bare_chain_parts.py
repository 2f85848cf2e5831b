"""What the processes of ``benchmarks.bare_chain`` are made of: a thread, a server, streams, and a clock to read."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

#: As a single request comes: to processes and threads that have slept for a while.
PAUSE_S = 0.01

_SERVICE = "quartet.bare_chain"
_STAMP_BYTES = 8

Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "Callable[[object, Context], Awaitable[None]]"
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class _Job(Generic[ResultT]):
    work: Callable[[], ResultT]
    done: asyncio.Future[ResultT]


class StepThread:
    """A thread that waits as ``quartet.engine.step_engine.EngineThread`` does, and answers as that does."""

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


async def start_server(methods: Mapping[str, Handler]) -> grpc.aio.Server:
    """Serve ``methods``, streams of bytes both ways, and print the port."""
    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    return server


async def serve(methods: Mapping[str, Handler]) -> None:
    """As ``start_server``, until the input ends."""
    server = await start_server(methods)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


def open_stream(channel: grpc.aio.Channel, method: str) -> Call:
    """Open a stream of ``method``: bytes both ways."""
    return channel.stream_stream(f"/{_SERVICE}/{method}")(wait_for_ready=True)


async def read_bytes(stream: Call | Context) -> bytes:
    """The next message. Raises ``EOFError``: there is none any more."""
    message: object = await stream.read()
    if not isinstance(message, bytes):
        raise EOFError("the stream has ended")
    return message


def step() -> bytes:
    """A step of a prefill, for a thread: its end, as of ``stamp``."""
    time.sleep(PAUSE_S)
    return stamp()


def stamp() -> bytes:
    """Now, by the host's clock: one process's reading of it can be told from another's."""
    return time.monotonic_ns().to_bytes(_STAMP_BYTES, "big")


def after_stamp(message: bytes) -> bytes:
    """What follows the stamp that ``message`` begins with."""
    return message[_STAMP_BYTES:]


def between_ms(first: bytes, second: bytes) -> float:
    """Milliseconds between the stamps that two messages begin with."""
    return (_nanoseconds(second) - _nanoseconds(first)) / 1e6


def _nanoseconds(message: bytes) -> int:
    return int.from_bytes(message[:_STAMP_BYTES], "big")
